"""OpenVLA: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from embodrl.config.rules.base import Context, multiples
from embodrl.config.rules.model import BUILTIN
from embodrl.config.schema import ModelConfig, PositiveInt, Section
from embodrl.config.schema.section import AppliesIf
from embodrl.models.common.config_file import own_section
from embodrl.models.openvla.published import PUBLISHED, interface
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import ModelSpec

VOCABULARY = 32064
"""Llama 2's vocabulary as padded by OpenVLA; the tiny size has a smaller one that hardly matters."""


class VitConfig(Section):
    """A vision transformer."""

    width: PositiveInt = Field(default=96, description="embedding dimension")
    depth: int = Field(default=4, description="blocks; the last one is stored but never run, as in OpenVLA", ge=2)
    num_heads: PositiveInt = Field(default=3, description="attention heads; divides width")
    mlp_dim: PositiveInt = Field(default=384, description="hidden units of the MLP")


class ArchitectureConfig(Section):
    """Dimensions of a model without a checkpoint."""

    image_size: PositiveInt = Field(default=64, description="pixels, square; divisible by patch_size")
    patch_size: PositiveInt = Field(default=8, description="pixels")
    dino: VitConfig = Field(default=VitConfig(), description="DINOv2 with 4 registers and a class token")
    siglip: VitConfig = Field(default=VitConfig(), description="SigLIP")
    hidden_size: PositiveInt = Field(default=128, description="Llama hidden size; divisible by num_attention_heads")
    intermediate_size: PositiveInt = Field(default=352, description="Llama MLP size")
    num_hidden_layers: PositiveInt = Field(default=3, description="Llama layers")
    num_attention_heads: PositiveInt = Field(default=4, description="Llama heads")
    max_prompt_tokens: PositiveInt = Field(default=48, description="prompts are padded to this length")


class OpenVlaConfig(ModelConfig):
    """An OpenVLA."""

    architecture: Annotated[ArchitectureConfig, AppliesIf("model.model_path", (None,))] = Field(
        default=ArchitectureConfig(), description="dimensions of the tiny size"
    )
    resize_filter: Literal["auto", "bicubic", "lanczos_jpeg"] = Field(
        default="auto",
        description="how images are resized; lanczos_jpeg: after a JPEG round trip, as in OpenVLA's LIBERO data and"
        " evaluation; auto: lanczos_jpeg for public LIBERO checkpoints, else bicubic",
    )


DIMENSIONS = RuleSet()
SHIPPED = RuleSet()


@DIMENSIONS.rule("model.model_type", "model.model_path", "model.architecture")
def dimensions_divide(context: Context) -> Iterator[Finding]:
    """Patches tile the image, heads divide the width, and rotary embeddings need pairs."""
    shape = context.model(OpenVlaConfig).architecture
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
            f"{shape.hidden_size} / {shape.num_attention_heads} heads = {head_dim}, but rotary embeddings rotate pairs,"
            " so the head dimension must be even",
            f"set it to {multiples(shape.hidden_size, 2 * shape.num_attention_heads)}, or change the heads",
            f"a multiple of {2 * shape.num_attention_heads}",
            others=(f"{base}.num_attention_heads",),
        )


@SHIPPED.rule("model.warm_start", "model.model_path", "model.architecture")
def shipped_weights_have_one_size(context: Context) -> Iterator[Finding]:
    """The shipped warm start has the default dimensions."""
    model = context.model(OpenVlaConfig)
    if model.warm_start != BUILTIN or model.model_path is not None:
        return
    shape = model.architecture.model_dump()
    shipped = ArchitectureConfig().model_dump()
    # prompts may be padded to any length; all other values are weight shapes
    changed = [name for name in shipped if name != "max_prompt_tokens" and shape[name] != shipped[name]]
    if changed:
        yield Finding(
            "model.warm_start",
            f"the shipped weights have other dimensions than model.architecture ({', '.join(changed)})",
            "set model.warm_start=null for random weights, or leave model.architecture as it is",
            "null, or a directory with weights of this size",
            others=tuple(f"model.architecture.{name}" for name in changed),
        )


def num_parameters(config: ModelConfig) -> int:
    """Return the approximate parameter count of a policy without a checkpoint (matrices only)."""
    assert isinstance(config, OpenVlaConfig)
    shape = config.architecture
    vision = shape.dino.width + shape.siglip.width
    hidden = shape.hidden_size
    projector = vision * 4 * vision + 4 * vision * hidden + hidden**2
    layer = 4 * hidden**2 + 3 * hidden * shape.intermediate_size
    language = shape.num_hidden_layers * layer + 2 * VOCABULARY * hidden
    return _vit_parameters(shape.dino) + _vit_parameters(shape.siglip) + projector + language


def _vit_parameters(vit: VitConfig) -> int:
    return vit.depth * (4 * vit.width**2 + 2 * vit.width * vit.mlp_dim)


VALUE_INPUTS = ("prompt_end", "prompt_mean")
TRAINABLE = ("all", "lora", "head")
RL = "log-probs of action tokens: temperature, top-k"
NUM_BINS = 256

SPEC = ModelSpec(
    name="openvla",
    target="embodrl.models.openvla.build:build_openvla",
    description="OpenVLA: DINOv2 + SigLIP vision, Llama, 256-bin action tokens",
    recognizes=lambda raw: raw.get("model_type") == "openvla" and "keep_stop_token" not in own_section(raw),
    settings=OpenVlaConfig,
    rules=(DIMENSIONS, SHIPPED, PUBLISHED),
    kind="tokens",
    public_layout=True,
    public_preset="openvla_7b",
    value_inputs=VALUE_INPUTS,
    trainable=TRAINABLE,
    uses_state=False,
    max_cameras=1,
    num_bins=NUM_BINS,
    autoregressive=True,
    keeps_vision_features=True,
    tensor_parallel=True,
    builtin_warm_start=True,
    num_parameters=num_parameters,
    sizes="2.3 M (tiny), 7.54 B",
    actions="256 bins per dimension, decoded autoregressively",
    checkpoint="openvla/openvla-7b and fine-tunes of it",
    interface=interface,
    rl=RL,
)
