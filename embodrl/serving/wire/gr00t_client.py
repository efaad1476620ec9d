"""The client of GR00T's protocol.

Shapes: B batch, H chunk length of the server, A action dimensions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from embodrl.serving.wire.clients import (
    MAX_BYTES,
    PROBE_S,
    PROBE_TIMEOUT_S,
    Client,
    ClientSettings,
    Gone,
    changed,
    refusal,
    refused,
    texts,
)
from embodrl.serving.wire.codec import Array, need, pack, unpack
from embodrl.serving.wire.gr00t_codec import groot_envelope, groot_npy_default
from embodrl.serving.wire.keys import lookup, put
from embodrl.types import Observation


class GrootClient(Client):
    """GR00T's ZMQ in the N1.6 dialect, which N1.7 reads too: one request of B rows.

    ZMQ's threads exchange heartbeats while the policy computes, so a stopped or lost server is noticed.
    """

    def __init__(self, config: ClientSettings) -> None:
        super().__init__(config)
        self._asyncio: Any = need("zmq.asyncio")
        self._zmq: Any = need("zmq")
        self._address = "tcp://" + self.url.partition("://")[2]
        self._context: Any = None
        self._actions: tuple[str, ...] = ()
        self._lock = asyncio.Lock()  # a REQ socket allows one request at a time
        self._socket: Any = None
        self._monitor: Any = None

    async def connect(self) -> None:
        self._context = self._asyncio.Context()
        self._server_info = await self._hello(self.config.answer_timeout_s)
        names: dict[str, tuple[str, ...]] = {}
        for kind, content in self._server_info.items() if isinstance(self._server_info, Mapping) else ():
            as_json = content.get("as_json") if isinstance(content, Mapping) else None
            names[kind] = texts(as_json.get("modality_keys")) if isinstance(as_json, Mapping) else ()
        language = names.get("language", ())
        self._learn(
            {
                "images": [f"video.{name}" for name in names.get("video", ())],
                "state": [f"state.{name}" for name in names.get("state", ())],
                "instruction": language[0] if language else None,
            }
        )
        self._actions = tuple(text.rpartition(":")[0] or text for text in self.config.keys.actions) or names.get(
            "action", ()
        )

    async def _hello(self, limit_s: float) -> Any:
        return await self._call({"endpoint": "get_modality_config"}, limit_s)

    async def _return(self) -> None:
        # ZMQ reconnects by itself, but does not report a server that stays away.
        if await self._hello(self.config.reconnect_timeout_s) != self._server_info:
            raise changed(self.url)

    async def act(self, observation: Observation) -> Array:
        rows = [self.keys.message(observation, row) for row in range(len(observation.images))]
        content: dict[str, Any] = {"video": {}, "state": {}, "language": {}}
        for key in rows[0]:
            column = [row[key] for row in rows]
            if key == self.keys.instruction:
                content["language"][key.removeprefix("language.")] = [[text] for text in column]
            else:
                put(content, key, np.stack(column)[:, None], nested=True)
        request = {"endpoint": "get_action", "data": {"observation": content, "options": None}}
        answer = await self._with_reconnect(lambda: self._call(request, self.config.answer_timeout_s), self._return)
        actions = answer[0] if isinstance(answer, list) and answer else None
        if not isinstance(actions, Mapping):
            raise refused("a response without actions")
        found = [lookup(actions, name) for name in self._actions or tuple(map(str, actions))]
        if not found or not all(isinstance(part, np.ndarray) and part.ndim == 3 for part in found):
            raise refused(f"actions {', '.join(map(str, actions))} where {', '.join(self._actions)} were due")
        return np.concatenate(cast(list[Array], found), axis=-1)

    def _connected(self) -> Any:
        if self._socket is None:
            self._socket = self._context.socket(self._zmq.REQ)
            self._socket.linger = 0
            self._socket.maxmsgsize = MAX_BYTES
            self._socket.heartbeat_ivl = int(1e3 * PROBE_S)
            self._socket.heartbeat_timeout = int(1e3 * PROBE_TIMEOUT_S)
            self._monitor = self._socket.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)
            self._socket.connect(self._address)
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._socket = None

    async def _call(self, request: dict[str, Any], limit_s: float) -> Any:
        if self.token is not None:
            request = request | {"api_token": self.token}
        async with self._lock:
            socket = self._connected()
            await socket.send(pack(request, groot_npy_default))
            answer = asyncio.ensure_future(socket.recv())
            lost = asyncio.ensure_future(self._monitor.recv_multipart())
            await asyncio.wait({answer, lost}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            is_lost = lost.done()
            lost.cancel()
            if not answer.done():
                answer.cancel()
                self._disconnect()
                raise Gone("the connection has ended, or the server sends no heartbeats") if is_lost else self._late()
            data = answer.result()
        found = unpack(data, groot_envelope)
        if isinstance(found, Mapping) and "error" in found:
            raise refusal(str(found["error"]))
        return found

    async def close(self) -> None:
        if self._context is not None:
            self._disconnect()
            self._context.destroy(linger=0)  # a context with an open socket would block when it is collected
