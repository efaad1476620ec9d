"""What only some model families have: dimensions, flow sampling, value inputs, and what trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from embodrl.config.rules.base import Context, Finding, multiples, note, rule
from embodrl.config.rules.model import facts
from embodrl.config.schema import ModelConfig
from embodrl.registry import MODELS

DIMENSIONS = ("architecture", "pi", "gr00t")


def built_from(context: Context, section: str) -> bool:
    """Tell whether the model is built with the dimensions of ``model.<section>``."""
    return context.config.model.model_path is None and facts(context).get("dimensions") == section


def families(fact: str, value: object) -> str:
    """Name the families of which a fact is, or contains, a value."""
    known = [name for name in MODELS if _holds(MODELS.entry(name).facts.get(fact), value)]
    return ", ".join(known)


def _holds(fact: Any, value: object) -> bool:
    return value in fact if isinstance(fact, tuple) else fact == value


def _divides(part: str, whole: str, small: int, large: int) -> Iterator[Finding]:
    if large % small:
        message = f"{small} does not divide {whole} = {large}: {large} / {small} leaves {large % small}"
        hint = f"change it, or set {whole} to {multiples(large, small)}"
        yield Finding(part, message, hint, f"a divisor of {large}", others=(whole,))


def _even(key: str, value: int, why: str) -> Iterator[Finding]:
    if value % 2:
        yield Finding(key, f"{value} is odd; {why}", f"set it to {multiples(value, 2)}", "an even number")


def _at_most(key: str, value: int, limit_key: str, limit: int, what: str) -> Iterator[Finding]:
    if value > limit:
        message = f"{what}: {value}, and {limit_key} is {limit}"
        hint = f"set it to {limit} or less, or {limit_key} to {value} or more"
        yield Finding(key, message, hint, f"1 to {limit}", others=(limit_key,))


@rule("model.model_type", "model.model_path", "model.pi", "model.num_action_chunks", "model.action_dim", "env.cameras")
def pi_dimensions_fit(context: Context) -> Iterator[Finding]:
    """Patches tile the image, heads divide widths, and actions and cameras have room, in a tiny pi0 or pi0.5."""
    if not built_from(context, "pi"):
        return
    config, base = context.config, "model.pi"
    shape = config.model.pi
    yield from _divides(f"{base}.patch_size", f"{base}.image_size", shape.patch_size, shape.image_size)
    yield from _divides(f"{base}.siglip.num_heads", f"{base}.siglip.width", shape.siglip.num_heads, shape.siglip.width)
    yield from _divides(f"{base}.num_kv_heads", f"{base}.num_heads", shape.num_kv_heads, shape.num_heads)
    yield from _even(f"{base}.head_dim", shape.head_dim, "rotary embeddings turn pairs")
    yield from _even(f"{base}.expert_width", shape.expert_width, "the time embedding has as many sines as cosines")
    yield from _room(config.model, base, shape.action_horizon, shape.max_action_dim)
    cameras = len(config.env.cameras)
    yield from _at_most("env.cameras", cameras, f"{base}.num_images", shape.num_images, "cameras")


@rule("model.model_type", "model.model_path", "model.gr00t", "model.num_action_chunks", "model.action_dim")
def gr00t_dimensions_fit(context: Context) -> Iterator[Finding]:
    """Patches tile the image, heads divide widths, and actions have room, in a tiny GR00T."""
    if not built_from(context, "gr00t"):
        return
    base = "model.gr00t"
    shape = context.config.model.gr00t
    yield from _divides(f"{base}.patch_size", f"{base}.image_size", shape.patch_size, shape.image_size)
    yield from _divides(f"{base}.siglip.num_heads", f"{base}.siglip.width", shape.siglip.num_heads, shape.siglip.width)
    yield from _divides(
        f"{base}.num_key_value_heads",
        f"{base}.num_attention_heads",
        shape.num_key_value_heads,
        shape.num_attention_heads,
    )
    yield from _even(f"{base}.head_dim", shape.head_dim, "rotary embeddings turn pairs")
    width = shape.vl_num_heads * shape.vl_head_dim
    if width != shape.hidden_size:
        yield Finding(
            f"{base}.vl_head_dim",
            f"{shape.vl_num_heads} heads x {shape.vl_head_dim} = {width}, and hidden_size is {shape.hidden_size}",
            "change the heads, their dimension or the hidden size, so that both agree",
            f"with vl_num_heads, {shape.hidden_size}",
            others=(f"{base}.vl_num_heads", f"{base}.hidden_size"),
        )
    yield from _room(context.config.model, base, shape.action_horizon, shape.max_action_dim)


def _room(model: ModelConfig, base: str, horizon: int, max_action_dim: int) -> Iterator[Finding]:
    chunk, dims = model.num_action_chunks, model.action_dim
    yield from _at_most("model.num_action_chunks", chunk, f"{base}.action_horizon", horizon, "actions to run")
    yield from _at_most("model.action_dim", dims, f"{base}.max_action_dim", max_action_dim, "action dimensions")


@rule("model.flow.noise_std_min", "model.flow.noise_std_max")
def noise_range_is_not_empty(context: Context) -> Iterator[Finding]:
    """The learned noise has a range."""
    flow = context.config.model.flow
    if flow.noise_std_min >= flow.noise_std_max:
        yield Finding(
            "model.flow.noise_std_min",
            f"{flow.noise_std_min} is not below model.flow.noise_std_max = {flow.noise_std_max}",
            "set it to half of noise_std_max",
            f"above 0, below {flow.noise_std_max}",
            others=("model.flow.noise_std_max",),
        )


@rule("model.model_type", "model.value_head.input")
def value_input_exists(context: Context) -> Iterator[Finding]:
    """A family offers some inputs to the value head."""
    model = context.config.model
    offered = facts(context).get("value_inputs")
    chosen = model.value_head.input
    if offered is not None and chosen != "auto" and chosen not in offered:
        message = f"{model.model_type} has no '{chosen}'; {families('value_inputs', chosen)} have it"
        allowed = ", ".join(("auto", *offered))
        yield Finding("model.value_head.input", message, "set it to auto", allowed, others=("model.model_type",))


@rule("model.model_type", "model.trainable")
def part_can_train_alone(context: Context) -> Iterator[Finding]:
    """Only flow families have an action expert."""
    model = context.config.model
    offered = facts(context).get("trainable")
    if offered is not None and model.trainable not in offered:
        message = f"{model.model_type} has no {model.trainable}; {families('trainable', model.trainable)} have one"
        yield Finding(
            "model.trainable", message, "set it to all or lora", ", ".join(offered), others=("model.model_type",)
        )


@rule("model.model_type", "model.use_proprio", "env.include_state")
def state_is_there(context: Context) -> Iterator[Finding]:
    """A token of the robot's state needs the state."""
    config = context.config
    reads = facts(context).get("uses_state") == "model.use_proprio"
    if reads and config.model.use_proprio and not config.env.include_state:
        yield Finding(
            "model.use_proprio",
            "the environment gives no state: env.include_state is false",
            "set env.include_state=true, or model.use_proprio=false",
            "false",
            others=("env.include_state",),
        )


