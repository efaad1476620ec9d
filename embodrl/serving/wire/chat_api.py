"""OpenAI's chat completions, as JSON: requests are read, and answers and errors made. Imports no torch.

Source: github.com/openai/openai-openapi, ``/chat/completions`` and ``/models``.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from embodrl.errors import WireError
from embodrl.models.common.chat import (
    LiveToken,
    TokenRules,
    ToolCall,
    ToolChoice,
    WrittenText,
    certain_text,
    said_before_calls,
    text_before_stops,
)

MAX_TEMPERATURE = 2.0
MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 64
MAX_PENALTY = 2.0
_LEAST_TEMPERATURE = 1e-30
"""Logits divided by less are infinite; from there on sampling is greedy anyway."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **{"top_logprobs": (0,), "modalities": (["text"],), "logit_bias": ({},), "response_format": ({"type": "text"},)},
}
"""Fields that may have these values, or null, and no others."""
_READ = (
    *("messages", "model", "tools", "tool_choice", "temperature", "max_tokens", "max_completion_tokens", "seed"),
    *("logprobs", "stream", "stream_options", "parallel_tool_calls", "n", "stop"),
    *("top_p", "presence_penalty", "frequency_penalty"),
)
_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that say nothing about the answer."""
STREAM_TYPE = "text/event-stream"


@dataclass(frozen=True)
class ChatRequest:
    """A request of a completion.

    Attributes:
        model: the name that the client gives; "" without one.
        messages: with text as their content, for ``Conversation.of``.
        tools: what the policy may call, in OpenAI's form.
        temperature, max_tokens, seed: None where the client says nothing.
        logprobs: log-probs of the tokens are wanted.
        parallel_calls: a message may have several calls.
        stream: the answer is wanted as events.
        stream_usage: the last of them has the number of tokens.
        count: number of messages wanted.
        stops: sequences before which a message is cut.
        rules: how its tokens are chosen.
    """

    model: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    choice: ToolChoice
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    logprobs: bool = False
    parallel_calls: bool = True
    stream: bool = False
    stream_usage: bool = False
    count: int = 1
    stops: tuple[str, ...] = ()
    rules: TokenRules = field(default_factory=TokenRules)

    @staticmethod
    def read(body: bytes) -> ChatRequest:
        """Read a request.

        Raises:
            WireError: it is malformed, or asks for what is not offered.
        """
        content = read_object(body)
        for name, value in content.items():
            if value is None or name in _READ or name in _WITHOUT_EFFECT:
                continue
            if name not in _NEUTRAL:
                raise refused(f"'{name}' is not offered", "leave it out")
            if value not in _NEUTRAL[name]:
                raise refused(f"'{name}' can't be {value!r:.40}", f"leave it out, or send {_NEUTRAL[name][0]}")
        tools, choice = _tools(content.get("tools"), content.get("tool_choice"))
        limits = {content.get(name) for name in ("max_tokens", "max_completion_tokens") if _whole(content, name, 1)}
        if len(limits) > 1:
            raise refused("max_tokens and max_completion_tokens differ", "send one of them")
        return ChatRequest(
            model=_text(content, "model"),
            messages=tuple(map(_message, _objects(content.get("messages"), "messages"))),
            tools=tools,
            choice=choice,
            temperature=_temperature(content),
            count=_choices(content),
            stops=_stops(content.get("stop")),
            rules=TokenRules(
                _number(content, "top_p", 0, 1, 1.0),
                _number(content, "presence_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
                _number(content, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
            ),
            max_tokens=next(iter(limits), None),
            seed=_whole(content, "seed", 0),
            logprobs=_flag(content, "logprobs"),
            # Without tools a message has no calls, whatever its text is.
            parallel_calls=_flag(content, "parallel_tool_calls", without=True) or not tools,
            stream=_flag(content, "stream"),
            stream_usage=_stream_usage(content),
        )


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; raises WireError for anything else."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise refused(f"the body is not JSON: {error}", "send a JSON object") from error
    if not isinstance(content, dict):
        raise refused("the body is not a JSON object", "see docs/serving.md")
    return cast("dict[str, Any]", content)


def refused(message: str, hint: str) -> WireError:
    """Return the error for a refused request."""
    return WireError(message, hint, code="chat-request")


def _objects(value: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in cast("list[object]", value)):
        raise refused(f"'{name}' is no list of objects", "see OpenAI's reference")
    return cast("list[dict[str, Any]]", value)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        parts = _objects(cast("list[object]", content), "content")
        if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
            raise refused("a message has content other than text", "send parts of the type text alone")
        content = "".join(part["text"] for part in parts)
    role = "system" if message.get("role") == "developer" else message.get("role")
    if content == "" and message.get("tool_calls"):
        content = None
    return {**message, "role": role, "content": content}


def _tools(given: object, choice: object) -> tuple[tuple[dict[str, Any], ...], ToolChoice]:
    tools = [] if given is None else _objects(given, "tools")
    for tool in tools:
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise refused("a tool is no function", "send {'type': 'function', 'function': {...}}")
    if choice is None or choice == "auto":
        return tuple(tools), "auto"
    if choice == "required":
        return tuple(tools), "required"
    if choice == "none":
        return (), "auto"
    named = cast("Mapping[str, Any]", choice).get("function") if isinstance(choice, Mapping) else None
    name = cast("Mapping[str, Any]", named).get("name") if isinstance(named, Mapping) else None
    chosen = [tool for tool in tools if name is not None and tool["function"].get("name") == name]
    if not chosen:
        hint = "send auto, none, required, or {'type': 'function', 'function': {'name': one of the tools}}"
        raise refused(f"the tool choice is {choice!r:.60}", hint)
    return tuple(chosen), "required"


def _temperature(content: Mapping[str, Any]) -> float | None:
    value = _number(content, "temperature", 0, MAX_TEMPERATURE, None)
    return 0.0 if value is not None and value < _LEAST_TEMPERATURE else value


def _choices(content: Mapping[str, Any]) -> int:
    count = _whole(content, "n", 1) or 1
    if count > MAX_CHOICES:
        raise refused(f"'n' is {count}", f"send a whole number from 1 to {MAX_CHOICES}")
    return count


def _is_utf8(text: str) -> bool:
    """Return whether a text has no lone surrogates, which JSON may hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stops(value: object) -> tuple[str, ...]:
    found = [] if value is None else [value] if isinstance(value, str) else value
    listed = cast("list[object]", found) if isinstance(found, list) else [None]
    texts = tuple(one for one in listed if isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARS and _is_utf8(one))
    if len(texts) != len(listed) or len(texts) > MAX_STOPS:
        hint = f"send a text, or a list of at most {MAX_STOPS}, each of 1 to {MAX_STOP_CHARS} characters"
        raise refused(f"'stop' is {value!r:.60}", hint)
    return texts


