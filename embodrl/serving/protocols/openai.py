"""OpenAI's chat completions over a policy that writes text: ``base_url`` is the server's URL and ``/v1``.

Source: github.com/openai/openai-openapi.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from embodrl.errors import EmbodrlError, WireError
from embodrl.hybrid_engines.rollout.batched import Completion, conversation
from embodrl.models.common.chat import LiveToken, parse_calls
from embodrl.models.common.sampling import TextSampling
from embodrl.serving.core import Writing, explain
from embodrl.serving.listener import VERSION_HEADER, Handler, HttpListener, Service, status_of
from embodrl.serving.wire.chat_api import (
    STREAM_TYPE,
    ChatChoice,
    ChatRequest,
    ChatStream,
    completion_body,
    completion_head,
    error_body,
    error_event,
    model_body,
    refused,
)

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
            if asked.count > (most := self.core.settings.max_batch_size):
                raise refused(f"'n' is {asked.count}", f"send at most serve.max_batch_size={most}")
            if asked.stream:
                return await self._stream(request, asked)
            found = await self._written(request, asked)
        except Exception as error:  # noqa: BLE001 - reported to the client
            return self._failed(error)
        version = found[0].output.version
        body = completion_body(self._head(version), _choices(asked, found))
        return self.web.json_response(body, headers={VERSION_HEADER: str(version)})

    async def _written(self, request: Request, asked: ChatRequest, report: _Report | None = None) -> list[Completion]:
        """Write all messages of an answer, and report their tokens."""
        seen = conversation(asked.messages, asked.tools, asked.choice)
        how = self._how(asked)

        async def one(index: int) -> Completion:
            # Seeds are padded with zeros: the first message is that of a request for one.
            own = replace(how, seed=(*how.seed, index), on_token=None if report is None else partial(report, index))
            output = (await self.core.act(seen, request.transport, self.name, writing=own)).output
            assert output is not None
            found = Completion.of(self.core.engine.policy, output, asked.max_tokens, asked.parallel_calls)
            written = found.written.before(asked.stops)
            return (
                found
                if written is found.written
                else replace(found, written=written, tool_calls=parse_calls(written.text))
            )

        messages = [asyncio.ensure_future(one(index)) for index in range(asked.count)]
        try:
            return await asyncio.gather(*messages)
        finally:
            for message in messages:  # of a request that has failed
                message.cancel()

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
        tokens: asyncio.Queue[tuple[int, LiveToken, int] | None] = asyncio.Queue()

        def report(index: int, token: LiveToken, version: int) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, (index, token, version))

        answer = asyncio.create_task(self._written(request, asked, report))
        answer.add_done_callback(lambda _: tokens.put_nowait(None))  # behind all tokens
        stream: ChatStream | None = None
        try:
            while (got := await tokens.get()) is not None:
                index, token, version = got
                stream = stream or ChatStream(self._head(version), asked)
                if events := stream.add(token, index):
                    yield version, events
            found = answer.result()
            version = found[0].output.version
            stream = stream or ChatStream(self._head(version), asked)
            yield version, stream.finish(_choices(asked, found))
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
        seed = (secrets.randbits(62) if asked.seed is None else asked.seed,)
        sampling = TextSampling(asked.temperature or own.temperature, own.top_k, asked.rules)
        if asked.temperature is None:
            return Writing(decoding, sampling, seed)
        return Writing("sampled" if asked.temperature else "greedy", sampling, seed)

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


_Report = Callable[[int, LiveToken, int], None]
"""Called with the number of a message, its next token, and the policy version."""


def _choices(asked: ChatRequest, found: Sequence[Completion]) -> list[ChatChoice]:
    return [
        ChatChoice(
            one.written,
            # A conversation without tools has no calls, whatever the text is.
            one.tool_calls if asked.tools else (),
            one.output.logprobs[0, :, 0].tolist() if asked.logprobs else None,
        )
        for one in found
    ]
