"""The verb `embodrl serve`, two of its protocols, and the engine whose rollouts act by such servers. No torch here."""

from __future__ import annotations

from embodrl.specs import EngineSpec, ServeProtocolSpec, VerbSpec

OPENPI = ServeProtocolSpec(
    name="openpi",
    target="embodrl.extras.serving.openpi:OpenpiListener",
    description="openpi's websocket protocol",
    client="embodrl.extras.serving.clients:OpenpiClient",
    schemes=("ws", "wss"),
)
HTTP = ServeProtocolSpec(
    name="http",
    target="embodrl.extras.serving.api:ApiListener",
    description="embodrl's own HTTP API, for rollouts, too",
    client="embodrl.extras.serving.clients:HttpClient",
    schemes=("http", "https"),
)
REMOTE = EngineSpec(
    name="remote",
    rollout="embodrl.extras.serving.remote_engine:make_remote",
    description="acts by policy servers, which take the published weights",
)
VERB = VerbSpec(
    name="serve",
    target="embodrl.extras.serving.cli:serve",
    description="Serve a policy to robots and benchmarks, until Ctrl-C or SIGTERM.",
)
