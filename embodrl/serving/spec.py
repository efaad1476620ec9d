"""The protocols of the core, for the configuration."""

from __future__ import annotations

from embodrl.specs import ServeProtocolSpec

OPENPI = ServeProtocolSpec(
    name="openpi",
    target="embodrl.serving.openpi:OpenpiListener",
    description="openpi's websocket protocol",
    client="embodrl.serving.clients:OpenpiClient",
    schemes=("ws", "wss"),
)
HTTP = ServeProtocolSpec(
    name="http",
    target="embodrl.serving.api:ApiListener",
    description="embodrl's own HTTP API, for rollouts, too",
    client="embodrl.serving.clients:HttpClient",
    schemes=("http", "https"),
)