_Default = TypeVar("_Default", float, None)


def _number(content: Mapping[str, Any], name: str, least: float, most: float, without: _Default) -> float | _Default:
    value = content.get(name)
    if value is None:
        return without
    if type(value) not in (int, float) or not least <= value <= most:
        raise refused(f"'{name}' is {value!r:.40}", f"send a number from {least:g} to {most:g}")
    return float(value)


def _whole(content: Mapping[str, Any], name: str, least: int) -> int | None:
    value = content.get(name)
    if value is not None and (type(value) is not int or not least <= value < 2**63):
        raise refused(f"'{name}' is {value!r:.40}", f"send a whole number of {least} or more")
    return value


def _flag(content: Mapping[str, Any], name: str, without: bool = False) -> bool:
    value = content.get(name)
    if value is not None and type(value) is not bool:
        raise refused(f"'{name}' is {value!r:.40}", "send true or false")
    return without if value is None else value


def _stream_usage(content: Mapping[str, Any]) -> bool:
    options = content.get("stream_options")
    if options is None:
        return False
    if content.get("stream") is not True:
        raise refused("'stream_options' has no effect without a stream", "leave it out, or send 'stream': true")
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise refused(f"'stream_options' can't be {options!r:.60}", "send {'include_usage': true}, or leave it out")
    return _flag(cast("dict[str, Any]", options), "include_usage")


