"""Section ``serve``: the policy server of `embodrl serve`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from embodrl.config.schema.section import NameOf, NonNegativeFloat, PathText, PositiveFloat, PositiveInt, Section
from embodrl.specs import SERVE_PROTOCOLS

Port = Annotated[int, Field(ge=0, le=65535)]


class WireKeysConfig(Section):
    """Where an observation is in the messages of a protocol."""

    images: tuple[str, ...] = Field(
        default=(),
        description="keys of the pictures, in the order of env.cameras, of which the first ones are used; empty: named"
        " after the cameras. A dot leads into a map: images.wrist",
    )
    state: tuple[str, ...] = Field(
        default=(),
        description="keys of the robot's state, joined in this order; KEY:DIMS also checks the number of values; empty:"
        " the protocol's own",
    )
    instruction: str | None = Field(default=None, description="key of the instruction; null: the protocol's own")


class GrootKeysConfig(WireKeysConfig):
    """The same for GR00T's protocol, whose actions have names as well."""

    actions: tuple[str, ...] = Field(
        default=(), description="names of the parts of an action, each as NAME:DIMS; empty: one part, action"
    )


class ServeConfig(Section):
    """`embodrl serve`."""

    protocols: tuple[Annotated[str, NameOf(SERVE_PROTOCOLS)], ...] = Field(
        default=("openpi",),
        min_length=1,
        description="what is spoken, each on a port of its own; on the command line also protocol=openpi,http",
    )
    host: str = Field(default="127.0.0.1", description="address to listen at; 0.0.0.0 is every one of this machine")
    port: Port = Field(
        default=8000,
        description="of the first protocol; the others follow in order; 0 takes free ones, which are printed",
    )
    token: str = Field(
        default="auto",
        description="what clients have to know; auto: drawn at each start and printed; none: anyone who reaches the"
        " port may ask",
    )
    tls_cert: PathText | None = Field(default=None, description="certificate chain (PEM), for wss:// and https://")
    tls_key: PathText | None = Field(default=None, description="its private key (PEM)")
    max_batch_size: PositiveInt = Field(default=32, le=4096, description="observations computed at once")
    max_wait_ms: NonNegativeFloat = Field(
        default=5.0,
        le=10_000,
        description="milliseconds that an observation waits for those of other clients; it does not wait when all"
        " clients of the last second have asked",
    )
    decoding: Literal["greedy", "sampled", "mean"] = Field(
        default="greedy",
        description="how actions are chosen: the most probable, drawn, or nearest to the mean (openvla, openvla_oft)",
    )
    execution_horizon: PositiveInt | None = Field(
        default=None,
        description="actions of a chunk that are executed before the policy is asked again, where the server hands out"
        " one at a time (vla_eval); null: all of the chunk",
    )
    pad_state: bool = Field(
        default=False,
        description="answer observations whose state is missing or shorter than in training, as if zeros had been"
        " sent; otherwise they are refused",
    )
    rtc_max_guidance_weight: PositiveFloat = Field(
        default=5.0,
        le=100.0,
        description="largest weight of guidance towards the present chunk, for clients that send what is left of it"
        " (real-time chunking; flow policies)",
    )
    max_message_mb: PositiveInt = Field(
        default=64, le=1024, description="size of a message in MB; larger ones are refused"
    )
    max_connections: PositiveInt = Field(
        default=4096, le=65536, description="clients at a time, of each protocol over HTTP or websockets"
    )
    drain_timeout_s: PositiveFloat = Field(
        default=10.0, description="seconds after SIGTERM in which requests under way are answered"
    )
    stall_timeout_s: PositiveFloat = Field(
        default=20.0,
        description="seconds that a batch may use no processor time before its requests get an error; after four times"
        " as many the server ends",
    )
    follow: bool = Field(
        default=True,
        description="take up newer weights that the served run publishes (rollout.publish_weights=true)",
    )
    openpi: WireKeysConfig = Field(default=WireKeysConfig(), description="keys of openpi's messages")
    http: WireKeysConfig = Field(default=WireKeysConfig(), description="keys of embodrl's own HTTP API")
