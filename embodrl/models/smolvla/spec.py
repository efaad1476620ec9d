"""SmolVLA: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import PositiveInt, Section
from embodrl.models.flow.flow_spec import (
    WHOLE_PICTURES,
    FlowModelConfig,
    SiglipConfig,
    chunk_fits,
    even,
    flow_family,
    vlm_fits,
)
from embodrl.rule_set import Finding, RuleSet


class SmolVlaArchitectureConfig(Section):
    """Dimensions of a SmolVLA without a checkpoint."""

    image_size: PositiveInt = Field(default=64, description="pixels, square; divisible by patch_size * scale_factor")
    patch_size: PositiveInt = Field(default=8, description="pixels")
    scale_factor: PositiveInt = Field(default=2, description="patches along each side of a token")
    siglip: SiglipConfig = Field(default=SiglipConfig(), description="vision")
    depth: PositiveInt = Field(default=4, description="layers of the language model and of the action expert")
    num_heads: PositiveInt = Field(default=4, description="query heads of both")
    num_kv_heads: PositiveInt = Field(default=2, description="key and value heads of both; divides num_heads")
    head_dim: PositiveInt = Field(default=32, description="head dimension of both; even, for rotary embeddings")
    vlm_width: PositiveInt = Field(default=128, description="language model hidden size")
    vlm_mlp_dim: PositiveInt = Field(default=384, description="language model MLP size")
    expert_width: PositiveInt = Field(default=96, description="action expert hidden size; even")
    expert_mlp_dim: PositiveInt = Field(default=256, description="action expert MLP size")
    vocab_size: PositiveInt | None = Field(
        default=None, description="embedding rows, at least the tokenizer's tokens; null: exactly those"
    )
    max_action_dim: PositiveInt = Field(default=32, description="actions and states are zero-padded to this size")
    action_horizon: PositiveInt = Field(default=5, description="predicted actions; the first num_action_chunks are run")
    max_prompt_tokens: PositiveInt = Field(default=48, description="prompts are padded to this length")


class SmolVlaModelConfig(FlowModelConfig):
    """A SmolVLA."""

    smolvla: SmolVlaArchitectureConfig = Field(
        default=SmolVlaArchitectureConfig(), description="dimensions of the tiny size"
    )


RULES = RuleSet()


@RULES.rule("model.model_type", "model.model_path", "model.smolvla", "model.num_action_chunks", "model.action_dim")
def smolvla_dimensions_fit(context: Context) -> Iterator[Finding]:
    """In a tiny SmolVLA patches tile the image and merge evenly, heads divide widths, and actions fit."""
    config = context.config
    base = "model.smolvla"
    if config.model.model_path is not None:
        return
    shape = context.model(SmolVlaModelConfig).smolvla
    yield from vlm_fits(base, shape, shape.scale_factor)
    yield from even(f"{base}.expert_width", shape.expert_width, "the time embedding has as many sines as cosines")
    yield from chunk_fits(config.model, base, shape.action_horizon, shape.max_action_dim)


SPEC = flow_family(
    "smolvla",
    "embodrl.models.smolvla",
    "SmolVLA: SmolVLM2 and a flow-matching action expert",
    SmolVlaModelConfig,
    (RULES, WHOLE_PICTURES),
    lambda raw: raw.get("type") == "smolvla",
    max_cameras=4,
    sizes="1.9 M (tiny), about 450 M",
    public_preset="smolvla_450m",
    checkpoint="lerobot's smolvla layout",
)