def _text(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    if value is not None and not isinstance(value, str):
        raise refused(f"'{name}' is {value!r:.40}", "send a text")
    return value or ""


def completion_head(name: str, model: str, created: int, version: int) -> dict[str, Any]:
    """Return what identifies an answer.

    Args:
        name: id of the completion; those of its calls follow from it.
        model: name of the model.
        created: time of the answer, in seconds since 1970.
        version: policy version, the answer's ``system_fingerprint``.
    """
    return {
        "id": name,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "system_fingerprint": f"v{version}",
    }


@dataclass(frozen=True)
class ChatChoice:
    """One of the messages that answer a request.

    Attributes:
        written: the message.
        calls: the calls that it is, or has behind a text.
        logprobs: of the tokens, and of the mark of the end, which is left out; None if they are not wanted.
    """

    written: WrittenText
    calls: Sequence[ToolCall] = ()
    logprobs: Sequence[float] | None = None

    def body(self, name: object, index: int) -> dict[str, Any]:
        """Return it as number ``index`` of the completion ``name``."""
        written, calls = self.written, self.calls
        content = (said_before_calls(written.text) or None) if calls else written.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        prefix = f"call_{name}_{index}" if index else f"call_{name}"
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"{prefix}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for number, call in enumerate(calls)
            ]
        reason = "length" if not written.is_whole else "tool_calls" if calls else "stop"
        choice = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
        if self.logprobs is not None:
            pairs = zip(written.tokens, self.logprobs, strict=False)
            choice["logprobs"] = {"content": [_token(data, number) for data, number in pairs], "refusal": None}
        return choice


def completion_body(head: Mapping[str, Any], choices: Sequence[ChatChoice]) -> dict[str, Any]:
    """Return the answer to a request.

    Args:
        head: result of ``completion_head``.
        choices: the messages, at least one.
    """
    prompt = choices[0].written.prompt_tokens
    tokens = sum(choice.written.written_tokens for choice in choices)
    return {
        **head,
        "choices": [choice.body(head["id"], index) for index, choice in enumerate(choices)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens},
    }


class ChatStream:
    """A completion as server-sent events: its messages token by token, while they are written or afterwards.

    Args:
        head: result of ``completion_head``.
    """

    def __init__(self, head: Mapping[str, Any], asked: ChatRequest) -> None:
        self.head = head
        self._stream_usage = asked.stream_usage
        usage = {"usage": None} if asked.stream_usage else {}
        self._frame = {**head, "object": "chat.completion.chunk", **usage}
        self._choices = [_ChoiceStream(self._frame, asked, index) for index in range(asked.count)]

    def add(self, token: LiveToken, index: int = 0) -> bytes:
        """Take the next token of a message; return the events that can be sent."""
        return self._choices[index].add(token)

    def finish(self, choices: Sequence[ChatChoice]) -> bytes:
        """Return the remaining events of ``completion_body``'s answer.

        Raises:
            WireError: the tokens sent are not those of a message.
        """
        body = completion_body(self.head, choices)
        streams = zip(self._choices, body["choices"], choices, strict=True)
        events = [stream.finish(choice, given.written) for stream, choice, given in streams]
        if self._stream_usage:
            events.append(_sse({**self._frame, "choices": [], "usage": body["usage"]}))
        return b"".join(events) + b"data: [DONE]\n\n"


