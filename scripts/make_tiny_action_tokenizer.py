"""Write the action tokenizer of the tiny pi0-FAST: merges learned from smooth random chunks of 5 actions.

Run from the repository root: ``python scripts/make_tiny_action_tokenizer.py``.
"""

from __future__ import annotations

import shutil

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from embodrl.models.pi0_fast.codec import TINY_CODEC, ActionCodec, cosines

VOCAB_SIZE = 384
SCALE, MIN_COEFFICIENT = 10, -40  # all coefficients of actions of [-1, 1] are one byte
NUM_CHUNKS, HORIZON = 20_000, 5


def corpus() -> list[str]:
    """Return chunks as text: each dimension still, constant, or from one value to another; the last a gripper."""
    rng = np.random.default_rng(0)
    shape = (NUM_CHUNKS, 1, 7)
    begin, end = rng.uniform(-1, 1, shape), rng.uniform(-1, 1, shape)
    kind = rng.integers(0, 3, shape)
    steps = np.linspace(0, 1, HORIZON)[:, None]
    chunks = np.where(kind == 0, 0.0, begin + np.where(kind == 2, steps * (end - begin), 0.0 * steps))
    chunks[..., -1] = np.sign(begin[..., -1])
    places = np.around(cosines(HORIZON) @ chunks * SCALE).astype(int) - MIN_COEFFICIENT
    return ["".join(map(chr, row)) for row in places.reshape(NUM_CHUNKS, -1).tolist()]


def main() -> None:
    """Train and write the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    texts = corpus()
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    shutil.rmtree(TINY_CODEC, ignore_errors=True)
    ActionCodec(tokenizer, SCALE, MIN_COEFFICIENT).save(TINY_CODEC)
    lengths = [len(tokenizer.encode(text).ids) for text in texts[:1000]]
    print(f"{TINY_CODEC}: a chunk of {HORIZON * 7} numbers takes {np.mean(lengths):.1f} tokens, at most {max(lengths)}")


if __name__ == "__main__":
    main()
