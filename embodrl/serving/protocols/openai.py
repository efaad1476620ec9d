"""OpenAI's chat completions over a policy that writes text: ``base_url`` is the server's URL and ``/v1``.

Source: github.com/openai/openai-openapi.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from embodrl.errors import EmbodrlError, WireError
from embodrl.hybrid_engines.rollout.batched import Completion, conversation
from embodrl.models.common.chat import LiveToken
from embodrl.serving.core import Writing, explain
from embodrl.serving.listener import VERSION_HEADER, Handler, HttpListener, Service, status_of
from embodrl.serving.wire.chat_api import (
    STREAM_TYPE,
    ChatRequest,
    ChatStream,
    completion_body,
    completion_head,
    error_body,
    error_event,
    model_body,
)
from embodrl.types import SamplingParams

if TYPE_CHECKING:
    from aiohttp.web import Request, StreamResponse


class OpenaiListener(HttpListener):
    """Answers ``POST /v1/chat/completions`` and ``GET /v1/models``.

    Without a temperature, ``serve.decoding`` says how tokens are chosen; 0 is ``greedy``, others ``sampled``.
    """

    name = "openai"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.model = service.config.model.model_type
        self._created = int(time.time())

    def takes(self) -> str:
        return f"POST /v1/chat/completions for model={self.model}; base_url is the address and /v1"

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("POST", "/v1/chat/completions", self._complete),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name}", self._one_model),
            ("*", "/{path:.*}", self._unknown),
        ]

    def refusal(self, content: dict[str, str], status: int) -> StreamResponse:
        return self.web.json_response(error_body(content["error"], content["code"], status), status=status)

    async def _complete(self, request: Request) -> StreamResponse:
        try:
            asked = ChatRequest.read(await self.body(request))
            if asked.model != self.model:
                return self._no_model(asked.model)
            if asked.stream:
                return await self._stream(request, asked)
            found = await self._written(request, asked, self._how(asked))
        except Exception as error:  # noqa: BLE001 - reported to the client
            return self._failed(error)
        version = found.output.version
        body = _body(self._head(version), asked, found)
        return self.web.json_response(body, headers={VERSION_HEADER: str(version)})

    async def _written(self, request: Request, asked: ChatRequest, how: Writing) -> Completion:
        seen = conversation(asked.messages, asked.tools, asked.choice)
        output = (await self.core.act(seen, request.transport, self.name, writing=how)).output
        assert output is not None
        return Completion.of(self.core.engine.policy, output, asked.max_tokens, asked.parallel_calls)

    async def _stream(self, request: Request, asked: ChatRequest) -> StreamResponse:
        """Send events while the policy writes; raises what fails before the first of them."""
        response: StreamResponse | None = None
        async with aclosing(self._events(request, asked)) as events:
            try:
                async for version, data in events:
                    if response is None:
                        response = await self._begin(request, version)
                    await response.write(data)
            except Exception as error:
                if response is None:
                    raise
                with suppress(ConnectionError):  # of a client that has gone
                    await response.write(error_event(self._error(error)[0]))
        assert response is not None
        return response

    async def _events(self, request: Request, asked: ChatRequest) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the policy version and events of a message."""
        loop = asyncio.get_running_loop()
        tokens: asyncio.Queue[tuple[LiveToken, int] | None] = asyncio.Queue()

        def report(token: LiveToken, version: int) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, (token, version))

        answer = asyncio.create_task(self._written(request, asked, replace(self._how(asked), on_token=report)))
        answer.add_done_callback(lambda _: tokens.put_nowait(None))  # behind all tokens
        stream: ChatStream | None = None
        try:
            while (got := await tokens.get()) is not None:
                token, version = got
                stream = stream or ChatStream(self._head(version), asked)
                if events := stream.add(token):
                    yield version, events
            found = answer.result()
            version = found.output.version
            stream = stream or ChatStream(self._head(version), asked)
            yield version, stream.finish(_body(stream.head, asked, found), found.written)
        finally:
            answer.cancel()

    async def _begin(self, request: Request, version: int) -> StreamResponse:
        response = self.web.StreamResponse(headers={VERSION_HEADER: str(version)})
        response.content_type = STREAM_TYPE
        await response.prepare(request)
        return response

    def _head(self, version: int) -> dict[str, Any]:
        return completion_head(f"chatcmpl-{secrets.token_hex(12)}", self.model, int(time.time()), version)

    def _how(self, asked: ChatRequest) -> Writing:
        own, decoding = self.core.engine.sampling, self.service.settings.decoding
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        if asked.temperature is None:
            return Writing(decoding, own, seed)
        if asked.temperature == 0:
            return Writing("greedy", own, seed)
        return Writing("sampled", SamplingParams(asked.temperature, own.top_k), seed)

    def _failed(self, error: Exception) -> StreamResponse:
        body, status = self._error(error)
        return self.web.json_response(body, status=status)

    def _error(self, error: Exception) -> tuple[dict[str, Any], int]:
        self.core.metrics.count("errors_total", self.name)
        status = status_of(error)
        status = 400 if status == 422 else status
        code = error.code if isinstance(error, EmbodrlError) else "policy-raised"
        return error_body(explain(error), code, status), status

    def _no_model(self, name: str) -> StreamResponse:
        self.core.metrics.count("errors_total", self.name)
        error = WireError(f"there is no model {name!r:.60}", f"ask for '{self.model}'", code="model_not_found")
        return self.refusal({"error": explain(error), "code": error.code}, 404)

    async def _models(self, request: Request) -> StreamResponse:
        return self.web.json_response({"object": "list", "data": [model_body(self.model, self._created)]})

    async def _one_model(self, request: Request) -> StreamResponse:
        name = request.match_info["name"]
        if name != self.model:
            return self._no_model(name)
        return self.web.json_response(model_body(self.model, self._created))

    async def _unknown(self, request: Request) -> StreamResponse:
        text = f"{request.method} {request.path[:60]} is not served (POST /v1/chat/completions, GET /v1/models)"
        return self.refusal({"error": text, "code": "chat-path"}, 404)


def _body(head: Mapping[str, Any], asked: ChatRequest, found: Completion) -> dict[str, Any]:
    logprobs = found.output.logprobs[0, :, 0].tolist() if asked.logprobs else None
    # A conversation without tools has no calls, whatever the text is.
    calls = found.tool_calls if asked.tools else ()
    return completion_body(head, found.written, calls, logprobs)
