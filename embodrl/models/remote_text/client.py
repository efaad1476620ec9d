"""A client of OpenAI's chat completions: requests with a bound on time and attempts. Imports no torch."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, cast

from embodrl.errors import RemotePolicyError, RolloutEngineError
from embodrl.models.common.chat import (
    Conversation,
    ToolCall,
    WrittenText,
    numbered,
    parse_calls,
    said_before_calls,
    tagged,
)
from embodrl.models.remote_text.spec import RemoteTextConfig
from embodrl.serving.wire import TOKEN_VARIABLE

FIRST_PAUSE_S = 0.25
"""Before the second attempt; it doubles."""
MAX_ANSWER = 16 << 20
_BUSY = (408, 429, 500, 502, 503, 504)


class ChatClient:
    """Asks a server; any thread may.

    Args:
        config: section ``model``, with a URL.
    """

    def __init__(self, config: RemoteTextConfig) -> None:
        self.url = str(config.url).rstrip("/")
        self.config = config
        # No proxies: servers are given by their own addresses. Redirects would carry the token elsewhere.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
        self._token = os.environ.get(TOKEN_VARIABLE)
        self.model = config.served_model or self._only_model()

    def complete(self, conversation: Conversation) -> WrittenText:
        """Return the most probable answer; its tokens are bytes, and calls stand in ``<tool_call>`` marks.

        Raises:
            RolloutEngineError: the server does not answer, or refuses the token.
            RemotePolicyError: it refuses the conversation, or its answer has another form.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": _messages(conversation),
            "temperature": 0,
            "max_tokens": self.config.max_new_tokens,
        }
        if conversation.tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in conversation.tools]
            body["tool_choice"] = "required" if conversation.calls else "auto"
        answer = self._ask("/chat/completions", body)
        try:
            written = _written(answer)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self._malformed(f"no chat completion: {answer!s:.200}") from error
        if conversation.calls and not parse_calls(written.text):
            raise self._malformed(f"no tool call, which is required: {written.text:.200}")
        return written

    def _only_model(self) -> str:
        try:
            names = [str(model["id"]) for model in self._ask("/models", None)["data"]]
        except (LookupError, TypeError) as error:
            raise self._malformed("no list of models") from error
        if len(names) != 1:
            hint = f"set model.served_model to one of {', '.join(names[:20])}" if names else "load a model there"
            raise RemotePolicyError(f"{self.url} serves {len(names)} models", hint, code="remote-models")
        return names[0]

    def _ask(self, path: str, body: object) -> dict[str, Any]:
        """Return the answer's object, after repeated requests where the server does not answer."""
        problem: RolloutEngineError | None = None
        for attempt in range(self.config.retries + 1):
            if attempt:
                time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                content = self._request(path, body)
            except urllib.error.HTTPError as error:
                text = _said(error)
                if error.code not in _BUSY:
                    raise self._refused(path, error.code, text) from error
                problem = self._unreachable(f"{error.code} {text}")
            except (OSError, http.client.HTTPException) as error:
                problem = self._unreachable(str(error) or type(error).__name__)
            else:
                return self._object(content)
        assert problem is not None
        raise problem

    def _request(self, path: str, body: object) -> bytes:
        headers = {"Content-Type": "application/json"}
        headers |= {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with self._opener.open(request, timeout=self.config.answer_timeout_s) as answer:
            return answer.read(MAX_ANSWER + 1)

    def _object(self, content: bytes) -> dict[str, Any]:
        try:
            found = json.loads(content) if len(content) <= MAX_ANSWER else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._malformed(f"no JSON object of at most {MAX_ANSWER >> 20} MB")
        return cast("dict[str, Any]", found)

    def _refused(self, path: str, status: int, text: str) -> RemotePolicyError | RolloutEngineError:
        if status in (401, 403):
            hint = f"put the server's key into the environment variable {TOKEN_VARIABLE}"
            return RolloutEngineError(f"{self.url} refuses the token: {text}", hint, code="remote-token")
        hint = "check model.url, model.served_model, model.max_new_tokens, and what the workflow asks"
        return RemotePolicyError(f"{self.url}{path} answered {status}: {text}", hint, code="remote-refused")

    def _unreachable(self, text: str) -> RolloutEngineError:
        hint = "check model.url and that the server is ready, or raise model.retries or model.answer_timeout_s"
        return RolloutEngineError(f"{self.url} does not answer: {text}", hint, code="remote-unreachable")

    def _malformed(self, text: str) -> RemotePolicyError:
        hint = "check that model.url is the base URL of OpenAI's API, and that the server parses tool calls"
        return RemotePolicyError(f"{self.url} answered with {text}", hint, code="remote-answer")


def _said(error: urllib.error.HTTPError) -> str:
    """Return what a refusal says; "" if its text does not arrive."""
    try:
        return error.read(2000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return ""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


def _messages(conversation: Conversation) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for role, text in conversation.messages:
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "assistant" and conversation.tools and (calls := parse_calls(text)):
            functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
            message["content"] = said_before_calls(text) or None
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        messages.append(message)
    return numbered(messages)


def _written(answer: Mapping[str, Any]) -> WrittenText:
    """Return the message of an answer; raises LookupError, TypeError, ValueError or AttributeError without one."""
    choice = answer["choices"][0]
    message = choice["message"]
    text = message.get("content") or ""
    calls = [_call(call["function"]) for call in message.get("tool_calls") or []]
    if not isinstance(text, str):
        raise TypeError(text)
    marked = [tagged(call.to_text()) for call in calls]
    whole = "\n".join([*([text] if text or not marked else []), *marked])
    data = whole.encode("utf-8", errors="replace")
    usage: Mapping[str, Any] = answer.get("usage") or {}
    return WrittenText(
        tuple(bytes([one]) for one in data), choice["finish_reason"] != "length", int(usage["prompt_tokens"])
    )


def _call(function: Mapping[str, Any]) -> ToolCall:
    arguments = json.loads(function["arguments"])
    if not isinstance(function["name"], str) or not isinstance(arguments, dict):
        raise TypeError(function)
    return ToolCall(function["name"], cast("dict[str, object]", arguments))
