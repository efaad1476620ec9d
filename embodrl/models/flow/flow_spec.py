"""Shared spec parts of flow-matching families: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

from embodrl.config.policy_card import checkpoint_name, policy_directory
from embodrl.config.rules.base import Context, multiples, path_kind
from embodrl.config.schema import ModelConfig, NonNegativeInt, PositiveFloat, PositiveInt, Section
from embodrl.config.schema.section import AppliesIf
from embodrl.errors import EmbodrlError
from embodrl.fields import read_fields
from embodrl.interface import LIBERO, Interface
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import ModelSpec

ACTIONS = "continuous chunk by flow matching"


class SiglipConfig(Section):
    """SigLIP of pi0, pi0.5 and GR00T; all blocks are run."""

    width: PositiveInt = Field(default=96, description="embedding dimension")
    depth: PositiveInt = Field(default=3, description="blocks")
    num_heads: PositiveInt = Field(default=3, description="attention heads; divides width")
    mlp_dim: PositiveInt = Field(default=384, description="hidden units of the MLP")


class FlowConfig(Section):
    """Sampling of flow policies (pi0, pi0.5, GR00T), and the noise that makes it a distribution."""

    method: Literal["flow_sde", "flow_noise", "cfm"] = Field(
        default="flow_sde",
        description="flow_sde: one random denoising step is stochastic; flow_noise: all are, with learned noise; cfm:"
        " none is, and ratios come from flow-matching losses (algorithm=fpo)",
    )
    num_steps: PositiveInt = Field(default=4, description="denoising steps")
    evaluation_noise: Literal["fixed", "drawn"] = Field(
        default="fixed",
        description="starting noise of evaluation and serving. fixed: one noise for every chunk; drawn: one per"
        " observation, derived from its images and state alone; published evaluations draw it",
    )
    noise_level: Annotated[PositiveFloat, AppliesIf("model.flow.method", ("flow_sde",))] = Field(
        default=0.5, description="eta of flow_sde"
    )
    joint: Annotated[Literal["sum", "mean"], AppliesIf("model.flow.method", ("flow_noise",))] = Field(
        default="sum",
        description="log-prob of flow_noise: sum over start and steps, the chain's likelihood; mean as RLinf",
    )
    noise_std_min: Annotated[PositiveFloat, AppliesIf("model.flow.method", ("flow_noise",))] = Field(
        default=0.08, description="minimum standard deviation of a flow_noise step"
    )
    noise_std_max: Annotated[PositiveFloat, AppliesIf("model.flow.method", ("flow_noise",))] = Field(
        default=0.16, description="maximum standard deviation of a flow_noise step; above noise_std_min"
    )
    num_samples: Annotated[PositiveInt, AppliesIf("model.flow.method", ("cfm",))] = Field(
        default=8, le=100, description="cfm: pairs of noise and time that estimate the flow-matching loss of a chunk"
    )
    keep_errors: Annotated[bool, AppliesIf("model.flow.method", ("flow_sde", "cfm"))] = Field(
        default=False,
        description="flow_sde and cfm: rollouts keep the velocity errors (algorithm=pi_nft)",
    )
    rtc_max_delay: NonNegativeInt | None = Field(
        default=None,
        description="trained real-time chunking: imitation gives the first d actions of a chunk clean and learns the"
        " rest, d drawn from 0 to this; serving then continues chunks so, rather than by guidance. 0: off; null: as the"
        " policy of model.model_path or model.warm_start was trained, else off",
    )


class FlowModelConfig(ModelConfig):
    """A policy that draws actions by flow matching."""

    flow: FlowConfig = Field(default=FlowConfig(), description="sampling of flow policies")


FLOW = RuleSet()


@FLOW.rule("model.flow.noise_std_min", "model.flow.noise_std_max")
def noise_range_is_not_empty(context: Context) -> Iterator[Finding]:
    """The learned noise has a range."""
    flow = context.model(FlowModelConfig).flow
    if flow.noise_std_min >= flow.noise_std_max:
        yield Finding(
            "model.flow.noise_std_min",
            f"{flow.noise_std_min} is not below model.flow.noise_std_max = {flow.noise_std_max}",
            "set it to half of noise_std_max",
            f"above 0, below {flow.noise_std_max}",
            others=("model.flow.noise_std_max",),
        )


@FLOW.rule("model.flow.rtc_max_delay", "model.num_action_chunks")
def something_is_left_to_learn(context: Context) -> Iterator[Finding]:
    """At least one of the executed actions is not given."""
    model = context.model(FlowModelConfig)
    delay = model.flow.rtc_max_delay
    chunk = model.num_action_chunks
    if delay is not None and delay >= chunk:
        yield Finding(
            "model.flow.rtc_max_delay",
            f"{delay} actions of a chunk would be given, of {chunk} that are run",
            f"set it to {chunk - 1} or less, or run more actions of a chunk",
            f"0 to {chunk - 1}",
            others=("model.num_action_chunks",),
        )


@FLOW.rule("model.flow.method", "model.value_head.input", "model.add_value_head")
def value_is_of_the_observation(context: Context) -> Iterator[Finding]:
    """A value must not be read from features of executed, noised actions: it would know the actions."""
    model = context.model(FlowModelConfig)
    if model.flow.method == "cfm" and model.add_value_head and model.value_head.input == "suffix":
        message = "with model.flow.method=cfm the action expert sees the executed actions, a baseline must not"
        yield Finding(
            "model.value_head.input", message, "set it to prefix", "auto, prefix", others=("model.flow.method",)
        )


@FLOW.rule("model.flow.method", "model.flow.keep_errors", "algorithm.loss_type")
def loss_fits_the_sampling(context: Context) -> Iterator[Finding]:
    """FPO needs ratios of flow-matching losses; negative-aware fine-tuning compares velocities with the rollout's."""
    flow = context.model(FlowModelConfig).flow
    others = ("algorithm.loss_type",)
    if context.config.algorithm.loss_type == "fpo" and flow.method != "cfm":
        message = f"with {flow.method} ratios come from log-probs, not from flow-matching losses"
        yield Finding("model.flow.method", message, "set it to cfm, or choose algorithm=ppo", "cfm", others=others)
    if context.config.algorithm.loss_type != "nft":
        return
    if flow.method == "flow_noise":
        message = "loss_type 'nft' has targets for one velocity per chunk, or for velocities of the forward process"
        yield Finding("model.flow.method", message, "set it to flow_sde", "flow_sde, cfm", others=others)
    elif not flow.keep_errors:
        message = "loss_type 'nft' needs the velocity errors of the rollout"
        yield Finding(
            "model.flow.keep_errors", message, "set it to true, as algorithm=pi_nft does", "true", others=others
        )


