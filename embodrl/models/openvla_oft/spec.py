"""OpenVLA-OFT: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from embodrl.config.rules.base import Context, Finding, RuleSet
from embodrl.models.openvla.published import PUBLISHED
from embodrl.models.openvla.spec import DIMENSIONS, NUM_BINS, RL, TRAINABLE, VALUE_INPUTS, OpenVlaConfig, num_parameters
from embodrl.specs import ModelSpec


class OpenVlaOftConfig(OpenVlaConfig):
    """An OpenVLA-OFT."""

    use_proprio: bool = Field(default=False, description="feed the robot's state as a token")
    keep_stop_token: bool = Field(
        default=True, description="end the sequence with the stop token, as its public checkpoints"
    )


STATE = RuleSet()


@STATE.rule("model.model_type", "model.use_proprio", "env.include_state")
def state_is_there(context: Context) -> Iterator[Finding]:
    """A token of the robot's state needs the state."""
    if context.model(OpenVlaOftConfig).use_proprio and not context.config.env.include_state:
        yield Finding(
            "model.use_proprio",
            "the environment gives no state: env.include_state is false",
            "set env.include_state=true, or model.use_proprio=false",
            "false",
            others=("env.include_state",),
        )


SPEC = ModelSpec(
    name="openvla_oft",
    target="embodrl.models.openvla_oft.build:build_openvla_oft",
    description="OpenVLA-OFT: OpenVLA with several images and bidirectional parallel decoding of a chunk",
    settings=OpenVlaOftConfig,
    rules=(DIMENSIONS, STATE, PUBLISHED),
    kind="tokens",
    value_inputs=VALUE_INPUTS,
    trainable=TRAINABLE,
    uses_state="model.use_proprio",
    max_cameras=4,
    num_bins=NUM_BINS,
    parity="embodrl.models.openvla_oft.parity:run",
    num_parameters=num_parameters,
    sizes="2.3 M (tiny), 7.54 B",
    actions="256 bins a dimension, the whole chunk at once",
    checkpoint="discrete OpenVLA-OFT fine-tunes in Hugging Face layout",
    rl=RL,
)
