"""A protocol of `embodrl serve`: a greeting on a websocket."""

from __future__ import annotations

from typing import Any

from embodrl.config.schema import section_in
from embodrl.serving.listener import HttpListener, Service
from guest.specs import ProtocolConfig


class Listener(HttpListener):
    """Greets, and says the version of the policy."""

    name = "guest_protocol"
    scheme = "ws"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.settings = section_in(service.settings, "guest_protocol", ProtocolConfig)
        self.keys = service.wire_map(self.settings, "images.{}", "state", "instruction")

    async def converse(self, socket: Any, client: object) -> None:
        """Send the greeting and close."""
        await socket.send_str(f"{self.settings.greeting} {self.core.version}")