@FLOW.note("model.model_type", "sft.label_smoothing_bins", "algorithm.sampling")
def settings_of_token_policies(context: Context) -> Iterator[Finding]:
    """Temperatures and bins apply only to policies with action tokens."""
    for key in ("algorithm.sampling.temperature", "algorithm.sampling.top_k", "sft.label_smoothing_bins"):
        if context.by_user(key):
            message = f"has no effect: {context.config.model.model_type} does not read it"
            yield Finding(key, message, "leave it out")


@FLOW.note("model.flow", "algorithm.entropy_bonus")
def entropy_is_constant(context: Context) -> Iterator[Finding]:
    """The entropy of flow_sde is independent of the weights, and cfm has none."""
    flow = context.model(FlowModelConfig).flow
    if (
        flow.method != "flow_noise"
        and context.config.algorithm.entropy_bonus
        and context.by_user("algorithm.entropy_bonus")
    ):
        message = f"has no effect: the entropy of {flow.method} is a constant"
        hint = "leave it out, or set model.flow.method=flow_noise, whose noise is learned"
        yield Finding("algorithm.entropy_bonus", message, hint, others=("model.flow.method",))


WHOLE_PICTURES = RuleSet()


@WHOLE_PICTURES.note("model.model_type", "model.center_crop")
def pictures_are_not_cropped(context: Context) -> Iterator[Finding]:
    """openpi and lerobot use whole images."""
    if context.config.model.center_crop:
        message = f"has no effect: {context.config.model.model_type} sees whole images"
        yield Finding("model.center_crop", message, "leave it out")


def libero_interface(context: Context) -> Interface | None:
    """Return the conventions of a checkpoint whose name, statistics or dataset is LIBERO.

    Cameras and state stay unknown if only lerobot's train_config.json names the dataset.
    """
    model = context.config.model
    directory = policy_directory(model)
    sets = [] if directory is None or model.unnorm_key is not None else _statistics(directory)
    names = [model.unnorm_key or "", checkpoint_name(model), *(sets if len(sets) == 1 else ())]
    if any("libero" in name.lower() for name in names):
        return LIBERO
    trained = None if directory is None else _read(directory / "train_config.json").get("dataset")
    name = trained.get("repo_id") if isinstance(trained, dict) else None
    return replace(LIBERO, cameras=None, state=None) if isinstance(name, str) and "libero" in name.lower() else None


