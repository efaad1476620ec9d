"""embodrl's own HTTP API, described by GET /openapi.json.

Bodies are JSON with json_numpy arrays, or msgpack with openpi's envelope (``Content-Type: application/msgpack``); the
response uses the request's format.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING

from embodrl.errors import ServingError, WireError
from embodrl.hybrid_engines.weight_sync.follower import stable_directory
from embodrl.serving.core import explain
from embodrl.serving.listener import VERSION_HEADER, Handler, HttpListener, Service, status_of
from embodrl.serving.rollout import answer_of, computation
from embodrl.serving.session import ChunkSession
from embodrl.serving.wire.codec import Message, openpi_default, openpi_envelope, pack, read_json, unpack, write_json
from embodrl.version import __version__

if TYPE_CHECKING:
    from aiohttp.web import Request, StreamResponse

MSGPACK = "application/msgpack"
MAX_NAME = 200


class ApiListener(HttpListener):
    """Serves act, rollout, reset, weights, pause, resume and info."""

    name = "http"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.keys = service.wire_map(service.settings.http, "images.{}", "state", "instruction")
        self._sessions: OrderedDict[str, ChunkSession] = OrderedDict()
        self._instance = secrets.token_hex(8)
        """Identifies this server process: after a restart the server has its initial weights again."""

    def routes(self) -> list[tuple[str, str, Handler]]:
        posts = (
            ("/act", self._act),
            ("/rollout", self._roll_out),
            ("/reset", self._reset),
            ("/weights", self._weights),
        )
        posts += (("/pause", self._pause), ("/resume", self._resume))
        gets = (("/info", self._info), ("/openapi.json", self._openapi))
        return [
            *(("POST", path, self._posted(handler)) for path, handler in posts),
            *(("GET", path, handler) for path, handler in gets),
        ]

    def _posted(self, answer: Callable[[Message, Request], Awaitable[Mapping[str, object]]]) -> Handler:
        """Wrap ``answer`` in a handler that decodes the request body and encodes the response."""

        async def handler(request: Request) -> StreamResponse:
            is_msgpack = request.content_type == MSGPACK
            try:
                body = await self.body(request)
                message = unpack(body, openpi_envelope) if is_msgpack else read_json(body or b"{}")
                if not isinstance(message, Mapping):
                    raise WireError("the body is not a map", "see GET /openapi.json", code="wire-message")
                content = await answer(message, request)
                status = 200
            except Exception as error:  # noqa: BLE001 - reported to the client
                self.core.metrics.count("errors_total", self.name)
                content = {"error": explain(error)}
                status = status_of(error)
            headers = {VERSION_HEADER: str(content.get("policy_version", self.core.version))}
            if is_msgpack:
                packed = pack(content, openpi_default)
                return self.web.Response(body=packed, status=status, content_type=MSGPACK, headers=headers)
            text = write_json(content)
            return self.web.Response(text=text, status=status, content_type="application/json", headers=headers)

        return handler

    async def _act(self, message: Message, request: Request) -> dict[str, object]:
        observation = self.keys.observation(message.get("observation", message))
        name = message.get("session")
        prefix = self.service.prefix(message)
        if name is not None and prefix is not None:
            raise WireError(
                "a session returns single actions and can't continue a chunk",
                "send either 'session' or 'rtc'",
                code="wire-rtc",
            )
        if name is not None:
            action, version = await self._session(name).next_action(observation)
            return {"actions": action[None], "policy_version": version}
        chunk = await self.core.act(observation, request.transport, self.name, prefix)
        return {
            "actions": chunk.actions,
            "policy_version": chunk.version,
            "timing": {"infer_ms": chunk.infer_ms, "total_ms": chunk.total_ms, "batch_size": chunk.batch_size},
        }

    def _session(self, name: object) -> ChunkSession:
        """Return the named session, creating it if necessary; evicts the least recently used session when full."""
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise WireError(f"a session name has 1 to {MAX_NAME} characters", "", code="wire-observation")
        if name not in self._sessions:
            if len(self._sessions) >= self.service.settings.max_connections:
                self._sessions.popitem(last=False)
            self._sessions[name] = ChunkSession(self.core, name, self.name, self.service.horizon)
        self._sessions.move_to_end(name)
        return self._sessions[name]

    async def _roll_out(self, message: Message, request: Request) -> dict[str, object]:
        output = await self.core.roll_out(computation(self.core.engine, message))
        return {**answer_of(output), "instance": self._instance}

    async def _reset(self, message: Message, request: Request) -> dict[str, object]:
        self._session(message.get("session")).reset()
        return {"policy_version": self.core.version}

    async def _weights(self, message: Message, request: Request) -> dict[str, object]:
        directory = stable_directory(message.get("directory"))
        report = await asyncio.to_thread(self.service.source.take, directory, True)
        if report is None and self.service.source.has_taken(directory):
            return {"policy_version": self.core.version, "num_tensors": 0, "num_bytes": 0, "instance": self._instance}
        if report is None:
            hint = "name a version directory such as v000012/ that contains STABLE; see docs/weight_sync.md"
            raise ServingError(f"{directory} has no newer weights", hint, code="server-weights")
        moved = {"num_tensors": report.num_tensors, "num_bytes": report.num_bytes}
        return {"policy_version": report.version, **moved, "instance": self._instance}

    async def _pause(self, message: Message, request: Request) -> dict[str, object]:
        self.core.pause()
        return {"paused": True, "policy_version": self.core.version}

    async def _resume(self, message: Message, request: Request) -> dict[str, object]:
        self.core.resume()
        return {"paused": False, "policy_version": self.core.version}

    async def _info(self, request: Request) -> StreamResponse:
        content = self.service.info(self.keys) | {"paused": self.core.is_paused, "version": __version__}
        return self.web.json_response(content)

    async def _openapi(self, request: Request) -> StreamResponse:
        text = (files("embodrl.serving") / "openapi.json").read_text(encoding="utf-8")
        return self.web.Response(text=text, content_type="application/json")