@rule("model.model_type", "model.warm_start", "model.model_path")
def family_has_shipped_weights(context: Context) -> Iterator[Finding]:
    """Only one family has a warm start in the package."""
    model = context.config.model
    if model.warm_start != "builtin" or model.model_path is not None or context.resuming:
        return
    if model.model_type in MODELS and not facts(context).get("builtin_warm_start"):
        yield Finding(
            "model.warm_start",
            f"embodrl ships no weights of {model.model_type}, only of {families('builtin_warm_start', True)}",
            "set it to null, or to a directory made by `embodrl sft`",
            "null, or a directory",
            others=("model.model_type",),
        )


@note("model", "sft.label_smoothing_bins", "algorithm.sampling")
def keys_of_other_families(context: Context) -> Iterator[Finding]:
    """Settings of another family do nothing."""
    model, known = context.config.model, facts(context)
    if "kind" not in known:  # somebody's own family may read what it likes
        return
    of_flow = ("model.flow",)
    of_tokens = ("algorithm.sampling.temperature", "algorithm.sampling.top_k", "sft.label_smoothing_bins")
    of_oft = ("model.use_proprio", "model.keep_stop_token")
    foreign = [f"model.{name}" for name in DIMENSIONS if name != known.get("dimensions") and model.model_path is None]
    foreign += of_tokens if known["kind"] == "flow" else of_flow
    foreign += () if model.model_type == "openvla_oft" else of_oft
    foreign += () if model.model_type == "pi05" else ("model.pi.discrete_state",)
    for key in foreign:
        if context.by_user(key):
            yield Finding(key, f"has no effect: {model.model_type} does not read it", "leave it out")


@note("model.trainable", "model.lora", "model.freeze_vision", "model.flow")
def keys_without_their_switch(context: Context) -> Iterator[Finding]:
    """Settings that wait for another one."""
    model = context.config.model
    if model.trainable != "lora" and context.by_user("model.lora"):
        yield Finding("model.lora", f"has no effect: model.trainable is {model.trainable}", "set model.trainable=lora")
    if model.trainable in ("action_expert", "head") and context.by_user("model.freeze_vision"):
        message = f"has no effect: with model.trainable={model.trainable} the vision backbone does not train"
        yield Finding("model.freeze_vision", message, "leave it out")
    if facts(context).get("kind") != "flow":
        return
    idle = ("noise_std_min", "noise_std_max") if model.flow.method == "flow_sde" else ("noise_level",)
    for name in idle:
        if context.by_user(f"model.flow.{name}"):
            message = f"has no effect: model.flow.method is {model.flow.method}"
            yield Finding(f"model.flow.{name}", message, "leave it out")


@note("model.model_type", "model.model_path", "env.include_state")
def checkpoint_sees_the_state(context: Context) -> Iterator[Finding]:
    """A public flow checkpoint was trained with the robot's state."""
    config = context.config
    if (
        config.model.model_path is not None
        and facts(context).get("uses_state") is True
        and not config.env.include_state
    ):
        message = f"{config.model.model_type} reads the robot's state, and gets zeros: env.include_state is false"
        yield Finding("model.model_path", message, "set env.include_state=true", others=("env.include_state",))
