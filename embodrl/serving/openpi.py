"""openpi's websocket protocol: the server sends its metadata, then answers each observation with an action chunk.

Source: github.com/Physical-Intelligence/openpi, src/openpi/serving/websocket_policy_server.py and
packages/openpi-client.
"""

from __future__ import annotations

from typing import Any

from embodrl.errors import EmbodrlError
from embodrl.serving.core import explain
from embodrl.serving.listener import HttpListener, Service
from embodrl.serving.wire.codec import openpi_default, openpi_envelope, pack, unpack


class OpenpiListener(HttpListener):
    """Answers a binary frame with ``{"actions": float32[C,A], "policy_version", "server_timing"}``.

    An error is a text frame, as in openpi; unlike openpi, the connection stays open after it.
    """

    name = "openpi"
    scheme = "ws"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        settings = service.settings.openpi
        self.keys = service.wire_map(settings, "observation/{}", "observation/state", "prompt")

    async def converse(self, socket: Any, client: object) -> None:
        await socket.send_bytes(pack(self.service.info(self.keys), openpi_default))
        previous: float | None = None
        async for frame in socket:
            if frame.type not in (self.web.WSMsgType.BINARY, self.web.WSMsgType.TEXT):
                break  # too large or not part of the protocol: aiohttp has closed the connection
            try:
                if frame.type != self.web.WSMsgType.BINARY:
                    await socket.send_str("received a text frame, expected an observation in msgpack [wire-message]")
                    continue
                message = unpack(frame.data, openpi_envelope)
                observation = self.keys.observation(message)
                chunk = await self.core.act(observation, client, self.name, self.service.prefix(message))
            except Exception as error:  # noqa: BLE001 - reported to the client; the connection stays open
                self.core.metrics.count("errors_total", self.name)
                await socket.send_str(explain(error))
                if isinstance(error, EmbodrlError) and error.code == "server-stopping":
                    break
                continue
            timing = {"infer_ms": chunk.infer_ms}
            if previous is not None:
                timing["prev_total_ms"] = previous
            previous = chunk.total_ms
            reply = {"actions": chunk.actions, "policy_version": chunk.version, "server_timing": timing}
            await socket.send_bytes(pack(reply, openpi_default))
