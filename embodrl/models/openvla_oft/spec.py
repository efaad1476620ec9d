"""OpenVLA-OFT: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from embodrl.config.rules.base import Context
from embodrl.config.rules.model import BUILTIN
from embodrl.config.schema.section import AppliesIf
from embodrl.models.openvla.published import PUBLISHED, interface
from embodrl.models.openvla.spec import (
    DIMENSIONS,
    NUM_BINS,
    RL,
    SHIPPED,
    TRAINABLE,
    VALUE_INPUTS,
    OpenVlaConfig,
    num_parameters,
)
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import ModelSpec

DIFFUSION = AppliesIf("model.action_head", ("diffusion",))


class OpenVlaOftConfig(OpenVlaConfig):
    """An OpenVLA-OFT."""

    use_proprio: bool = Field(default=False, description="feed the robot's state as a token")
    keep_stop_token: bool = Field(
        default=True, description="end the sequence with the stop token, as in the public checkpoints"
    )
    action_head: Literal["tokens", "l1", "diffusion"] = Field(
        default="tokens",
        description="tokens: 256 bins per dimension; l1: a head that regresses the chunk; diffusion: one that denoises"
        " it; the latter two have no log-probs, and are for `eval` and `sft`",
    )
    diffusion_steps: Annotated[PositiveInt, DIFFUSION] = Field(
        default=50, le=1000, description="diffusion: noise levels of the training; public files do not say how many"
    )
    denoising_steps: Annotated[PositiveInt, DIFFUSION] = Field(
        default=50, description="diffusion: steps that choose a chunk, each a pass of the language model"
    )
    new_components: bool = Field(
        default=False,
        description="begin an action head and projectors that the checkpoint lacks with random weights, to fine-tune an"
        " OpenVLA into an OpenVLA-OFT; `embodrl sft` alone",
    )
    use_film: bool = Field(default=False, description="the vision backbone reads the instruction (FiLM, OpenVLA-OFT+)")
    normalization: Literal["quantiles", "min_max"] | None = Field(
        default=None,
        description="statistics of a checkpoint used as ends of the range; null: min_max for the 14 dimensions of"
        " ALOHA, else quantiles",
    )


STATE = RuleSet()


@STATE.rule("model.model_type", "model.use_proprio", "env.include_state")
def state_is_there(context: Context) -> Iterator[Finding]:
    """A state token needs the robot's state."""
    if context.model(OpenVlaOftConfig).use_proprio and not context.config.env.include_state:
        yield Finding(
            "model.use_proprio",
            "the environment gives no state: env.include_state is false",
            "set env.include_state=true, or model.use_proprio=false",
            "false",
            others=("env.include_state",),
        )


@STATE.rule("model.model_type", "model.action_head", "algorithm.loss_type")
def continuous_head_has_no_density(context: Context) -> Iterator[Finding]:
    """Reinforcement learning needs action probabilities, which regressed and denoised actions lack."""
    head = context.model(OpenVlaOftConfig).action_head
    if head != "tokens":
        yield Finding(
            "model.action_head",
            f"loss_type '{context.config.algorithm.loss_type}' needs log-probs, but a head '{head}' has none",
            "use it with `embodrl eval` and `embodrl sft`, or set model.action_head=tokens",
            "tokens",
            others=("algorithm.loss_type",),
        )


@STATE.rule("model.new_components")
def new_components_are_trained(context: Context) -> Iterator[Finding]:
    """Actions of a head with random weights mean nothing."""
    if context.model(OpenVlaOftConfig).new_components and context.verb not in (None, "sft"):
        message = f"would let `embodrl {context.verb}` act with random weights"
        yield Finding("model.new_components", message, "train them by `embodrl sft`, and leave it out here", "false")


@STATE.rule("model.denoising_steps", "model.diffusion_steps", "model.action_head")
def denoising_is_no_longer_than_diffusion(context: Context) -> Iterator[Finding]:
    """A chunk is denoised in some of the steps that were trained."""
    model = context.model(OpenVlaOftConfig)
    if model.action_head == "diffusion" and model.denoising_steps > model.diffusion_steps:
        most = model.diffusion_steps
        message = f"is {model.denoising_steps}, and the head is trained at {most} noise levels"
        hint = f"set it to {most} or less"
        yield Finding("model.denoising_steps", message, hint, f"1 to {most}", others=("model.diffusion_steps",))


FORM = ("use_proprio", "keep_stop_token", "action_head", "use_film", "normalization")


@STATE.rule("model.warm_start", "model.model_path", *(f"model.{name}" for name in FORM))
def shipped_weights_have_one_form(context: Context) -> Iterator[Finding]:
    """The shipped warm start was trained with the default parts."""
    model = context.model(OpenVlaOftConfig)
    if model.warm_start != BUILTIN or model.model_path is not None:
        return
    default = OpenVlaOftConfig()
    for name in FORM:
        trained = getattr(default, name)
        if getattr(model, name) != trained:
            yield Finding(
                f"model.{name}",
                "the shipped weights were trained without it",
                "leave it out, or set model.warm_start=null for random weights",
                str(trained).lower() if trained is not None else "null",
                others=("model.warm_start",),
            )


@STATE.note("model.model_type", "model.action_head", "sft.label_smoothing_bins")
def continuous_head_has_no_bins(context: Context) -> Iterator[Finding]:
    """A regressed or denoised action has no bins to smooth."""
    head = context.model(OpenVlaOftConfig).action_head
    if head != "tokens" and context.by_user("sft.label_smoothing_bins"):
        yield Finding("sft.label_smoothing_bins", f"has no effect: model.action_head is {head}", "leave it out")


SPEC = ModelSpec(
    name="openvla_oft",
    target="embodrl.models.openvla_oft.build:build_openvla_oft",
    description="OpenVLA-OFT: OpenVLA with several images and bidirectional parallel decoding of a chunk",
    recognizes=lambda raw: raw.get("model_type") == "openvla",
    settings=OpenVlaOftConfig,
    rules=(DIMENSIONS, SHIPPED, STATE, PUBLISHED),
    kind="tokens",
    public_layout=True,
    value_inputs=VALUE_INPUTS,
    trainable=TRAINABLE,
    uses_state="model.use_proprio",
    max_cameras=4,
    num_bins=NUM_BINS,
    keeps_vision_features=True,
    builtin_warm_start=True,
    interface=interface,
    num_parameters=num_parameters,
    sizes="2.3 M (tiny), 7.54 B",
    actions="256 bins per dimension, regressed (L1) or denoised (DDIM); the whole chunk at once",
    checkpoint="moojink/openvla-7b-oft-* (L1, proprio, FiLM) and discrete fine-tunes in Hugging Face layout",
    rl=f"{RL}; none with an L1 or diffusion head",
)
