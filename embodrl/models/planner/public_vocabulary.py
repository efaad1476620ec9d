"""Tokens and prompts of public language models: tokenizer.json and its chat template, read by transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.models.common import checkpoint
from embodrl.models.common.chat import (
    Conversation,
    ToolCall,
    WrittenText,
    numbered,
    parse_calls,
    said_before_calls,
    tagged,
)
from embodrl.models.common.config_file import CONFIG_FILE, read_file
from embodrl.models.common.tokenizer import read_tokenizer
from embodrl.models.planner.vocabulary import Speller, Vocabulary

GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
_EOS = "eos_token_id"
_TODAY = datetime.date(2024, 7, 26)
"""What templates that ask for the date get, Llama 3.1's own default: prompts must not differ from day to day."""
_TOOLS = (
    "You may call one of these functions, whose signatures are JSON:\n{}\n"
    'To call it, write <tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n</tool_call>'
)
"""Told to models whose template takes no tools."""


class PublicVocabulary(Vocabulary):
    """The tokenizer of a directory, with its chat template; without one, messages are ``role: text`` lines.

    Calls are written as ``<tool_call>{...}</tool_call>``, unless the template takes tools and has no such marks: then
    as JSON alone. Thinking is switched off in templates that can.

    Args:
        directory: a language model's directory.
        vocab_size: rows of its embedding.

    Raises:
        CheckpointError: the directory has no tokenizer (``planner-tokenizer``), or one with more tokens than the model
            (``planner-vocabulary``), or nothing says which token ends a message (``planner-no-end``).
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        path = directory / TOKENIZER_FILE
        self._tokenizer: Any = _read(path)
        count = max(self._tokenizer.get_vocab().values()) + 1
        if count > vocab_size:
            raise CheckpointError(
                f"{path} has {count} tokens, but the model has {vocab_size}",
                "use the model's own tokenizer",
                code="planner-vocabulary",
            )
        file = directory / GENERATION_FILE
        self._generation = dict(read_file(file).content) if file.is_file() else {}
        configured = self._generation.get(_EOS, read_file(directory / CONFIG_FILE).content.get(_EOS))
        listed = configured if isinstance(configured, list) else [configured]
        ends = dict.fromkeys([self._tokenizer.eos_token_id, *listed])
        known = tuple(end for end in ends if isinstance(end, int) and 0 <= end < count)
        if not known:
            raise CheckpointError(
                f"{directory}: no file names a token that ends a message",
                f"set eos_token_id in {GENERATION_FILE} to a token of the tokenizer",
                code="planner-no-end",
            )
        super().__init__(count, known, known[0], whole_noise=False)
        template = self._tokenizer.chat_template or ""
        self._takes_tools = "tools" in template
        self._tags = "<tool_call>" in template or not self._takes_tools

    def encode(self, conversation: Conversation) -> list[int]:
        """Return the prompt of a conversation.

        Raises:
            EmbodrlError: the template refuses the conversation (``planner-template``).
        """
        messages = self._messages(conversation)
        if not self._tokenizer.chat_template:
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
            return self._ids("".join([*lines, "assistant:"]), add_special_tokens=True)
        tools = [{"type": "function", "function": tool} for tool in conversation.tools] if self._takes_tools else []
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=False,
                strftime_now=_TODAY.strftime,
            )
        except Exception as error:  # a template may raise anything
            raise EmbodrlError(
                f"the chat template refuses the conversation: {error}",
                "give the roles and the order that the model's template permits",
                code="planner-template",
            ) from error
        return self._ids(text, add_special_tokens=False)

    def spell(self, call: str) -> list[int]:
        (found,) = parse_calls(call)
        return self._ids(self._written(found), add_special_tokens=False)

    def decode(self, ids: list[int], prompt_tokens: int) -> WrittenText:
        ended = bool(ids) and ids[-1] in self.ends
        return WrittenText(tuple(self._pieces(ids[:-1] if ended else ids)), ended, prompt_tokens)

    def speller(self) -> Speller:
        return _Speller(self._text).add

    def meaning(self) -> tuple[object, ...]:
        return *super().meaning(), self._tokenizer.get_vocab()

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(directory)
        if self._generation:
            checkpoint.write_json(directory / GENERATION_FILE, self._generation)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # A lone surrogate, which JSON can hold, has no UTF-8.
        clean = text.encode("utf-8", errors="replace").decode()
        return list(self._tokenizer(clean, add_special_tokens=add_special_tokens)["input_ids"])

    def _written(self, call: ToolCall) -> str:
        text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        return tagged(text) if self._tags else text

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Return messages as templates take them; for those without tools all is text of system, user, assistant."""
        messages = numbered([self._message(role, text) for role, text in conversation.messages])
        if conversation.tools and not self._takes_tools:
            about = _TOOLS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in conversation.tools))
            if messages[0]["role"] == "system":
                about = f"{messages.pop(0)['content']}\n\n{about}"
            messages.insert(0, {"role": "system", "content": about})
        return messages

    def _message(self, role: str, text: str) -> dict[str, Any]:
        calls = parse_calls(text) if role == "assistant" else ()
        if calls and self._takes_tools:
            functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
            listed = [{"type": "function", "function": function} for function in functions]
            return {"role": role, "content": said_before_calls(text), "tool_calls": listed}
        if calls:
            said = said_before_calls(text)
            return {"role": role, "content": "\n".join([*([said] if said else []), *map(self._written, calls)])}
        if role == "tool" and not self._takes_tools:
            return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
        return {"role": role, "content": text}

    def _pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token adds; those of a character in several tokens belong to its last."""
        speller = _Speller(self._text)
        pieces = [speller.add(token) for token in ids]
        if pieces:
            pieces[-1] += speller.rest()
        return pieces

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class _Speller:
    """Text of tokens one by one. What stands well before is not decoded again: a text depends on few tokens before."""

    def __init__(self, text_of: Callable[[Sequence[int]], str]) -> None:
        self._text_of = text_of
        self._ids: list[int] = []
        self._read = 0  # tokens of ``_ids`` whose text was returned

    def add(self, token: int) -> bytes:
        """Return the bytes that a token adds; none while a character lacks tokens."""
        self._ids.append(token)
        now = self._text_of(self._ids)
        if now.endswith("\ufffd"):
            return b""
        piece = self._after(now)
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return piece

    def rest(self) -> bytes:
        """Return the bytes of a character that has no more tokens."""
        return self._after(self._text_of(self._ids))

    def _after(self, now: str) -> bytes:
        return now[len(self._text_of(self._ids[: self._read])) :].encode()


def _read(path: Path) -> Any:
    """Return the tokenizer of a directory."""
    from transformers import AutoTokenizer

    hint = "give a directory that also has the files of the model's tokenizer, tokenizer.json among them"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", hint, code="planner-tokenizer")
    read_tokenizer(path)  # refuses damaged files
    try:
        return AutoTokenizer.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for content that does not fit
        message = f"transformers can't read the tokenizer of {path.parent}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(message, hint, code="planner-tokenizer") from error