class _ChoiceStream:
    """Events of one message. What may become a call, or a stop sequence, is held back until that is decided, and so is
    the last token: its character may go on.
    """

    def __init__(self, frame: Mapping[str, Any], asked: ChatRequest, index: int) -> None:
        self._frame = frame
        self._index = index
        self._asked = asked
        self._received: list[LiveToken] = []
        self._decoder = _decoder()
        self._texts: list[str] = []  # of the tokens but the last
        self._is_whole: list[bool] = []  # whether each ends with a whole character
        self._sent = 0
        self._has_begun = False

    def add(self, token: LiveToken) -> bytes:
        """Take the next token; return the events that can be sent."""
        if token.place != len(self._received) or token.place == self._asked.max_tokens:
            return b""  # reported twice, or behind the limit
        if self._received:
            self._texts.append(self._decoder.decode(self._received[-1].data))
            self._is_whole.append(bool(self._texts[-1]) and not self._decoder.getstate()[0])
        self._received.append(token)
        text = text_before_stops("".join(self._texts), self._asked.stops)
        certain = len(certain_text(text) if self._asked.tools else text)
        length = len("".join(self._texts[: self._sent]))
        ready = self._sent
        while ready < len(self._texts) and length + len(self._texts[ready]) <= certain:
            length += len(self._texts[ready])
            ready += 1
        while self._asked.stops and ready > self._sent and not self._is_whole[ready - 1]:
            ready -= 1  # an incomplete character, which may begin a stop sequence
        events: list[bytes] = []
        for place in range(self._sent, ready):
            events += self._token_events(self._received[place], self._texts[place])
        self._sent = ready
        return b"".join(events)

    def finish(self, choice: Mapping[str, Any], written: WrittenText) -> bytes:
        """Return the remaining events of ``ChatChoice.body``. Raises as ``ChatStream.finish``."""
        if tuple(token.data for token in self._received[: self._sent]) != written.tokens[: self._sent]:
            raise WireError("the message was written anew, and differs", "ask again", code="chat-stream")
        message = choice["message"]
        said = "".join(self._texts[: self._sent])
        events = list(self._begin(None if message["content"] is None else ""))
        calls = message.get("tool_calls")
        if calls:
            events += self._call_events(calls, (message["content"] or "")[len(said) :])
        else:
            events += self._rest(written, choice["logprobs"])
        rest = choice["logprobs"] and {**choice["logprobs"], "content": choice["logprobs"]["content"][self._sent :]}
        events.append(self._event(_delta(rest if calls else None), finish_reason=choice["finish_reason"]))
        return b"".join(events)

    def _rest(self, written: WrittenText, logprobs: Mapping[str, Any] | None) -> Iterator[bytes]:
        decoder = _decoder()
        for place, data in enumerate(written.tokens):
            text = decoder.decode(data, final=place + 1 == len(written.tokens))
            if place >= self._sent:
                own = None if logprobs is None else {"content": [logprobs["content"][place]], "refusal": None}
                yield self._event(_delta(own, content=text))

    def _call_events(self, calls: Sequence[Mapping[str, Any]], said: str) -> Iterator[bytes]:
        if said:
            yield self._event(_delta(content=said))
        for number, call in enumerate(calls):
            head = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
            yield self._event(_delta(tool_calls=[{"index": number, **head}]))
            arguments = {"arguments": call["function"]["arguments"]}
            yield self._event(_delta(tool_calls=[{"index": number, "function": arguments}]))

    def _token_events(self, token: LiveToken, text: str) -> Iterator[bytes]:
        own = {"content": [_token(token.data, token.logprob)], "refusal": None} if self._asked.logprobs else None
        yield from self._begin("")
        yield self._event(_delta(own, content=text))

    def _begin(self, content: str | None) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield self._event(_delta(role="assistant", content=content))

    def _event(self, choice: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        return _sse({**self._frame, "choices": [{**choice, "index": self._index, "finish_reason": finish_reason}]})


def _delta(logprobs: object = None, **more: object) -> dict[str, Any]:
    return {"index": None, "delta": more, "finish_reason": None, "logprobs": logprobs}


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _sse(content: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode("utf-8", errors="replace")


def error_event(body: Mapping[str, Any]) -> bytes:
    """Return the last event of a stream that fails; ``body`` is that of ``error_body``."""
    return _sse(body)


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    text = data.decode("utf-8", errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(data), "top_logprobs": []}


def model_body(model: str, created: int) -> dict[str, Any]:
    """Return the description of a model."""
    return {"id": model, "object": "model", "created": created, "owned_by": "embodrl"}


def error_body(message: str, code: str, status: int) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = {401: "authentication_error", 404: "not_found_error"}.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else kind
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
