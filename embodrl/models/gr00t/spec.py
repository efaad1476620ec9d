"""GR00T N1.5 and N1.7: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import Fraction, PositiveInt, Section
from embodrl.interface import ZERO_CLOSES, Interface
from embodrl.models.flow.flow_spec import (
    ACTIONS,
    FlowModelConfig,
    SiglipConfig,
    chunk_fits,
    divides,
    even,
    flow_family,
    libero_interface,
)
from embodrl.rule_set import Finding, RuleSet


class Gr00tSizes(Section):
    """Dimensions common to all versions, for a GR00T without a checkpoint."""

    image_size: PositiveInt = Field(default=64, description="pixels, square; divisible by patch_size")
    patch_size: PositiveInt = Field(default=8, description="pixels")
    hidden_size: PositiveInt = Field(default=128, description="language model hidden size")
    intermediate_size: PositiveInt = Field(default=352, description="language model MLP size")
    num_hidden_layers: PositiveInt = Field(default=3, description="number of language model layers")
    num_attention_heads: PositiveInt = Field(default=4, description="language model query heads")
    num_key_value_heads: PositiveInt = Field(
        default=2, description="language model key and value heads; divides the query heads"
    )
    head_dim: PositiveInt = Field(default=32, description="language model head dimension; even")
    dit_num_layers: PositiveInt = Field(
        default=4, description="DiT blocks; even ones cross-attend, odd ones self-attend"
    )
    dit_num_heads: PositiveInt = Field(default=4, description="DiT heads")
    dit_head_dim: PositiveInt = Field(default=24, description="DiT head dimension; width = heads x head dimension")
    dit_output_dim: PositiveInt = Field(default=64, description="DiT output and hidden size of the action decoder")
    num_embodiments: PositiveInt = Field(default=2, description="robots with their own encoders and decoders")
    max_action_dim: PositiveInt = Field(default=8, description="actions are zero-padded to this size")
    max_state_dim: PositiveInt = Field(default=32, description="states are zero-padded to this size")
    action_horizon: PositiveInt = Field(default=5, description="predicted actions; the first num_action_chunks are run")
    max_prompt_tokens: PositiveInt = Field(default=64, description="prompts are padded to this length")


class Gr00tFeatureBlocks(Section):
    """Self-attention over image and prompt features, in N1.5 and N1.7."""

    vl_num_layers: PositiveInt = Field(default=1, description="self-attention blocks over the backbone's features")
    vl_num_heads: PositiveInt = Field(default=4, description="heads of these blocks; times vl_head_dim: hidden_size")
    vl_head_dim: PositiveInt = Field(default=32, description="head dimension of those blocks")


class Gr00tArchitectureConfig(Gr00tFeatureBlocks, Gr00tSizes):
    """Dimensions of a GR00T N1.5 without a checkpoint, and a checkpoint's robot keys."""

    siglip: SiglipConfig = Field(default=SiglipConfig(), description="vision")
    vocab_size: PositiveInt | None = Field(
        default=None, description="embedding rows, at least the tokenizer's tokens; null: exactly those"
    )
    unused_layers: bool = Field(
        default=False, description="include the published weights' unused layers: output and pooling"
    )
    num_future_tokens: PositiveInt = Field(default=4, description="learned tokens before the actions")
    crop_side: Fraction = Field(
        default=0.95,
        gt=0,
        description="visible fraction of each image side, as in NVIDIA's data configurations; 1: all",
    )
    action_keys: tuple[str, ...] | None = Field(
        default=None,
        description="for a checkpoint: keys of the robot's action in metadata.json, in order, each NAME or NAME:MODE"
        " (min_max, mean_std, q99, binary, identity, bounded); null: as the robot's data configuration, else all by"
        " min_max",
    )
    state_keys: tuple[str, ...] | None = Field(
        default=None, description="for a checkpoint: keys of the robot's state, likewise; also with MODE sin_cos"
    )


class Gr00tTiledSizes(Gr00tSizes):
    """Dimensions of a GR00T N1.7 without a checkpoint."""

    merge_size: PositiveInt = Field(default=2, description="patches along each side of a token")
    vision: SiglipConfig = Field(default=SiglipConfig(), description="vision; head dimensions divisible by 4")


class Gr00tN17ArchitectureConfig(Gr00tFeatureBlocks, Gr00tTiledSizes):
    """Dimensions of a GR00T N1.7 without a checkpoint."""


class Gr00tModelConfig(FlowModelConfig):
    """A GR00T N1.5."""

    gr00t: Gr00tArchitectureConfig = Field(default=Gr00tArchitectureConfig(), description="dimensions of the tiny size")


class Gr00tN17ModelConfig(FlowModelConfig):
    """A GR00T N1.7."""

    gr00t_n1_7: Gr00tN17ArchitectureConfig = Field(
        default=Gr00tN17ArchitectureConfig(), description="dimensions of the tiny size"
    )


RULES = RuleSet()
RULES_N1_7 = RuleSet()
CROPS = RuleSet()


