"""Section ``model``: the policy. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from embodrl.config.schema.section import (
    POLICY,
    AppliesIf,
    NameOf,
    PathText,
    PositiveFloat,
    PositiveInt,
    ReadBy,
    Section,
)
from embodrl.specs import DEFAULT_MODEL, SMALL_ACTORS


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., 2021), used with trainable: lora."""

    rank: PositiveInt = Field(default=32, description="rank of the adapters")
    alpha: PositiveInt | None = Field(
        default=None, description="scale times rank; null is min(rank, 16), as in OpenVLA"
    )
    target_modules: tuple[str, ...] = Field(
        default=(),
        description="last parts of the names of linear layers, e.g. q_proj; empty: all linear layers of the network",
    )


ON_FEATURES = AppliesIf("algorithm.critic.kind", ("head",))


class ValueHeadConfig(Section):
    """MLP from hidden states to the value."""

    input: Annotated[Literal["auto", "prompt_end", "prompt_mean", "prefix", "suffix"], ON_FEATURES] = Field(
        default="auto",
        description="prompt_end, prompt_mean: hidden state of the last prompt token, or the mean over images and"
        " prompt (OpenVLA); prefix, suffix: mean over images and prompt, or over the action expert's output (flow"
        " policies); auto: the family's default",
    )
    detach: Annotated[bool, ON_FEATURES] = Field(
        default=False, description="let the value loss train only the value head"
    )
    hidden_sizes: Annotated[tuple[PositiveInt, ...], ON_FEATURES] = Field(
        default=(512, 128), description="hidden units"
    )
    output: Literal["chunk", "action"] = Field(default="chunk", description="one value per chunk, or one per action")


class SmallActorConfig(Section):
    """A small Gaussian actor that learns off-policy on top of a frozen policy of any family."""

    kind: Annotated[str, NameOf(SMALL_ACTORS)] | None = Field(
        default=None,
        description="residual: adds to the action; dsrl: chooses the noise that a flow policy denoises; rlt: chooses"
        " the action, from an RL token and the policy's action; null: none, or the checkpoint's",
    )
    scale: PositiveFloat = Field(
        default=0.2, description="maximum change of an action (residual), or maximum noise (dsrl)"
    )
    hidden_sizes: tuple[PositiveInt, ...] = Field(default=(256, 256), description="hidden units of the MLP")
    initial_std: PositiveFloat = Field(default=0.6, description="initial standard deviation", lt=7)
    max_state_dim: PositiveInt = Field(
        default=64, description="dimension to which the state is zero-padded for the actor"
    )


class ModelConfig(Section):
    """The policy: the settings shared by all families.

    A family with settings of its own derives a class from this one, adds fields with defaults, and names the class in
    its spec; its builder receives an instance.
    """

    model_type: Annotated[str, ReadBy(*POLICY.verbs, "collect")] = Field(
        default=DEFAULT_MODEL, description="model family: a name from `embodrl list models`"
    )
    model_path: PathText | None = Field(
        default=None,
        description="checkpoint in the family's public layout: a directory, or OWNER/NAME[@REVISION] on the hub;"
        " null: the tiny size",
    )
    lora_path: PathText | None = Field(
        default=None,
        description="adapters in peft's layout, a directory or OWNER/NAME[@REVISION] on the hub, for the weights of"
        " model_path or warm_start: they continue training with trainable=lora of the same rank, and are merged"
        " otherwise",
    )
    warm_start: Annotated[PathText | None, AppliesIf("model.model_path", (None,))] = Field(
        default="builtin",
        description="weights of the tiny size: builtin (shipped with embodrl), a directory, or null for random ones;"
        " not used with model_path",
    )
    random_weights: Annotated[bool, ReadBy("eval", "record", "serve")] = Field(
        default=False,
        description="allow evaluating or serving an untrained policy, if neither model_path nor warm_start names"
        " weights",
    )
    num_action_chunks: PositiveInt = Field(default=5, description="actions predicted at once (C)")
    action_dim: Annotated[PositiveInt, ReadBy(*POLICY.verbs, "collect")] = Field(
        default=7, description="dimensions of an action (A)"
    )
    unnorm_key: Annotated[str | None, AppliesIf("model.model_path")] = Field(
        default=None, description="name of the statistics that un-normalise actions; null if the checkpoint has one set"
    )
    stats_path: PathText | None = Field(
        default=None,
        description="file of robot statistics (`embodrl data stats`, LeRobot's stats.json, openpi's norm_stats.json),"
        " used instead of the checkpoint's; null: the checkpoint's",
    )
    add_value_head: bool = Field(default=True, description="add a value head, which actor-critic losses need")
    value_head: Annotated[ValueHeadConfig, AppliesIf("model.add_value_head")] = Field(
        default=ValueHeadConfig(), description="shape of the value head"
    )
    small_actor: Annotated[SmallActorConfig, AppliesIf("model.small_actor.kind")] = Field(
        default=SmallActorConfig(), description="small actor on a frozen policy (algorithm=residual, dsrl, rlt)"
    )
    center_crop: bool = Field(
        default=False, description="crop 90 % of the image's area, for checkpoints trained with random crops"
    )
    condition: Literal["positive", "negative"] | None = Field(
        default=None,
        description="advantage stated in every instruction when the policy acts, for policies trained with"
        " algorithm=recap; null states none",
    )
    freeze_vision: Annotated[bool, AppliesIf("model.trainable", ("all", "lora"))] = Field(
        default=False, description="do not train the vision backbone"
    )
    trainable: Literal["all", "lora", "action_expert", "head"] = Field(
        default="all",
        description="trained part besides the value head: all weights, low-rank adapters, the action expert (flow"
        " policies), or only the output layer",
    )
    lora: Annotated[LoraConfig, AppliesIf("model.trainable", ("lora",))] = Field(
        default=LoraConfig(), description="low-rank adapters"
    )
    gripper: Literal["as_is", "libero", "bridge"] = Field(
        default="as_is",
        description="last action dimension: as_is: unchanged; libero: 0..1 (1 open) becomes -1 open, +1 closed;"
        " bridge: 0..1 becomes -1 closed, +1 open",
    )
