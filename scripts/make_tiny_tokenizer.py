"""Write the tokenizer of the tiny OpenVLA: byte-level BPE whose merges come from prompts about manipulation.

Every text can be encoded (all 256 bytes are in the vocabulary); texts like the prompts take few tokens.
Run from the repository root: ``python scripts/make_tiny_tokenizer.py``.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TARGET = Path(__file__).parent.parent / "embodrl" / "models" / "common" / "tiny_tokenizer.json"
VOCAB_SIZE = 768  # a multiple of 64, so that action and padding ids follow OpenVLA's rule exactly
SPECIAL = ["<unk>", "<s>", "</s>"]
PROMPT = "In: What action should the robot take to {}?\nOut:"
WORDS = """
push pull pick place stack lift move put open close turn rotate press slide insert grasp grab reach touch hold drop
take bring carry pour wipe fold hang plug unplug poke roll balance align sort
cube box block ball sphere peg bottle cup mug bowl plate pot pan can lid drawer door cabinet faucet handle button
switch lever charger hole goal target region circle line table shelf basket tray bin robot gripper hand arm tool
stick towel cloth book apple banana orange carrot eggplant spoon fork knife tomato sauce soup cheese butter milk
red green blue yellow orange black white grey gray purple pink brown wooden metal small large big little
left right front back top bottom upright upside down side center middle inside outside near far away toward towards
onto into over under on in at to of the a an and it its up from off with until that is so then stands standing
forward backward upwards downwards vertically horizontally position place marked first second other both all
""".split()


def corpus() -> list[str]:
    """Return the texts that merges are learned from; the template outweighs single words."""
    return [PROMPT.format(f"{word} the {word}") for word in WORDS for _ in range(3)]


def main() -> None:
    """Train and write the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.save(str(TARGET))
    encoded = tokenizer.encode(PROMPT.format("push the cube to the goal"))
    print(f"{TARGET}: {VOCAB_SIZE} tokens; a prompt takes {len(encoded.ids)}: {encoded.tokens}")


if __name__ == "__main__":
    main()
