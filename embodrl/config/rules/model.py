"""The policy: names, checkpoints, dimensions, and what it can take from the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from embodrl.config.policy_card import BUILTIN, card_differences, policy_directory, read_card
from embodrl.config.rules.base import Context, Finding, multiples, note, rule, what_is
from embodrl.config.schema import ArchitectureConfig
from embodrl.names import nearest
from embodrl.registry import MODELS

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def facts(context: Context) -> dict[str, Any]:
    """Return what the registry knows about the model."""
    name = context.config.model.model_type
    return MODELS.entry(name).facts if name in MODELS else {}


@rule("model.model_type")
def model_is_registered(context: Context) -> Iterator[Finding]:
    """The model has a name in the registry."""
    name = context.config.model.model_type
    if name not in MODELS:
        near = nearest(name, MODELS.names())
        hint = f"write model.model_type={near}" if near else "choose a known one, or name the module that registers it"
        yield Finding("model.model_type", f"there is no model '{name}'", hint, ", ".join(MODELS), near)


@rule("model.model_path")
def checkpoint_exists(context: Context) -> Iterator[Finding]:
    """A local checkpoint is a directory; anything else has the form of a hub id."""
    path = context.config.model.model_path
    if path is None or what_is(f"{path}/config.json") == "file":
        return
    allowed = "an existing directory, a hub id such as openvla/openvla-7b, or null"
    if what_is(path) == "directory":
        message, hint = (
            f"'{path}' holds no config.json",
            "give the directory that holds config.json and *.safetensors",
        )
        yield Finding("model.model_path", message, hint, allowed)
    elif what_is(path) == "file":
        message, hint = f"'{path}' is a file", "give the directory that holds config.json and *.safetensors"
        yield Finding("model.model_path", message, hint, allowed)
    elif not HUB_ID.fullmatch(path) or what_is(path.partition("/")[0]) == "directory":
        message, hint = (
            f"there is no directory '{path}'",
            "give the directory of the checkpoint, or OWNER/NAME of the hub",
        )
        yield Finding("model.model_path", message, hint, allowed)


@rule("model.warm_start", "model.model_path")
def warm_start_exists(context: Context) -> Iterator[Finding]:
    """A warm start is the shipped one or a directory."""
    model = context.config.model
    if model.warm_start in (None, BUILTIN) or model.model_path is not None or context.resuming:
        return
    if what_is(f"{model.warm_start}/config.json") != "file":
        near = nearest(str(model.warm_start), [BUILTIN])
        hint = "give a directory made by `embodrl sft`, builtin for the shipped weights, or null for random ones"
        found = what_is(str(model.warm_start)) == "directory"
        message = f"'{model.warm_start}' holds no policy" if found else f"there is no directory '{model.warm_start}'"
        yield Finding("model.warm_start", message, hint, "builtin, an existing directory, null", near)


@rule("model.warm_start", "model.model_path", "model.architecture")
def shipped_weights_have_one_size(context: Context) -> Iterator[Finding]:
    """The shipped warm start has the default dimensions."""
    model = context.config.model
    shipped_family = facts(context).get("builtin_warm_start")
    if model.warm_start != BUILTIN or model.model_path is not None or not shipped_family:
        return
    shape, shipped = model.architecture.model_dump(), ArchitectureConfig().model_dump()
    # prompts may be padded to any length; everything else is the shape of a weight
    changed = [name for name in shipped if name != "max_prompt_tokens" and shape[name] != shipped[name]]
    if changed:
        yield Finding(
            "model.warm_start",
            f"the shipped weights have other dimensions than model.architecture ({', '.join(changed)})",
            "set model.warm_start=null for random weights, or leave model.architecture as it is",
            "null, or a directory with weights of this size",
            others=tuple(f"model.architecture.{name}" for name in changed),
        )


@rule("model.model_type", "model.model_path", "model.architecture")
def dimensions_divide(context: Context) -> Iterator[Finding]:
    """Patches tile the image, heads tile the width, rotary embeddings want pairs."""
    if facts(context).get("dimensions", "architecture") != "architecture":
        return
    shape = context.config.model.architecture
    base = "model.architecture"
    if shape.image_size % shape.patch_size:
        yield Finding(
            f"{base}.image_size",
            f"{shape.image_size} pixels are not a whole number of patches of {shape.patch_size}",
            f"set it to {multiples(shape.image_size, shape.patch_size)}",
            f"a multiple of {shape.patch_size}",
            others=(f"{base}.patch_size",),
        )
    for key, width_key, width, heads in (
        (f"{base}.dino.num_heads", f"{base}.dino.width", shape.dino.width, shape.dino.num_heads),
        (f"{base}.siglip.num_heads", f"{base}.siglip.width", shape.siglip.width, shape.siglip.num_heads),
        (f"{base}.num_attention_heads", f"{base}.hidden_size", shape.hidden_size, shape.num_attention_heads),
    ):
        if width % heads:
            message = f"{heads} heads do not divide {width_key} = {width}: {width} / {heads} leaves {width % heads}"
            hint = f"change the heads, or set the width to {multiples(width, heads)}"
            yield Finding(key, message, hint, f"a divisor of {width}", others=(width_key,))
    head_dim = shape.hidden_size // shape.num_attention_heads
    if shape.hidden_size % shape.num_attention_heads == 0 and head_dim % 2:
        yield Finding(
            f"{base}.hidden_size",
            f"{shape.hidden_size} / {shape.num_attention_heads} heads = {head_dim}, but rotary embeddings turn pairs,"
            " so the head dimension must be even",
            f"set it to {multiples(shape.hidden_size, 2 * shape.num_attention_heads)}, or change the heads",
            f"a multiple of {2 * shape.num_attention_heads}",
            others=(f"{base}.num_attention_heads",),
        )


@rule("model.model_type", "env.cameras")
def model_sees_the_cameras(context: Context) -> Iterator[Finding]:
    """The model takes so many pictures and no more."""
    count, most = len(context.config.env.cameras), facts(context).get("max_cameras")
    if most is not None and count > most:
        yield Finding(
            "env.cameras",
            f"{context.config.model.model_type} sees {most} camera{'s' * (most > 1)}, and {count} are configured",
            "keep the one camera that shows the task best" if most == 1 else "keep those that show the task best",
            f"at most {most}",
            others=("model.model_type",),
        )


@rule("model.model_type", "algorithm.sampling.top_k")
def top_k_fits_the_bins(context: Context) -> Iterator[Finding]:
    """No more bins can be kept than there are."""
    top_k, bins = context.config.algorithm.sampling.top_k, facts(context).get("num_bins")
    if bins is not None and top_k > bins:
        message, hint = f"an action token has {bins} bins, fewer than {top_k}", "set it to 0, which keeps all"
        yield Finding("algorithm.sampling.top_k", message, hint, f"0 to {bins}, but not 1")


@rule("model.model_type", "model.add_value_head")
def model_has_value_heads(context: Context) -> Iterator[Finding]:
    """Only some models have a value head."""
    if context.config.model.add_value_head and facts(context).get("value_head") is False:
        message = f"{context.config.model.model_type} has no value head"
        yield Finding("model.add_value_head", message, "set it to false and choose a loss without a critic", "false")


@rule("model.value_head.hidden_sizes", "model.add_value_head")
def value_head_has_layers(context: Context) -> Iterator[Finding]:
    """The value head is an MLP."""
    model = context.config.model
    if model.add_value_head and not model.value_head.hidden_sizes:
        hint = "set it to [512,128]"
        yield Finding(
            "model.value_head.hidden_sizes",
            "the value head has no hidden layer",
            hint,
            "at least one integer above 0",
        )


@note("model")
def model_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Settings of the tiny size do nothing with a checkpoint, and the other way round."""
    model = context.config.model
    if model.model_path is not None:
        if context.by_user("model.warm_start"):
            message = "has no effect: the weights come from model.model_path"
            yield Finding("model.warm_start", message, "leave it out, or set model.model_path=null")
        if context.by_user("model.architecture"):
            message = "has no effect: the dimensions come from model.model_path"
            yield Finding("model.architecture", message, "leave it out, or set model.model_path=null")
    elif context.by_user("model.unnorm_key") and model.unnorm_key is not None:
        message = "has no effect: only a checkpoint has statistics to choose from"
        yield Finding("model.unnorm_key", message, "leave it out, or give model.model_path")
    if not model.add_value_head and context.by_user("model.value_head"):
        message = "has no effect: model.add_value_head is false"
        yield Finding("model.value_head", message, "leave it out")


