"""Conversations with a policy that writes text, and the tool calls in what it writes.

Messages and tools have the form of OpenAI's chat API: ``{"role": ..., "content": ...}``, and ``{"type": "function",
"function": {"name": ..., "description": ..., "parameters": JSON schema}}``. A call is a whole message that is one JSON
object, ``{"name": "reach", "arguments": {"colour": "red"}}``, or one such object in each ``<tool_call>...</tool_call>``
of a message, as Qwen and Hermes write them, perhaps after a text. Imports no torch.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from embodrl.errors import EmbodrlError

ROLES = ("system", "user", "assistant", "tool")
MAX_CALLS = 4096
"""Largest number of different calls among which a required call is decoded."""
MAX_CALL_CHARS = 2**18
"""Largest number of characters of all these calls together, which a small request could multiply."""
_MARK = "embodrl-conversation:"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()

Message = Mapping[str, Any]
ToolChoice = Literal["auto", "required"]


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, object]

    def to_text(self) -> str:
        """Return the call as a policy writes it."""
        return _compact({"name": self.name, "arguments": self.arguments})


@dataclass(frozen=True)
class WrittenText:
    """A message as its policy wrote it.

    Attributes:
        tokens: the bytes of each token, without a mark of the end.
        ended: the policy ended the message; False if it was stopped.
        prompt_tokens: tokens of the conversation before it.
        has_its_call: it was stopped behind the one call that was permitted, and not at a limit.
        stopped_after: number of tokens up to the end of the stop sequence before which it was cut; None without one.
    """

    tokens: tuple[bytes, ...]
    ended: bool
    prompt_tokens: int
    has_its_call: bool = False
    stopped_after: int | None = None

    @property
    def text(self) -> str:
        """The message; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.tokens).decode("utf-8", errors="replace")

    @property
    def is_whole(self) -> bool:
        """Whether it ended before the limit of its length."""
        return self.ended or self.has_its_call or self.stopped_after is not None

    @property
    def written_tokens(self) -> int:
        """Number of tokens, with the mark of the end or the stop sequence."""
        return len(self.tokens) + self.ended if self.stopped_after is None else self.stopped_after

    def before(self, stops: Sequence[str]) -> WrittenText:
        """Return what stands before the stop sequence that ends first; a token with its beginning loses that."""
        whole = b"".join(self.tokens)
        found = [(whole.index(stop) + len(stop), whole.index(stop)) for stop in map(str.encode, stops) if stop in whole]
        if not found:
            return self
        stop_end, cut = min(found)
        tokens: list[bytes] = []
        ends = list(itertools.accumulate(map(len, self.tokens)))
        for token, end in zip(self.tokens, ends, strict=True):
            kept = token[: max(0, len(token) - max(0, end - cut))]
            if not kept and end > cut:
                break
            tokens.append(kept)
        after = 1 + next(number for number, end in enumerate(ends) if end >= stop_end)
        return WrittenText(tuple(tokens), False, self.prompt_tokens, stopped_after=after)

    def tokens_of_one_call(self) -> int:
        """Return how many tokens lead to the end of the first marked call; all without one."""
        text = b""
        for number, token in enumerate(self.tokens, 1):
            text += token
            if _CLOSE.encode() in text and parse_calls(text.decode("utf-8", errors="replace")):
                return number
        return len(self.tokens)


@dataclass(frozen=True)
class TokenRules:
    """What a client asks of the tokens of a message, besides the temperature, as in OpenAI's API.

    Attributes:
        top_p: keep the most probable tokens that together have this probability; 1 keeps all.
        presence_penalty: subtracted from the logits of tokens that the message has.
        frequency_penalty: subtracted once for each time that it has them.
    """

    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass(frozen=True)
class LiveToken:
    """A token of a message that is not complete.

    Attributes:
        place: its number in the message, from 0.
        data: its bytes; those of a character in several tokens belong to the last of these.
        logprob: its log-prob.
    """

    place: int
    data: bytes
    logprob: float


