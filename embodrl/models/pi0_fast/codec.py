"""FAST: action chunks as tokens.

Pertsch et al., "FAST: Efficient Action Tokenization for Vision-Language-Action Models", 2025. Each dimension goes
through a discrete cosine transform over the chunk; coefficients are scaled, rounded, written as one character each, low
frequencies of all dimensions first, and byte-pair encoded. Files are those of the public processors, whose code is not
run: tokenizer.json, and processor_config.json with scale and offset.
Shapes: B batch, H actions in a chunk, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import read_file
from embodrl.models.common.tokenizer import read_tokenizer

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "processor_config.json"
TINY_CODEC = Path(__file__).parent / "tiny_codec"
_LAST_CHARACTER = 0xD7FF
"""Later code points (surrogates) can't be encoded."""
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class ActionCodec:
    """Maps normalised actions to tokens and back.

    Args:
        tokenizer: byte-pair encoding of the characters.
        scale: scale of the coefficients; they are rounded to steps of 1 / scale.
        min_coefficient: scaled coefficient of character 0; lower ones are clipped.
    """

    def __init__(self, tokenizer: Tokenizer, scale: float, min_coefficient: int) -> None:
        self.tokenizer = tokenizer
        self.scale = scale
        self.min_coefficient = min_coefficient
        self.num_codes = tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, chunks: NDArray[np.floating]) -> list[list[int]]:
        """Return the tokens of each chunk of ``[B,H,A]``."""
        coefficients = np.around(cosines(chunks.shape[1]) @ np.asarray(chunks, np.float64) * self.scale)
        places = np.clip(coefficients - self.min_coefficient, 0, _LAST_CHARACTER).astype(np.int64)
        texts = ["".join(map(chr, row)) for row in places.reshape(len(chunks), -1).tolist()]
        return [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def decode(self, codes: Sequence[Sequence[int]], horizon: int, dims: int) -> NDArray[np.float64]:
        """Return actions ``[B,H,A]``; every sequence is valid.

        As in lerobot, missing coefficients are 0 and excess ones are dropped. Bytes that form no character, for which
        the public decoders return coefficients of several thousand, are 0 as well.
        """
        coefficients = np.zeros((len(codes), horizon * dims))
        for row, sequence in zip(coefficients, codes, strict=True):
            text = self.tokenizer.decode(list(sequence), skip_special_tokens=False)[: len(row)]
            row[: len(text)] = [0 if c == _NO_CHARACTER else ord(c) + self.min_coefficient for c in text]
        return cosines(horizon).T @ (coefficients.reshape(len(codes), horizon, dims) / self.scale)

    def save(self, directory: Path) -> None:
        """Write both files into a directory, creating it."""
        directory.mkdir(parents=True)
        self.tokenizer.save(str(directory / TOKENIZER_FILE))
        settings = {
            "processor_class": "UniversalActionProcessor",
            "scale": self.scale,
            "min_token": self.min_coefficient,
            "vocab_size": self.num_codes,
            "action_dim": None,
            "time_horizon": None,
        }
        checkpoint.write_json(directory / SETTINGS_FILE, settings)


def read_codec(directory: Path) -> ActionCodec:
    """Return the codec in a directory; raise ``PolicyFileError`` if a file is missing or invalid."""
    settings = read_file(directory / SETTINGS_FILE)
    scale = settings.number("scale", low=1e-3, high=1e6)
    lowest = settings.integer("min_token", low=-_LAST_CHARACTER, high=_LAST_CHARACTER)
    return ActionCodec(read_tokenizer(directory / TOKENIZER_FILE), scale, lowest)


@lru_cache(maxsize=16)
def cosines(length: int) -> NDArray[np.float64]:
    """Return the orthonormal DCT-II matrix ``[H,H]``: row k is the cosine of k half waves over the chunk."""
    frequency = np.arange(length)[:, None]
    place = np.arange(length)[None] + 0.5
    matrix = np.sqrt(2.0 / length) * np.cos(np.pi * frequency * place / length)
    matrix[0] = np.sqrt(1.0 / length)
    return matrix
