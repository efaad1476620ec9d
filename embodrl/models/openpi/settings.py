"""The section ``model.pi``. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from embodrl.config.schema import NonNegativeInt, PositiveInt, Section
from embodrl.models.flow.flow_spec import SiglipConfig


class PiArchitectureConfig(Section):
    """Dimensions of a pi0 or pi0.5 without a checkpoint; prompt settings apply to checkpoints as well."""

    image_size: PositiveInt = Field(default=64, description="pixels, square; divisible by patch_size")
    patch_size: PositiveInt = Field(default=8, description="pixels")
    siglip: SiglipConfig = Field(default=SiglipConfig(), description="vision")
    depth: PositiveInt = Field(default=3, description="layers of Gemma and of the action expert")
    num_heads: PositiveInt = Field(default=4, description="query heads of both")
    num_kv_heads: PositiveInt = Field(default=1, description="key and value heads of both; divides num_heads")
    head_dim: PositiveInt = Field(default=32, description="head dimension of both; even, for rotary embeddings")
    vlm_width: PositiveInt = Field(default=128, description="Gemma hidden size")
    vlm_mlp_dim: PositiveInt = Field(default=384, description="Gemma MLP size")
    expert_width: PositiveInt = Field(default=96, description="action expert hidden size; even")
    expert_mlp_dim: PositiveInt = Field(default=256, description="action expert MLP size")
    vocab_size: PositiveInt | None = Field(
        default=None, description="embedding rows, at least the tokenizer's tokens; null: exactly those"
    )
    max_action_dim: PositiveInt = Field(default=32, description="actions and states are zero-padded to this size")
    action_horizon: PositiveInt = Field(default=5, description="predicted actions; the first num_action_chunks are run")
    num_images: PositiveInt = Field(default=1, description="image slots; missing cameras are masked")
    max_prompt_tokens: PositiveInt = Field(default=48, description="prompts are padded to this length")
    discrete_state: bool | None = Field(
        default=None,
        description="pi0.5: write the state into the prompt; null: as the checkpoint was trained, tiny size: no",
    )
    padded_state_in_prompt: bool | None = Field(
        default=None,
        description="pi0.5: pad that state to max_action_dim as lerobot before 0.5; null: as the checkpoint",
    )
    dark_bars: bool | None = Field(
        default=None,
        description="pad non-square images with -3 instead of black, as lerobot before 0.5; null: as the checkpoint",
    )
    relative_dims: NonNegativeInt | None = Field(
        default=None,
        description="leading action dimensions that a checkpoint in openpi's layout predicts relative to the state"
        " (its DeltaActions); null: by the name of the dataset",
    )
    absolute_dims: tuple[NonNegativeInt, ...] | None = Field(
        default=None,
        description="dimensions among these that are absolute, such as a gripper between the joints of two arms:"
        " openpi's make_bool_mask(6, -1, 6, -1) is relative_dims=13 with [6]; null: by the name of the dataset",
    )
    aloha_units: bool | None = Field(
        default=None,
        description="states and actions are ALOHA's, and converted to openpi's (its adapt_to_pi): 14 numbers of two"
        " arms; null: by the name of the dataset",
    )
    antialias: bool | None = Field(
        default=None,
        description="resize a checkpoint's images with antialiasing; null: yes for openpi, no for lerobot",
    )
