"""Specs of the protocols of other policy servers."""

from __future__ import annotations

from pydantic import Field

from embodrl.config.schema import GrootKeysConfig, WireKeysConfig
from embodrl.specs import ServeProtocolSpec


class VlaEvalKeysConfig(WireKeysConfig):
    """Keys of vla-evaluation-harness messages; the server asks the benchmark for the content it needs."""

    observation_params: dict[str, bool] = Field(
        default={}, description="benchmark arguments that the server requests, e.g. {send_state: true}"
    )


class GrootServeConfig(GrootKeysConfig):
    """Keys of GR00T messages, as video.NAME and state.NAME, and the parts of an action."""


class LerobotServeConfig(WireKeysConfig):
    """Keys of lerobot messages: camera names, and joint names in the order of the state."""


class ActServeConfig(WireKeysConfig):
    """Keys of OpenVLA's POST /act."""


VLA_EVAL = ServeProtocolSpec(
    name="vla_eval",
    target="embodrl.serving.protocols.vla_eval:VlaEvalListener",
    description="vla-evaluation-harness's websocket protocol",
    settings=VlaEvalKeysConfig,
)
GR00T = ServeProtocolSpec(
    name="gr00t",
    target="embodrl.serving.protocols.gr00t:GrootListener",
    description="GR00T's protocol over ZeroMQ",
    settings=GrootServeConfig,
    has_tls=False,
    client="embodrl.serving.wire.gr00t_client:GrootClient",
    schemes=("tcp", "zmq"),
)
LEROBOT = ServeProtocolSpec(
    name="lerobot",
    target="embodrl.serving.protocols.lerobot:LerobotListener",
    description="lerobot's asynchronous inference over gRPC",
    settings=LerobotServeConfig,
    has_tls=False,
)
OPENAI = ServeProtocolSpec(
    name="openai",
    target="embodrl.serving.protocols.openai:OpenaiListener",
    description="OpenAI's chat completions, for policies that write text",
    serves_text=True,
)
ACT = ServeProtocolSpec(
    name="act",
    target="embodrl.serving.protocols.act:ActListener",
    description="OpenVLA's POST /act",
    settings=ActServeConfig,
)
