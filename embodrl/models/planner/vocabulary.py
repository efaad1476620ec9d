"""What a planner's tokens mean: prompts to tokens, tokens to messages, and the tokens of required calls.

Shapes: K tokens that may be written.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from embodrl.models.common.chat import Conversation, WrittenText
from embodrl.models.planner import tokenizer

Speller = Callable[[int], bytes]
"""Returns the bytes that the next token adds, which is no end; none while a character lacks tokens."""


@dataclass
class TextPrefix:
    """A place in the texts that are permitted: the tokens that may follow, and where they lead."""

    following: dict[int, TextPrefix] = field(default_factory=dict[int, "TextPrefix"])


@dataclass(frozen=True)
class CallTree:
    """The prefix tree of permitted texts, each ended, those texts, and the tokens of the longest."""

    root: TextPrefix
    texts: tuple[tuple[int, ...], ...]
    longest: int

    @staticmethod
    def of(texts: Iterable[Sequence[int]]) -> CallTree:
        """Return the tree of texts, given as tokens with their end."""
        root = TextPrefix()
        listed = tuple(tuple(text) for text in texts)
        for text in listed:
            node = root
            for token in text:
                node = node.following.setdefault(token, TextPrefix())
        return CallTree(root, listed, max(map(len, listed), default=0))


class Vocabulary(ABC):
    """Tokens of a language model.

    Args:
        size: K; the tokens that may be written are those below.
        ends: tokens that end a message; the first one ends required calls.
        pad: token where nothing is written.

    Attributes:
        tree: the ``CallTree`` of a tuple of calls, kept for the last few.
        whole_noise: whether a token is drawn with K random numbers instead of one.
    """

    def __init__(self, size: int, ends: tuple[int, ...], pad: int, whole_noise: bool) -> None:
        self.size = size
        self.ends = ends
        self.pad = pad
        self.whole_noise = whole_noise
        self.tree = functools.lru_cache(maxsize=16)(self._tree)

    def _tree(self, calls: tuple[str, ...]) -> CallTree:
        return CallTree.of([*self.spell(call), self.ends[0]] for call in calls)

    @abstractmethod
    def encode(self, conversation: Conversation) -> list[int]:
        """Return the prompt of a conversation, which the answer follows."""

    @abstractmethod
    def spell(self, call: str) -> list[int]:
        """Return the tokens of a call (``ToolCall.to_text``), without the end."""

    @abstractmethod
    def decode(self, ids: list[int], prompt_tokens: int) -> WrittenText:
        """Return the message of written tokens, the last of which may end it."""

    @abstractmethod
    def speller(self) -> Speller:
        """Return what spells the tokens of one message while it is written."""

    def meaning(self) -> tuple[object, ...]:
        """Return what is equal for vocabularies whose tokens mean the same."""
        return type(self), self.size, self.ends

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the files that the tokens are read from."""


class ByteVocabulary(Vocabulary):
    """Bytes; see ``planner.tokenizer``."""

    def __init__(self) -> None:
        super().__init__(tokenizer.WRITABLE, (tokenizer.END,), tokenizer.PAD, whole_noise=True)

    def encode(self, conversation: Conversation) -> list[int]:
        return tokenizer.encode(conversation)

    def spell(self, call: str) -> list[int]:
        return list(tokenizer.to_bytes(call))

    def decode(self, ids: list[int], prompt_tokens: int) -> WrittenText:
        return tokenizer.decode(ids, prompt_tokens)

    def speller(self) -> Speller:
        return lambda token: bytes([token])

    def save(self, directory: Path) -> None:
        """Write nothing: bytes need no files."""
