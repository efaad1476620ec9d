"""PaliGemma's tokenizer, which pi0 and pi0.5 checkpoints lack, or the small one that embodrl ships."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from embodrl.errors import CheckpointError, MissingDependencyError, PolicyFileError
from embodrl.fields import MAX_JSON_BYTES, read_regular_file
from embodrl.models.common.limits import check_vocabulary
from embodrl.models.common.tokenizer import TINY_TOKENIZER, read_tokenizer
from embodrl.models.flow.fetched_tokenizer import fetch_tokenizer
from embodrl.models.openpi.stats import lerobot_steps

JSON_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
PALIGEMMA = "google/paligemma-3b-pt-224"
_BOS = ("<bos>", "<s>")
_PICTURE = "<image>"


class TextTokenizer(ABC):
    """Encodes text without start and end tokens; ``bos_id`` begins a prompt."""

    bos_id: int
    vocab_size: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of the text alone."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the tokenizer's file."""


class JsonTokenizer(TextTokenizer):
    """A tokenizer stored as tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = read_tokenizer(path)
        known = [self._tokenizer.token_to_id(token) for token in _BOS]
        bos = next((token_id for token_id in known if token_id is not None), None)
        if bos is None:
            raise CheckpointError(
                f"{path} has no {' or '.join(_BOS)}", f"use the tokenizer of {PALIGEMMA}", code="tokenizer-mismatch"
            )
        self.bos_id = bos
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # transformers appends it to PaliGemma's vocabulary as image placeholder; no embedding has a row for it.
        self.vocab_size = size - (self._tokenizer.token_to_id(_PICTURE) == size - 1)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def save(self, directory: Path) -> None:
        self._tokenizer.save(str(directory / JSON_FILE))


class SentencePieceTokenizer(TextTokenizer):
    """A tokenizer stored as tokenizer.model; needs the package sentencepiece."""

    def __init__(self, path: Path) -> None:
        self._model = read_regular_file(path, MAX_JSON_BYTES, follow_links=True)
        try:
            self._processor: Any = importlib.import_module("sentencepiece").SentencePieceProcessor(
                model_proto=self._model
            )
        except ImportError as error:
            raise MissingDependencyError(
                f"{path} can't be read without sentencepiece",
                f"pip install sentencepiece, or put {JSON_FILE} of {PALIGEMMA} next to it",
            ) from error
        except RuntimeError as error:
            raise PolicyFileError(f"{path} is not a tokenizer: {error}", "fetch the file again") from error
        self.bos_id = self._processor.bos_id()
        self.vocab_size = self._processor.get_piece_size()

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def save(self, directory: Path) -> None:
        (directory / SENTENCEPIECE_FILE).write_bytes(self._model)


def load_tokenizer(directory: Path, vocab_size: int) -> TextTokenizer:
    """Return the tokenizer of a checkpoint, or PaliGemma's from the hub, since public checkpoints omit it.

    Args:
        directory: directory with tokenizer.json or tokenizer.model; else lerobot's policy_preprocessor.json may name
            the tokenizer's repository.
        vocab_size: rows of the model's embedding.

    Raises:
        CheckpointError: there is no tokenizer and it can't be fetched, or it is corrupt or another model's.
        MissingDependencyError: there is only tokenizer.model, but sentencepiece is not installed.
    """
    tokenizer: TextTokenizer
    if (directory / JSON_FILE).is_file():
        tokenizer = JsonTokenizer(directory / JSON_FILE)
    elif (directory / SENTENCEPIECE_FILE).is_file():
        tokenizer = SentencePieceTokenizer(directory / SENTENCEPIECE_FILE)
    else:
        repository = hub_name(directory)
        hint = (
            f"put {JSON_FILE} of {repository}, or big_vision's paligemma_tokenizer.model as {SENTENCEPIECE_FILE}, in"
            f" {directory}; to fetch it, accept its licence on the hub and log in (`hf auth login`)"
        )
        tokenizer = JsonTokenizer(fetch_tokenizer(repository, [JSON_FILE], directory, hint) / JSON_FILE)
    check_vocabulary(directory, tokenizer.vocab_size, vocab_size, f"use the tokenizer of {PALIGEMMA}")
    return tokenizer


def hub_name(directory: Path) -> str:
    """Return a checkpoint's tokenizer repository: the one named by lerobot's file, or PaliGemma."""
    names = [step.fields("config", {}).text("tokenizer_name", "") for step in lerobot_steps(directory)]
    return next((name for name in names if name), PALIGEMMA)


def with_line_feed(instruction: str) -> str:
    """Return an instruction that ends in a line feed, as in lerobot's processors for pi0 and SmolVLA."""
    return instruction if instruction.endswith("\n") else f"{instruction}\n"


def tiny_tokenizer() -> TextTokenizer:
    """Return the shipped tokenizer."""
    return JsonTokenizer(TINY_TOKENIZER)
