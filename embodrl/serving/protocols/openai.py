"""OpenAI's chat completions over a policy that writes text: ``base_url`` is the server's URL and ``/v1``.

Source: github.com/openai/openai-openapi.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from embodrl.errors import EmbodrlError, WireError
from embodrl.hybrid_engines.rollout.batched import Completion, conversation
from embodrl.serving.core import Writing, explain
from embodrl.serving.listener import VERSION_HEADER, Handler, HttpListener, Service, status_of
from embodrl.serving.wire.chat_api import (
    STREAM_TYPE,
    ChatRequest,
    completion_body,
    error_body,
    model_body,
    stream_body,
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
            seen = conversation(asked.messages, asked.tools, asked.choice)
            chunk = await self.core.act(seen, request.transport, self.name, writing=self._how(asked))
        except Exception as error:  # noqa: BLE001 - reported to the client
            return self._failed(error)
        output = chunk.output
        assert output is not None
        found = Completion.of(self.core.engine.policy, output, asked.max_tokens, asked.parallel_calls)
        logprobs = found.output.logprobs[0, :, 0].tolist() if asked.logprobs else None
        # A conversation without tools has no calls, whatever the text is.
        calls = found.tool_calls if asked.tools else ()
        name = f"chatcmpl-{secrets.token_hex(12)}"
        body = completion_body(name, self.model, int(time.time()), found.written, calls, output.version, logprobs)
        headers = {VERSION_HEADER: str(output.version)}
        if asked.stream:
            events = stream_body(body, found.written, asked.stream_usage)
            return self.web.Response(body=events, content_type=STREAM_TYPE, headers=headers)
        return self.web.json_response(body, headers=headers)

    def _how(self, asked: ChatRequest) -> Writing:
        own, decoding = self.core.engine.sampling, self.service.settings.decoding
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        if asked.temperature is None:
            return Writing(decoding, own, seed)
        if asked.temperature == 0:
            return Writing("greedy", own, seed)
        return Writing("sampled", SamplingParams(asked.temperature, own.top_k), seed)

    def _failed(self, error: Exception) -> StreamResponse:
        self.core.metrics.count("errors_total", self.name)
        status = status_of(error)
        code = error.code if isinstance(error, EmbodrlError) else "policy-raised"
        return self.refusal({"error": explain(error), "code": code}, 400 if status == 422 else status)

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
