"""GR00T's ZMQ protocol in the dialects of N1.5, N1.6 and N1.7; each request is answered in its own dialect.

Sources: github.com/NVIDIA/Isaac-GR00T, gr00t/policy/server_client.py, and gr00t/eval/service.py of N1.5.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from embodrl.config.schema import section_in
from embodrl.errors import WireError
from embodrl.serving import door
from embodrl.serving.core import explain
from embodrl.serving.listener import Listener, Service
from embodrl.serving.protocols.spec import GrootServeConfig
from embodrl.serving.wire.codec import need, pack, unpack
from embodrl.serving.wire.gr00t_codec import groot_envelope, groot_msgpack_default, groot_npy_default
from embodrl.serving.wire.keys import Part, split

HINT = "see docs/serving.md for GR00T's dialects"
MAX_ROWS = 256


class _Dialect:
    """Array encoding of a request: N1.7 uses msgpack_numpy's envelope, the others .npy files."""

    def __init__(self) -> None:
        self.default: Callable[[object], object] = groot_npy_default

    def envelope(self, content: dict[Any, Any]) -> object:
        if b"nd" in content:
            self.default = groot_msgpack_default
        return groot_envelope(content)


class GrootListener(Listener):
    """Answers ping, get_action, reset and get_modality_config; refuses kill."""

    name = "gr00t"
    scheme = "tcp"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._zmq = need("zmq")
        self._asyncio = need("zmq.asyncio")
        settings = section_in(service.settings, "gr00t", GrootServeConfig)
        self.keys = service.wire_map(settings, "video.{}", "state.state", "annotation.human.task_description")
        whole = (f"action:{service.config.model.action_dim}",)
        self.actions = [Part.parse(text) for text in settings.actions or whole]
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        self._context = self._asyncio.Context()
        self._socket = self._context.socket(self._zmq.ROUTER)  # REQ clients see no difference to a REP socket
        self._socket.setsockopt(self._zmq.MAXMSGSIZE, self.service.max_bytes)
        self._socket.setsockopt(self._zmq.HANDSHAKE_IVL, int(1000 * door.HELLO_S))
        # The client's ZMQ library answers heartbeats even while its program is busy; a bare connection does not.
        self._socket.setsockopt(self._zmq.HEARTBEAT_IVL, int(1000 * door.HELLO_S))
        self._socket.setsockopt(self._zmq.LINGER, 1000)
        self._socket.setsockopt(self._zmq.IPV6, int(":" in host))
        address = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except self._zmq.ZMQError as error:
            await self.close()
            raise OSError(error.errno, str(error)) from error
        self._server = asyncio.create_task(self._serve())
        return int(self._socket.getsockopt_string(self._zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def _serve(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or frames[1]:
                self.core.metrics.count("errors_total", self.name)  # not from a REQ client: no answer
                continue
            if len(self._tasks) >= self.service.settings.max_connections:
                text = "too many requests in flight (serve.max_connections)"
                await self._send(frames[0], {"error": text}, groot_npy_default)
                continue
            task = asyncio.create_task(self._reply(frames[0], frames[2]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reply(self, client: bytes, data: bytes) -> None:
        dialect = _Dialect()
        try:
            answer = await self._answer(unpack(data, dialect.envelope), client)
        except Exception as error:  # noqa: BLE001 - reported to the client
            self.core.metrics.count("errors_total", self.name)
            answer = {"error": explain(error)}
        await self._send(client, answer, dialect.default)

    async def _send(self, client: bytes, answer: object, default: Callable[[object], object]) -> None:
        await self._socket.send_multipart([client, b"", pack(answer, default)])

    async def _answer(self, request: object, client: bytes) -> object:
        if not isinstance(request, Mapping):
            raise WireError("the request is not a map", HINT, code="wire-message")
        if not self.service.admits(request.get("api_token")):
            self.core.metrics.count("refused_total", self.name)
            return {"error": "Unauthorized: send the token that the server printed as api_token"}
        endpoint = request.get("endpoint", "get_action")
        if endpoint == "ping":
            return {"status": "ok", "message": "Server is running", "policy_version": self.core.version}
        if endpoint == "reset":
            return {}  # the server keeps no client state
        if endpoint == "get_modality_config":
            return self._modalities()
        if endpoint != "get_action":
            raise WireError(f"unknown endpoint {str(endpoint)[:40]!r}", HINT, code="wire-message")
        data = request.get("data")
        if not isinstance(data, Mapping):
            raise WireError("the request has no data", HINT, code="wire-message")
        if "observation" in data:
            return await self._batch(data["observation"], client)
        chunk = await self.core.act(self.keys.observation(_last_frames(data)), client, self.name)
        return {f"action.{name}": part for name, part in split(chunk.actions, self.actions).items()}

    async def _batch(self, observation: object, client: bytes) -> list[object]:
        """Answer N1.6 and later: each row of the batch is a separate request."""
        rows = [self.keys.observation(row) for row in rows_of(observation)]
        chunks = await asyncio.gather(
            *(self.core.act(row, (client, number), self.name) for number, row in enumerate(rows))
        )
        parts = split(np.stack([chunk.actions for chunk in chunks]), self.actions)
        return [parts, {"policy_version": min(chunk.version for chunk in chunks)}]

    def _modalities(self) -> dict[str, object]:
        """Return the modality configuration, in the form that all dialects read."""
        chunk = self.service.config.model.num_action_chunks
        names = {
            "video": ([key.removeprefix("video.") for key in self.keys.images], [0]),
            "state": ([Part.parse(text).key.removeprefix("state.") for text in self.keys.state], [0]),
            "action": ([part.key for part in self.actions], list(range(chunk))),
            "language": ([self.keys.instruction], [0]),
        }
        return {
            name: {
                "__ModalityConfig_class__": True,
                "as_json": {"delta_indices": steps, "modality_keys": keys},
            }
            for name, (keys, steps) in names.items()
        }

    async def stop_accepting(self) -> None:
        """No-op: a bound socket accepts clients until it is closed, and the core refuses their requests."""

    async def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
            for task in self._tasks:  # requests that could not be answered in time
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._socket.closed:
            self._socket.close()
            self._context.term()


def _last_frames(data: Mapping[Any, Any]) -> dict[Any, object]:
    """Drop the history of an N1.5 observation: keep the last of several frames."""
    return {
        key: value[-1] if isinstance(value, np.ndarray) and value.ndim == 4 and len(value) else value
        for key, value in data.items()
    }


def rows_of(observation: object) -> list[dict[str, object]]:
    """Return the rows of a batched observation as maps with N1.5's flat keys.

    Args:
        observation: ``{"video": {k: uint8[B,T,H,W,3]}, "state": {k: float[B,T,D]}, "language": {k: [[text]]}}``.

    Raises:
        WireError: the observation is malformed, or its parts differ in the number of rows.
    """
    if not isinstance(observation, Mapping):
        raise WireError("the observation is not a map", HINT, code="wire-observation")
    columns: dict[str, list[object]] = {}
    for kind in ("video", "state", "language"):
        entries = observation.get(kind, {})
        if not isinstance(entries, Mapping):
            raise WireError(f"'{kind}' is no map", HINT, code="wire-observation")
        for name, value in entries.items():
            key = str(name) if kind == "language" else f"{kind}.{name}"
            columns[key] = [_last(row) for row in _rows(key, value)]
    sizes = {len(column) for column in columns.values()}
    if len(sizes) != 1 or not 0 < min(sizes) <= MAX_ROWS:
        raise WireError(f"the observation has {sorted(sizes)} rows, not 1 to {MAX_ROWS}", HINT, code="wire-observation")
    return [{key: column[row] for key, column in columns.items()} for row in range(min(sizes))]


def _rows(key: str, value: object) -> list[Any]:
    is_array = isinstance(value, np.ndarray) and value.ndim >= 2
    if not is_array and not isinstance(value, (list, tuple)):
        raise WireError(f"'{key}' has no rows", HINT, code="wire-observation")
    return list(value)  # pyright: ignore[reportArgumentType]


def _last(row: object) -> object:
    return row[-1] if isinstance(row, (np.ndarray, list, tuple)) and len(row) else row