@RULES.rule("model.model_type", "model.model_path", "model.gr00t", "model.num_action_chunks", "model.action_dim")
def gr00t_dimensions_fit(context: Context) -> Iterator[Finding]:
    """In a tiny GR00T patches tile the image, heads divide widths, and actions fit."""
    base = "model.gr00t"
    if context.config.model.model_path is not None:
        return
    shape = context.model(Gr00tModelConfig).gr00t
    yield from divides(f"{base}.patch_size", f"{base}.image_size", shape.patch_size, shape.image_size)
    yield from divides(f"{base}.siglip.num_heads", f"{base}.siglip.width", shape.siglip.num_heads, shape.siglip.width)
    yield from _sizes_fit(context, base, shape)


@RULES_N1_7.rule(
    "model.model_type", "model.model_path", "model.gr00t_n1_7", "model.num_action_chunks", "model.action_dim"
)
def gr00t_n1_7_dimensions_fit(context: Context) -> Iterator[Finding]:
    """In a tiny N1.7 patches tile the image and merge evenly, heads divide widths, and actions fit."""
    if context.config.model.model_path is None:
        yield from _tiles_fit(context, "model.gr00t_n1_7", context.model(Gr00tN17ModelConfig).gr00t_n1_7)


def _tiles_fit(context: Context, base: str, shape: Gr00tTiledSizes) -> Iterator[Finding]:
    tile = shape.patch_size * shape.merge_size
    vision = shape.vision
    yield from divides(f"{base}.patch_size", f"{base}.image_size", tile, shape.image_size)
    yield from divides(f"{base}.vision.num_heads", f"{base}.vision.width", 4 * vision.num_heads, vision.width)
    yield from _sizes_fit(context, base, shape)


def _sizes_fit(context: Context, base: str, shape: Gr00tSizes) -> Iterator[Finding]:
    yield from divides(
        f"{base}.num_key_value_heads",
        f"{base}.num_attention_heads",
        shape.num_key_value_heads,
        shape.num_attention_heads,
    )
    yield from even(f"{base}.head_dim", shape.head_dim, "rotary embeddings rotate pairs")
    width = shape.vl_num_heads * shape.vl_head_dim if isinstance(shape, Gr00tFeatureBlocks) else shape.hidden_size
    if isinstance(shape, Gr00tFeatureBlocks) and width != shape.hidden_size:
        yield Finding(
            f"{base}.vl_head_dim",
            f"{shape.vl_num_heads} heads x {shape.vl_head_dim} = {width}, but hidden_size is {shape.hidden_size}",
            "change the heads, their dimension or hidden_size so that the product equals hidden_size",
            f"with vl_num_heads, {shape.hidden_size}",
            others=(f"{base}.vl_num_heads", f"{base}.hidden_size"),
        )
    yield from chunk_fits(context.config.model, base, shape.action_horizon, shape.max_action_dim)


@RULES.note("model.model_type", "model.center_crop")
def gr00t_crops_by_its_own_setting(context: Context) -> Iterator[Finding]:
    """GR00T crops before resizing."""
    if context.config.model.center_crop:
        message = "has no effect: gr00t crops the centre by model.gr00t.crop_side before resizing"
        yield Finding("model.center_crop", message, "leave it out", others=("model.gr00t.crop_side",))


@CROPS.note("model.model_type", "model.center_crop")
def gr00t_crops_as_its_files_say(context: Context) -> Iterator[Finding]:
    """GR00T N1.7 crops as specified by processor_config.json."""
    if context.config.model.center_crop:
        message = "has no effect: this GR00T crops the centre as specified by processor_config.json (0.95 at tiny size)"
        yield Finding("model.center_crop", message, "leave it out")


def interface(context: Context) -> Interface | None:
    """Return the conventions of a LIBERO checkpoint, whose gripper counts from 0 (closed).

    See github.com/RLinf/RLinf, rlinf/models/embodiment/gr00t/simulation_io.py.
    """
    found = libero_interface(context)
    return None if found is None else replace(found, gripper=ZERO_CLOSES)


SPEC = flow_family(
    "gr00t",
    "embodrl.models.gr00t",
    "GR00T N1.5: SigLIP 2, Qwen3 and a flow-matching diffusion transformer",
    Gr00tModelConfig,
    (RULES,),
    lambda raw: raw.get("model_type") == "gr00t_n1_5",
    interface=interface,
    sizes="2.1 M (tiny), about 2.7 B",
    public_preset="gr00t_n1_5_3b",
    actions=f"{ACTIONS}, encoders per robot",
    checkpoint="nvidia/GR00T-N1.5-3B and fine-tunes of it",
)
N1_7 = flow_family(
    "gr00t_n1_7",
    "embodrl.models.gr00t",
    "GR00T N1.7: Qwen3-VL and a flow-matching diffusion transformer",
    Gr00tN17ModelConfig,
    (RULES_N1_7, CROPS),
    lambda raw: raw.get("model_type") == "Gr00tN1d7",
    interface=interface,
    sizes="2.7 M (tiny), about 3.1 B",
    actions=f"{ACTIONS}, encoders per robot",
    checkpoint="nvidia/GR00T-N1.7-3B and fine-tunes of it",
    suffix="_n1_7",
)