@dataclass(frozen=True)
class Conversation:
    """What a policy answers to.

    Attributes:
        messages: pairs of a role of ``ROLES`` and a text.
        tools: the functions that it may call, without OpenAI's envelope.
        call: the calls among which the answer must be; empty if it is free.
    """

    messages: tuple[tuple[str, str], ...]
    tools: tuple[dict[str, object], ...] = ()
    calls: tuple[str, ...] = ()

    @staticmethod
    def of(
        messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, choice: ToolChoice = "auto"
    ) -> Conversation:
        """Return the conversation of a request.

        With ``required`` the answer is one of the tools' calls, so the arguments of each must have finitely many values
        (``enum``, ``const``, a boolean, or an integer with minimum and maximum). Results that name their calls
        (``tool_call_id``) stand in the order of the calls: prompts have no random ids.

        Raises:
            EmbodrlError: a message or tool has another form, results do not fit their calls, or a required call can't
                be enumerated.
        """
        functions = tuple(_function(tool) for tool in tools or ())
        if choice not in ("auto", "required"):
            raise _refused(f"there is no tool choice '{choice}'", "set it to auto or required")
        if choice == "required" and not functions:
            raise _refused("a tool call is required, and there are no tools", "give tools, or leave tool_choice out")
        if not messages:
            raise _refused("a conversation has no messages", "give at least one message of the user")
        calls = tuple(_calls(functions)) if choice == "required" else ()
        if choice == "required" and not calls:
            raise _refused("a tool call is required, but an argument has no value", "correct minimum and maximum")
        return Conversation(tuple(map(_message, _ordered(messages))), functions, calls)

    def to_text(self) -> str:
        """Return the conversation as one text, which ``read`` reads."""
        return _MARK + _compact({"messages": self.messages, "tools": self.tools, "calls": self.calls})

    @staticmethod
    def read(text: str) -> Conversation:
        """Return the conversation in a text of ``to_text``; any other text is one message of the user."""
        if not text.startswith(_MARK):
            return Conversation((("user", text),))
        content = json.loads(text[len(_MARK) :])
        messages = tuple((role, said) for role, said in content["messages"])
        return Conversation(messages, tuple(content["tools"]), tuple(content["calls"]))


def parse_calls(text: str) -> tuple[ToolCall, ...]:
    """Return the calls in a text's ``<tool_call>`` marks, or the call that it is; none if anything is no call."""
    whole = _parsed(text)
    if whole is not None:
        return (whole,)
    calls: list[ToolCall] = []
    rest = text.partition(_OPEN)[2]
    while rest:  # marks within an argument are part of its string
        try:
            found, end = _DECODER.raw_decode(rest.lstrip())
        except (ValueError, RecursionError):
            return ()
        call, after = _call_of(found), rest.lstrip()[end:].lstrip()
        if call is None or not after.startswith(_CLOSE):
            return ()
        calls.append(call)
        rest = after.removeprefix(_CLOSE).partition(_OPEN)[2]
    return tuple(calls)


def said_before_calls(text: str) -> str:
    """Return what stands before the marked calls of a text; "" if it is a call."""
    before, mark, _ = text.partition(_OPEN)
    mark = "" if _parsed(text) is not None else mark
    return before.rstrip() if mark else ""


def text_before_stops(text: str, stops: Sequence[str]) -> str:
    """Return what can be sent of an unfinished message: all before a stop sequence, or what may become one."""
    if found := [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]:
        return text[: min(found)[1]]
    return text[: len(text) - max((_begun(text, stop) for stop in stops), default=0)]


def certain_text(text: str) -> str:
    """Return the beginning of an unfinished message that is text, and part of no call, however the message goes on."""
    if text.lstrip()[:1] in ("", "{"):  # perhaps a call as a whole
        return ""
    before, mark, _ = text.partition(_OPEN)
    if not mark:
        before = text[: len(text) - _begun(text, _OPEN)]
    return before.rstrip()  # as ``said_before_calls``


