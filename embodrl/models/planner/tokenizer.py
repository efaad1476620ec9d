"""A vocabulary of bytes: nothing to train, nothing to download. Token b is the byte b; those above are marks."""

from __future__ import annotations

import json
from collections.abc import Sequence

from embodrl.errors import EmbodrlError
from embodrl.models.common.chat import ROLES, Conversation, WrittenText

END = 256
PAD = 257
TOOLS = 258
ROLE_IDS = {role: 259 + number for number, role in enumerate(ROLES)}
VOCAB_SIZE = 263
_TOOLS = "tools"
_NAMES = {TOOLS: _TOOLS} | {number: role for role, number in ROLE_IDS.items()}
WRITABLE = END + 1
"""K: the policy chooses among the bytes and the end of its message."""


def encode(conversation: Conversation) -> list[int]:
    """Return the prompt: the tools as JSON, each message between its role and END, and the assistant's role."""
    ids: list[int] = []
    if conversation.tools:
        text = json.dumps(conversation.tools, separators=(",", ":"), ensure_ascii=False)
        ids += [TOOLS, *to_bytes(text), END]
    for role, text in conversation.messages:
        ids += [ROLE_IDS[role], *to_bytes(text), END]
    return [*ids, ROLE_IDS["assistant"]]


def read(ids: Sequence[int]) -> Conversation:
    """Return the conversation of a prompt, as ``encode`` writes it; bytes that are no UTF-8 become U+FFFD.

    Raises:
        EmbodrlError: the tokens are no prompt.
    """
    refused = EmbodrlError(
        "the tokens are no prompt of the planner",
        "write messages with their roles, each ended by END, and the assistant's role at the end",
        code="planner-prompt",
    )
    try:
        *parts, last = _parts(ids)
        marked = [(_NAMES.get(mark), text) for mark, text in parts]
        tools = tuple(json.loads(marked.pop(0)[1])) if marked and marked[0][0] == _TOOLS else ()
    except (ValueError, TypeError) as error:  # padding, or tools that are no JSON
        raise refused from error
    messages = tuple((name, text) for name, text in marked if name is not None)
    if last != (ROLE_IDS["assistant"], "") or not messages or any(name not in ROLES for name, _ in marked):
        raise refused
    return Conversation(messages, tools)


def _parts(ids: Sequence[int]) -> list[tuple[int, str]]:
    """Return the marks of a prompt (-1 for none), each with the text up to END."""
    found: list[tuple[int, list[int]]] = []
    for token in ids:
        if token in _NAMES:
            found.append((token, []))
        elif token != END:
            found = found or [(-1, [])]
            found[-1][1].append(token)
    return [(mark, bytes(text).decode("utf-8", errors="replace")) for mark, text in found] or [(-1, "")]


def decode(ids: list[int], prompt_tokens: int) -> WrittenText:
    """Return the message of written tokens, the last of which may be END."""
    return WrittenText(tuple(bytes([i]) for i in ids if i < END), END in ids, prompt_tokens)


def marked_text(ids: Sequence[int]) -> str:
    """Return the text of tokens, with marks as ``<|NAME|>``; it can't be read back."""
    names = {END: "end", PAD: "pad", **_NAMES}
    return b"".join(f"<|{names[token]}|>".encode() if token in names else bytes([token]) for token in ids).decode(
        "utf-8", errors="replace"
    )


def to_bytes(text: str) -> bytes:
    """Return the UTF-8 of a text."""
    # A lone surrogate, which JSON can hold, has no UTF-8.
    return text.encode("utf-8", errors="replace")