@note("model.model_type", "env.include_state")
def state_is_seen(context: Context) -> Iterator[Finding]:
    """Not every model reads the robot's state."""
    if (
        context.by_user("env.include_state")
        and context.config.env.include_state
        and facts(context).get("uses_state") is False
    ):
        message = f"has no effect: {context.config.model.model_type} sees the camera and the instruction only"
        yield Finding("env.include_state", message, "leave it out")


@note("model.model_type", "model.model_path", "model.warm_start", "model.num_action_chunks", "env")
def policy_was_trained_for_this(context: Context) -> Iterator[Finding]:
    """A policy rarely solves a task, or sees through a camera, that it was not trained for."""
    if context.resuming or context.collecting:  # the weights come from a checkpoint; an expert acts
        return
    directory = policy_directory(context.config.model)
    card = None if directory is None else read_card(directory)
    if card is None:
        return
    key = "model.warm_start" if context.config.model.model_path is None else "model.model_path"
    tasks = ", ".join(card.get("tasks", []))
    for at, difference in card_differences(card, context.config):
        if at.startswith("env.cameras"):
            yield Finding(key, difference, "use the camera that it was trained with", others=(at,))
        else:
            hint = "train it on this task first (embodrl collect, then sft), or choose what it knows:"
            hint += f" {card.get('env_type')} tasks {tasks}"
            yield Finding(key, f"{difference}: expect a success rate near 0", hint, others=(at,))
