"""A policy behind a server: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import GrootKeysConfig, ModelConfig, NonNegativeFloat, PositiveFloat
from embodrl.names import import_object
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import SERVE_PROTOCOLS, ModelSpec

if TYPE_CHECKING:
    from embodrl.serving.wire.clients import Client


def clients() -> dict[str, Any]:
    """Return the client of each URL scheme, as a class or ``module:Class``; the first one registered wins."""
    found: dict[str, Any] = {}
    for protocol in SERVE_PROTOCOLS.all():
        for scheme in protocol.schemes:
            found.setdefault(scheme, protocol.client)
    return found


def client_of(config: RemoteConfig) -> Client:
    """Return an unconnected client of the server."""
    assert config.url is not None  # see remote_policy_has_a_url
    kind = clients()[config.url.partition("://")[0]]
    return (import_object(kind) if isinstance(kind, str) else kind)(config)


class RemoteConfig(ModelConfig):
    """A policy that runs on a server."""

    url: str | None = Field(
        default=None,
        description="URL of the server: ws:// or wss:// (openpi), tcp:// or zmq:// (GR00T), http:// or https:// of"
        " `embodrl serve protocol=http`; its token is read from the environment variable EMBODRL_TOKEN",
    )
    keys: GrootKeysConfig = Field(
        default=GrootKeysConfig(),
        description="keys of images, state and instruction, and the parts of GR00T's actions; empty ones are requested"
        " from the server, but openpi's own does not report them",
    )
    answer_timeout_s: PositiveFloat = Field(default=60.0, description="timeout for the connection, and per answer")
    reconnect_timeout_s: NonNegativeFloat = Field(
        default=120.0, description="period of reconnection attempts after a disconnect; 0: none"
    )


RULES = RuleSet()


@RULES.rule("model.model_type", "model.url")
def remote_policy_has_a_url(context: Context) -> Iterator[Finding]:
    """The server's URL scheme has a client."""
    url = context.model(RemoteConfig).url
    schemes = clients()
    allowed = ", ".join(f"{scheme}://HOST:PORT" for scheme in schemes)
    if url is None:
        yield Finding("model.url", "no server is named", "give the URL of a policy server", allowed)
        return
    try:
        parts = urlsplit(url)
        complete = parts.scheme in schemes and bool(parts.hostname) and parts.port is not None
    except ValueError:
        complete = False
    if not complete:
        yield Finding("model.url", f"'{url}' is not the URL of a policy server", "give scheme, host and port", allowed)


@RULES.rule("model.model_type", "model.model_path", "model.stats_path", "model.unnorm_key", "model.lora_path")
def remote_policy_has_its_own_weights(context: Context) -> Iterator[Finding]:
    """Weights and statistics are the server's."""
    for name in ("model_path", "stats_path", "unnorm_key", "lora_path"):
        if getattr(context.config.model, name) is not None:
            message = "has no effect on a policy behind a server"
            yield Finding(f"model.{name}", message, "remove it", "null", others=("model.model_type",))


SPEC = ModelSpec(
    name="remote",
    target="embodrl.models.remote_policy.policy:build_remote",
    description="a policy behind a server of openpi, GR00T or `embodrl serve`, for eval only",
    settings=RemoteConfig,
    rules=(RULES,),
    value_head=False,
    sizes="as on the server",
    actions="as on the server",
    checkpoint="the server's",
    rl="none: no gradients",
    only_acts="behind a server",
)
