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
    """Return the client of each scheme of a URL, as a class or ``module:Class``; of several, the first one."""
    found: dict[str, Any] = {}
    for protocol in SERVE_PROTOCOLS.all():
        for scheme in protocol.schemes:
            found.setdefault(scheme, protocol.client)
    return found


def client_of(config: RemoteConfig) -> Client:
    """Return a client of the server, not yet connected."""
    assert config.url is not None  # see remote_policy_has_a_url
    kind = clients()[config.url.partition("://")[0]]
    return (import_object(kind) if isinstance(kind, str) else kind)(config)


class RemoteConfig(ModelConfig):
    """A policy that acts elsewhere."""

    url: str | None = Field(
        default=None,
        description="of the server: ws:// or wss:// of openpi, tcp:// or zmq:// of GR00T, http:// or https:// of"
        " `embodrl serve protocol=http`; its token stands in the environment variable EMBODRL_TOKEN",
    )
    keys: GrootKeysConfig = Field(
        default=GrootKeysConfig(),
        description="keys of pictures, state and instruction, and the parts of GR00T's actions; what is empty is asked"
        " of the server, which openpi's own does not tell",
    )
    answer_timeout_s: PositiveFloat = Field(default=60.0, description="for the connection, and for each answer")
    reconnect_timeout_s: NonNegativeFloat = Field(
        default=120.0, description="seconds in which a server that is gone is connected to again; 0: not at all"
    )


RULES = RuleSet()


@RULES.rule("model.model_type", "model.url")
def remote_policy_has_a_url(context: Context) -> Iterator[Finding]:
    """The server's address is that of a protocol that has a client here."""
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
        yield Finding("model.url", f"'{url}' is no URL of a policy server", "give scheme, host and port", allowed)


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
    sizes="as the server has it",
    actions="as the server has it",
    checkpoint="the server's",
    rl="none: no gradients",
    only_acts="behind a server",
)