def _statistics(directory: Path) -> list[str]:
    """Return the names of the statistics sets, in openpi's, RLinf's and GR00T's layouts."""
    found = [path for depth in range(5) for path in directory.glob("*/" * depth + "norm_stats.json")]
    of_openpi = [path.parent.relative_to(directory).as_posix() for path in found]
    return of_openpi or [*_read(directory / "experiment_cfg" / "metadata.json"), *_read(directory / "statistics.json")]


def _read(path: Path) -> Mapping[str, object]:
    """Return a JSON object; empty if the file is missing or damaged, which loading reports."""
    try:
        return read_fields(path).content if path_kind(str(path)) == "file" else {}
    except (EmbodrlError, OSError):
        return {}


def flow_family(
    name: str,
    package: str,
    description: str,
    settings: type[FlowModelConfig],
    rules: tuple[RuleSet, ...],
    recognizes: Callable[[Mapping[str, object]], bool],
    *,
    sizes: str,
    checkpoint: str,
    interface: Callable[[Context], Interface | None] = libero_interface,
    uses_state: bool | str = True,
    max_cameras: int = 3,
    actions: str = ACTIONS,
    suffix: str = "",
    missing_config: str = "",
    public_preset: str = "",
) -> ModelSpec:
    """Return the spec of a flow-matching family built by ``package``; see ``ModelSpec``.

    ``suffix`` distinguishes its module ``build`` from another family's in the same package.
    """
    return ModelSpec(
        name=name,
        target=f"{package}.build{suffix}:build_{name}",
        description=description,
        settings=settings,
        rules=(rules[0], FLOW, *rules[1:]),
        recognizes=recognizes,
        kind="flow",
        public_layout=True,
        public_preset=public_preset,
        value_inputs=("prefix", "suffix"),
        trainable=("all", "lora", "action_expert", "head"),
        uses_state=uses_state,
        interface=interface,
        max_cameras=max_cameras,
        sizes=sizes,
        actions=actions,
        missing_config=missing_config,
        checkpoint=checkpoint,
        rl="Gaussian log-probs of denoising steps: flow_sde, flow_noise; flow-matching losses: cfm",
    )


def divides(part: str, whole: str, small: int, large: int) -> Iterator[Finding]:
    """Check that the value ``small`` of key ``part`` divides the value ``large`` of key ``whole``."""
    if large % small:
        message = f"{small} does not divide {whole} = {large}: {large} / {small} leaves {large % small}"
        hint = f"change it, or set {whole} to {multiples(large, small)}"
        yield Finding(part, message, hint, f"a divisor of {large}", others=(whole,))


def even(key: str, value: int, why: str) -> Iterator[Finding]:
    """Check that the value of a key is even."""
    if value % 2:
        yield Finding(key, f"{value} is odd; {why}", f"set it to {multiples(value, 2)}", "an even number")


class VlmSizes(Protocol):
    """Settings of a tiny SigLIP and the language model that reads its features."""

    image_size: int
    patch_size: int
    siglip: SiglipConfig
    num_heads: int
    num_kv_heads: int
    head_dim: int


def vlm_fits(base: str, shape: VlmSizes, merge: int = 1) -> Iterator[Finding]:
    """Check that patches tile the image, ``merge`` x ``merge`` per token, and that heads divide widths and are even."""
    yield from divides(f"{base}.patch_size", f"{base}.image_size", shape.patch_size * merge, shape.image_size)
    yield from divides(f"{base}.siglip.num_heads", f"{base}.siglip.width", shape.siglip.num_heads, shape.siglip.width)
    yield from divides(f"{base}.num_kv_heads", f"{base}.num_heads", shape.num_kv_heads, shape.num_heads)
    yield from even(f"{base}.head_dim", shape.head_dim, "rotary embeddings rotate pairs")


def at_most(key: str, value: int, limit_key: str, limit: int, what: str) -> Iterator[Finding]:
    """Check that the value of a key is at most another key's."""
    if value > limit:
        message = f"{what}: {value}, and {limit_key} is {limit}"
        hint = f"set it to {limit} or less, or {limit_key} to {value} or more"
        yield Finding(key, message, hint, f"1 to {limit}", others=(limit_key,))


def chunk_fits(model: ModelConfig, base: str, horizon: int, max_action_dim: int) -> Iterator[Finding]:
    """Check that an action chunk fits the network's predictions."""
    chunk = model.num_action_chunks
    dims = model.action_dim
    yield from at_most("model.num_action_chunks", chunk, f"{base}.action_horizon", horizon, "actions to run")
    yield from at_most("model.action_dim", dims, f"{base}.max_action_dim", max_action_dim, "action dimensions")
