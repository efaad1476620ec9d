"""SmolVLA as a reinforcement-learning policy.

Shapes: B batch, C actions run, H actions predicted, A action dimensions, D padded ones, P tokens
before the actions, W the VLM's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import fields_of
from embodrl.models.common.heads import save_heads
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.common.public_layout import PublicLayout
from embodrl.models.common.value_head import ValueHead, masked_mean
from embodrl.models.flow.expert_policy import ExpertPolicy
from embodrl.models.flow.flow import NoiseHead
from embodrl.models.flow.flow_spec import FlowModelConfig
from embodrl.models.flow.noise_head import save_noise_head
from embodrl.models.openpi.stats import PiStats
from embodrl.models.openpi.tokenizer import JSON_FILE, JsonTokenizer
from embodrl.models.smolvla import files
from embodrl.models.smolvla.config import PUBLIC
from embodrl.models.smolvla.modeling import SmolContext, SmolVlaModel
from embodrl.models.smolvla.processing import SmolProcessor


class SmolVlaPolicy(ExpertPolicy[SmolVlaModel, SmolProcessor], PublicLayout):
    """Denoises an action chunk with the action expert; the critic reads by default images, prompt and state."""

    one_file = True

    def __init__(
        self,
        model: SmolVlaModel,
        processor: SmolProcessor,
        stats: PiStats,
        config: FlowModelConfig,
        value_head: ValueHead | None,
        noise_head: NoiseHead | None,
    ) -> None:
        super().__init__(
            model,
            processor,
            stats.actions,
            config,
            model.config.action_horizon,
            "prefix",
            value_head,
            noise_head,
        )
        self.robot_stats = stats

    def encode(self, inputs: dict[str, Tensor]) -> SmolContext:
        """Encode images, prompt and state once per chunk."""
        pixels = self.processor.pixels(inputs["images"])
        return self.model.encode(pixels, inputs["input_ids"], inputs["attention_mask"], inputs["state"])

    def prefix_features(self, context: SmolContext) -> Tensor:
        """Return the mean ``[B,W]`` of the VLM's final hidden states over images, prompt and state."""
        return masked_mean(self.model.prefix_hidden(context), context.valid)

    def loss_action_dims(self) -> int:
        """Return A: lerobot excludes padded dimensions from the loss."""
        return self.action_dim

    def public_name(self, module: str) -> str:
        return files.public_name(module)

    def save_lerobot(self, directory: Path, cameras: Sequence[str]) -> list[str]:
        with checkpoint.policy_directory(directory) as staging:
            checkpoint.save_weights(self.public_state(), staging, one_file=True)
            self.write_files(staging, own_section=False)
        return []

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        parts = self.parts()
        config = self.model.config
        patches = num_cameras * config.siglip.num_patches
        merged = num_cameras * config.tokens_per_image
        prefix = merged + config.max_prompt_tokens + 1
        counts = [(parts["vision"], patches), (parts["language"], prefix), (self.model.vlm.connector, merged)]
        steps = self.trained_steps
        return [*counts, (parts["action_expert"], self.horizon * steps), (self.model.state_proj, steps)]

    def cache_shape(self, num_cameras: int) -> tuple[int, int, int]:
        config = self.model.config
        positions = num_cameras * config.tokens_per_image + config.max_prompt_tokens + 1
        return config.vlm.depth, config.vlm.num_kv_heads * config.vlm.head_dim, positions

    def enlarge(self, own_tokenizer: bool) -> SmolVlaModel:
        self.model = SmolVlaModel(PUBLIC)
        return self.model

    def take_tokenizer(self, directory: Path | None) -> tuple[int, int]:
        if directory is not None:
            self.processor.tokenizer = JsonTokenizer(directory / JSON_FILE)
        return self.processor.tokenizer.vocab_size, self.model.config.vocab_size

    def public_state(self) -> dict[str, Tensor]:
        return files.public_state(merged_state_dict(self.model, deferred=True))

    def write_files(self, directory: Path, own_section: bool = True) -> None:
        """Write the files besides the weights; lerobot rejects embodrl's section in config.json."""
        config = self.model.config
        stats = self.robot_stats
        state = fields_of(stats.raw, stats.key).fields("state", {})
        state_dim = len(state.items("mean")) if "mean" in state else config.max_state_dim
        save_heads(directory, self.value_head)
        save_noise_head(directory, self.noise_head)
        files.write_config(directory, config, self.action_dim, state_dim, own_section)
        files.write_processors(directory, config, stats, self.action_dim, state_dim)
        self.processor.tokenizer.save(directory)
