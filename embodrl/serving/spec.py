"""The verb `embodrl serve` and two of its protocols. Imports no torch."""

from __future__ import annotations

from embodrl.specs import ServeProtocolSpec, VerbSpec

OPENPI = ServeProtocolSpec(
    name="openpi",
    target="embodrl.serving.openpi:OpenpiListener",
    description="openpi's websocket protocol",
    client="embodrl.serving.wire.clients:OpenpiClient",
    schemes=("ws", "wss"),
)
HTTP = ServeProtocolSpec(
    name="http",
    target="embodrl.serving.api:ApiListener",
    description="embodrl's own HTTP API, also for rollouts",
    client="embodrl.serving.wire.clients:HttpClient",
    schemes=("http", "https"),
)
VERB = VerbSpec(
    name="serve",
    target="embodrl.cli.serve:serve",
    description="Serve a policy to robots and benchmarks, until Ctrl-C or SIGTERM.",
)
