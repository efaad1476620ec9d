"""pi0-FAST: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import ModelConfig, PositiveInt, Section
from embodrl.models.flow.flow_spec import WHOLE_PICTURES, SiglipConfig, at_most, libero_interface, vlm_fits
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import ModelSpec


class Pi0FastArchitectureConfig(Section):
    """Dimensions of a pi0-FAST without a checkpoint, and values that a checkpoint's files may omit."""

    image_size: PositiveInt = Field(default=64, description="pixels, square; divisible by patch_size")
    patch_size: PositiveInt = Field(default=8, description="pixels")
    siglip: SiglipConfig = Field(default=SiglipConfig(), description="vision")
    depth: PositiveInt = Field(default=3, description="layers of Gemma")
    num_heads: PositiveInt = Field(default=4, description="query heads")
    num_kv_heads: PositiveInt = Field(default=1, description="key and value heads; divides num_heads")
    head_dim: PositiveInt = Field(default=32, description="head dimension; even, for rotary embeddings")
    vlm_width: PositiveInt = Field(default=128, description="Gemma hidden size")
    vlm_mlp_dim: PositiveInt = Field(default=384, description="Gemma MLP size")
    max_action_dim: PositiveInt = Field(default=32, description="maximum dimensions of a state")
    action_horizon: PositiveInt = Field(default=5, description="actions in a chunk; num_action_chunks of them are run")
    num_images: PositiveInt = Field(default=1, description="maximum number of cameras")
    max_prompt_tokens: PositiveInt = Field(default=96, description="prompts, with the state, are padded to this length")
    max_action_tokens: PositiveInt | None = Field(
        default=None,
        description="maximum tokens of a chunk; null: as the checkpoint, tiny size: 40. A chunk not complete"
        " by then has zeros for the highest frequencies",
    )
    padded_state_in_prompt: bool | None = Field(
        default=None,
        description="pad the state in the prompt to max_action_dim as lerobot before 0.5; null: as the checkpoint",
    )
    dark_bars: bool | None = Field(
        default=None,
        description="pad non-square images with -3 instead of black, as lerobot before 0.5; null: as the checkpoint",
    )
    antialias: bool | None = Field(
        default=None, description="resize images with antialiasing; null: no, as lerobot; tiny size: yes"
    )


class Pi0FastModelConfig(ModelConfig):
    """A pi0-FAST."""

    pi0_fast: Pi0FastArchitectureConfig = Field(
        default=Pi0FastArchitectureConfig(), description="dimensions of the tiny size, and tokens"
    )


RULES = RuleSet()


@RULES.rule("model.model_type", "model.model_path", "model.pi0_fast", "model.num_action_chunks", "env.cameras")
def pi0_fast_dimensions_fit(context: Context) -> Iterator[Finding]:
    """In a tiny pi0-FAST patches tile the image, heads divide widths, and actions and cameras fit."""
    config = context.config
    base = "model.pi0_fast"
    if config.model.model_path is not None:
        return
    shape = context.model(Pi0FastModelConfig).pi0_fast
    yield from vlm_fits(base, shape)
    chunk = config.model.num_action_chunks
    horizon = shape.action_horizon
    yield from at_most("model.num_action_chunks", chunk, f"{base}.action_horizon", horizon, "actions to run")
    cameras = len(config.env.cameras)
    yield from at_most("env.cameras", cameras, f"{base}.num_images", shape.num_images, "cameras")


@RULES.rule("model.model_type", "algorithm.reward_type", "model.value_head.output")
def tokens_are_of_the_chunk(context: Context) -> Iterator[Finding]:
    """A FAST token encodes every action of its chunk, so there is no advantage of a single action."""
    config = context.config
    for key, value in (
        ("algorithm.reward_type", config.algorithm.reward_type == "action_level"),
        ("model.value_head.output", config.model.value_head.output == "action"),
    ):
        if value:
            message = "pi0_fast's tokens stand for a whole chunk, not for single actions"
            allowed = "chunk_level" if key == "algorithm.reward_type" else "chunk"
            yield Finding(key, message, f"set it to {allowed}", allowed, others=("model.model_type",))


@RULES.note("model.model_type", "sft.label_smoothing_bins")
def tokens_are_in_no_order(context: Context) -> Iterator[Finding]:
    """Neighbouring tokens of a byte-pair encoding do not mean neighbouring actions."""
    if context.by_user("sft.label_smoothing_bins"):
        message = "has no effect: neighbouring tokens of pi0_fast do not mean neighbouring actions"
        yield Finding("sft.label_smoothing_bins", message, "leave it out")


SPEC = ModelSpec(
    name="pi0_fast",
    target="embodrl.models.pi0_fast.build:build_pi0_fast",
    description="pi0-FAST: PaliGemma that writes a chunk of actions as FAST tokens",
    recognizes=lambda raw: raw.get("type") == "pi0_fast",
    settings=Pi0FastModelConfig,
    rules=(RULES, WHOLE_PICTURES),
    kind="sequence",
    public_layout=True,
    value_inputs=("prompt_end", "prompt_mean"),
    trainable=("all", "lora"),
    uses_state=True,
    max_cameras=3,
    interface=libero_interface,
    sizes="1.3 M (tiny), about 2.9 B",
    actions="cosine coefficients of the chunk, byte-pair encoded, decoded autoregressively",
    missing_config="give a checkpoint in lerobot's pi0_fast layout",
    checkpoint="lerobot's pi0_fast layout",
    rl="log-probs of action tokens: temperature, top-k",
)