def _begun(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    return next((count for count in range(len(mark) - 1, 0, -1) if text.endswith(mark[:count])), 0)


def tagged(call: str) -> str:
    """Return a call between the marks of Qwen and Hermes."""
    return f"{_OPEN}\n{call}\n{_CLOSE}"


def numbered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give calls their numbers as ids, of nine characters as Mixtral's template demands, and results those of calls."""
    made = itertools.count()
    waiting: Iterator[str] = iter(())
    for message in messages:
        if calls := message.get("tool_calls"):
            for call in calls:
                call["id"] = f"call{next(made):05d}"
            waiting = iter([call["id"] for call in calls])
        elif message["role"] == "tool" and (name := next(waiting, None)) is not None:
            message["tool_call_id"] = name
    return messages


def _parsed(text: str) -> ToolCall | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _call_of(found)


def _call_of(found: object) -> ToolCall | None:
    # Llama 3 calls them parameters.
    if not isinstance(found, dict) or found.keys() not in ({"name", "arguments"}, {"name", "parameters"}):
        return None
    name, arguments = found["name"], found.get("arguments", found.get("parameters"))
    return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _message(message: Message) -> tuple[str, str]:
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if role not in ROLES:
        raise _refused(f"a message has the role {role!r}", f"give one of {', '.join(ROLES)}")
    if role == "assistant" and isinstance(calls, Sequence) and calls and (content is None or isinstance(content, str)):
        texts = [_past_call(call).to_text() for call in calls]
        if content:
            return role, "\n".join([content, *map(tagged, texts)])
        return role, texts[0] if len(texts) == 1 else "\n".join(map(tagged, texts))
    if not isinstance(content, str):
        hint = "give text; the only other content is None, of an assistant's message with tool calls"
        raise _refused(f"a message of the {role} has the content {content!r:.60}", hint)
    return role, content


def _ordered(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results of tools in the order of their calls."""
    found: list[Message] = []
    ids: list[object] = []
    for are_results, run in itertools.groupby(messages, lambda message: message.get("role") == "tool"):
        part = list(run)
        found += _results(part, ids) if are_results and any(ids) else part
        calls = part[-1].get("tool_calls")
        listed = cast("Sequence[object]", calls) if isinstance(calls, Sequence) else ()
        ids = [call.get("id") if isinstance(call, Mapping) else None for call in listed]
    return found


def _results(results: list[Message], ids: list[object]) -> list[Message]:
    """Return results in the order of the ids of calls; those that name no call stay as they are."""
    named = [result.get("tool_call_id") for result in results]
    if not any(named):
        return results
    hint = "answer each call once, by a message of the tool with its tool_call_id"
    for name in named:
        if name not in ids or named.count(name) > 1:
            raise _refused(f"a tool's result is for the call {name!r:.60}, which waits for none", hint)
    if len(named) < len(ids):
        raise _refused(f"a message has {len(ids)} tool calls, and {len(named)} results follow", hint)
    return sorted(results, key=lambda result: ids.index(result["tool_call_id"]))


def _past_call(call: Any) -> ToolCall:
    try:
        function = call["function"]
        arguments = function["arguments"]
        return ToolCall(str(function["name"]), json.loads(arguments) if isinstance(arguments, str) else arguments)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        hint = "give {'function': {'name': ..., 'arguments': JSON}}"
        raise _refused(f"a past tool call is {call!r:.60}", hint) from error


def _function(tool: Mapping[str, Any]) -> dict[str, object]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):  # pyright: ignore[reportUnknownMemberType]
        hint = "give {'type': 'function', 'function': {'name': ..., 'parameters': ...}}, or an embodrl.Tool"
        raise _refused(f"a tool is {tool!r:.60}", hint)
    given = cast("Mapping[str, object]", function)
    schema = given.get("parameters") or {"type": "object", "properties": {}}
    if not _is_schema(schema):
        hint = "give {'type': 'object', 'properties': {NAME: schema}, 'required': [NAME]}"
        raise _refused(f"the parameters of '{given['name']}' are {schema!r:.60}", hint)
    return {"name": given["name"], "description": given.get("description") or "", "parameters": schema}


def _is_schema(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return False
    found = cast("Mapping[str, Any]", schema)
    properties, required = found.get("properties", {}), found.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, (list, tuple)):
        return False
    return all(isinstance(about, Mapping) for about in cast("Mapping[str, object]", properties).values())


def _calls(functions: Sequence[dict[str, object]]) -> Iterator[str]:
    """Yield every call of the functions, in the order of their properties."""
    count = length = 0
    for function in functions:
        name, schema = str(function["name"]), cast("dict[str, Any]", function["parameters"])
        required = schema.get("required", ())
        choices: list[list[tuple[str, object] | None]] = []
        for key, about in schema.get("properties", {}).items():
            values: list[tuple[str, object] | None] = [(key, value) for value in _values(name, key, about)]
            choices.append(values if key in required else [None, *values])
        for chosen in itertools.product(*choices):
            count += 1
            if count > MAX_CALLS:
                raise _refused(f"the tools permit more than {MAX_CALLS} different calls", "give arguments fewer values")
            text = ToolCall(name, dict(pair for pair in chosen if pair is not None)).to_text()
            length += len(text)
            if length > MAX_CALL_CHARS:
                message = f"the calls that the tools permit have more than {MAX_CALL_CHARS} characters"
                raise _refused(message, "give arguments fewer or shorter values")
            yield text


def _values(name: str, key: str, about: Mapping[str, Any]) -> Sequence[object]:
    if "const" in about:
        return [about["const"]]
    if isinstance(about.get("enum"), (list, tuple)) and about["enum"]:
        return about["enum"]
    if about.get("type") == "boolean":
        return [False, True]
    low, high = about.get("minimum"), about.get("maximum")
    if about.get("type") == "integer" and isinstance(low, int) and isinstance(high, int) and high - low < MAX_CALLS:
        return range(low, high + 1)
    raise _refused(
        f"a call is required, but the argument '{key}' of '{name}' has no list of values",
        "give its schema an enum, or an integer with minimum and maximum, or set tool_choice to auto",
    )


def _compact(content: object) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def _refused(message: str, hint: str) -> EmbodrlError:
    return EmbodrlError(message, hint, code="chat-request")
