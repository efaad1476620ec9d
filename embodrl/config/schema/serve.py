"""Section ``serve``: the policy server of `embodrl serve`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from embodrl.config.schema.section import NameOf, NonNegativeFloat, PathText, PositiveFloat, PositiveInt, Section
from embodrl.specs import SERVE_PROTOCOLS

Port = Annotated[int, Field(ge=0, le=65535)]


class WireKeysConfig(Section):
    """Keys of an observation in the messages of a protocol."""

    images: tuple[str, ...] = Field(
        default=(),
        description="keys of the images, in the order of env.cameras; surplus keys are ignored; empty: named after"
        " the cameras. A dot descends into a map: images.wrist",
    )
    state: tuple[str, ...] = Field(
        default=(),
        description="keys of the robot's state, concatenated in this order; KEY:DIMS also checks the number of"
        " values; empty: the protocol's default",
    )
    instruction: str | None = Field(default=None, description="key of the instruction; null: the protocol's default")


class GrootKeysConfig(WireKeysConfig):
    """Keys of GR00T's protocol, whose actions are named as well."""

    actions: tuple[str, ...] = Field(
        default=(), description="names of the parts of an action, each as NAME:DIMS; empty: a single part, action"
    )


class ServeConfig(Section):
    """`embodrl serve`."""

    protocols: tuple[Annotated[str, NameOf(SERVE_PROTOCOLS)], ...] = Field(
        default=("openpi",),
        min_length=1,
        description="protocols served, each on its own port; on the command line also protocol=openpi,http",
    )
    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 is every address of this machine")
    port: Port = Field(
        default=8000,
        description="port of the first protocol; the others use the following ones; 0 chooses free ports, which are"
        " printed",
    )
    token: str = Field(
        default="auto",
        description="access token of clients; auto: generated at each start and printed; none: anyone who reaches the"
        " port has access",
    )
    tls_cert: PathText | None = Field(default=None, description="certificate chain (PEM), for wss:// and https://")
    tls_key: PathText | None = Field(default=None, description="private key of the certificate (PEM)")
    max_batch_size: PositiveInt = Field(default=32, le=4096, description="maximum observations per batch")
    max_wait_ms: NonNegativeFloat = Field(
        default=5.0,
        le=10_000,
        description="milliseconds that an observation waits for other clients' observations; no wait if all"
        " clients seen in the last second have sent one",
    )
    decoding: Literal["greedy", "sampled", "mean"] = Field(
        default="greedy",
        description="how actions are chosen: greedy: the most probable; sampled; or mean: nearest to the mean"
        " (openvla, openvla_oft)",
    )
    execution_horizon: PositiveInt | None = Field(
        default=None,
        description="actions of a chunk that are executed before the next query, where the server returns one at a"
        " time (vla_eval); null: the whole chunk",
    )
    pad_state: bool = Field(
        default=False,
        description="zero-pad observations whose state is missing or shorter than in training; otherwise they are"
        " refused",
    )
    rtc_max_guidance_weight: PositiveFloat = Field(
        default=5.0,
        le=100.0,
        description="maximum guidance weight towards the current chunk, for clients that send its remainder"
        " (real-time chunking; flow policies)",
    )
    max_message_mb: PositiveInt = Field(
        default=64, le=1024, description="maximum message size in MB; larger messages are refused"
    )
    max_connections: PositiveInt = Field(
        default=4096, le=65536, description="maximum concurrent clients of each protocol over HTTP or websockets"
    )
    drain_timeout_s: PositiveFloat = Field(
        default=10.0, description="seconds after SIGTERM in which pending requests are answered"
    )
    stall_timeout_s: PositiveFloat = Field(
        default=20.0,
        description="seconds for which a batch may use no processor time before its requests fail; after four times"
        " as long the server exits",
    )
    follow: bool = Field(
        default=True,
        description="load newer weights that the served run publishes (rollout.publish_weights=true)",
    )
    openpi: WireKeysConfig = Field(default=WireKeysConfig(), description="keys of openpi's messages")
    http: WireKeysConfig = Field(default=WireKeysConfig(), description="keys of embodrl's own HTTP API")
