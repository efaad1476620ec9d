"""pi0 and pi0.5 as reinforcement-learning policies.

Shapes: B batch, V cameras, C actions run, H actions predicted, A action dimensions, D padded action dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from embodrl.errors import EmbodrlError
from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import CONFIG_FILE
from embodrl.models.common.heads import save_heads
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.common.public_layout import PublicLayout
from embodrl.models.common.value_head import ValueHead, masked_mean
from embodrl.models.flow.expert_policy import ExpertPolicy
from embodrl.models.flow.flow import NoiseHead, accumulated_times
from embodrl.models.flow.flow_spec import FlowModelConfig
from embodrl.models.flow.noise_head import save_noise_head
from embodrl.models.openpi.aloha import actions_from_pi, actions_to_pi
from embodrl.models.openpi.config import PUBLIC, Variant
from embodrl.models.openpi.processing import PiProcessor
from embodrl.models.openpi.stats import ASSETS, STATS_FILE, PiStats
from embodrl.models.openpi.tokenizer import JSON_FILE, JsonTokenizer
from embodrl.models.openpi.weights import in_float32, neutral_norm, public_state
from embodrl.models.pi.lerobot import save_lerobot
from embodrl.models.pi.modeling import PiContext, PiModel
from embodrl.types import Observation


class PiPolicy(ExpertPolicy[PiModel, PiProcessor], PublicLayout):
    """Denoises an action chunk with the action expert.

    The critic reads by default the expert's output (pi0), or images and prompt (pi0.5).
    """

    euler_times = staticmethod(accumulated_times)
    one_file = True
    in_float32 = staticmethod(in_float32)
    neutral_norm = staticmethod(neutral_norm)

    def __init__(
        self,
        model: PiModel,
        processor: PiProcessor,
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
            default_value_input(model.config.variant, config.flow.method),
            value_head,
            noise_head,
        )
        self.robot_stats = stats

    def encode(self, inputs: dict[str, Tensor]) -> PiContext:
        """Encode images, prompt and state once per chunk; ``image_mask bool[B,V]``, if present, excludes cameras."""
        pixels = self.processor.pixels(inputs)
        return self.model.encode(
            pixels, inputs["input_ids"], inputs["attention_mask"], inputs.get("state"), inputs.get("image_mask")
        )

    def prefix_features(self, context: PiContext) -> Tensor:
        """Return the mean ``[B,W]`` of PaliGemma's final hidden states over images and prompt."""
        return masked_mean(self.model.prefix_hidden(context), context.prefix_mask)

    def relative_to(self, actions: NDArray[np.float64], observation: Observation) -> NDArray[np.float64]:
        """Subtract the state from relative actions, in openpi's units."""
        units = actions_to_pi(actions) if self.model.config.aloha_units else actions
        return units - self._offset(actions, observation)

    def absolute_from(self, actions: NDArray[np.float64], observation: Observation) -> NDArray[np.float64]:
        """Add the state to relative actions."""
        units = actions + self._offset(actions, observation)
        return actions_from_pi(units) if self.model.config.aloha_units else units

    def save_lerobot(self, directory: Path, cameras: Sequence[str]) -> list[str]:
        return save_lerobot(self, self.public_state(), self.robot_stats, directory, cameras)

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        parts = self.parts()
        patches = num_cameras * self.model.config.siglip.num_patches
        prefix = patches + self.model.config.max_prompt_tokens
        counts = [(parts["vision"], patches), (parts["language"], prefix)]
        return [
            *counts,
            (self.model.paligemma.multi_modal_projector, patches),
            (parts["action_expert"], (self.horizon + 1) * self.trained_steps),
        ]

    def cache_shape(self, num_cameras: int) -> tuple[int, int, int]:
        config = self.model.config
        positions = num_cameras * config.siglip.num_patches + config.max_prompt_tokens
        return config.vlm.depth, config.vlm.num_kv_heads * config.vlm.head_dim, positions

    def enlarge(self, own_tokenizer: bool) -> PiModel:
        self.model = PiModel(PUBLIC[self.model.config.variant])
        return self.model

    def take_tokenizer(self, directory: Path | None) -> tuple[int, int]:
        if directory is not None:
            self.processor.tokenizer = JsonTokenizer(directory / JSON_FILE)
        return self.processor.tokenizer.vocab_size, self.model.config.vocab_size

    def public_state(self) -> dict[str, Tensor]:
        return public_state(merged_state_dict(self.model, deferred=True), self.model.config.expert.width)

    def write_files(self, directory: Path) -> None:
        precision = str(self.model.dtype).removeprefix("torch.")
        save_heads(directory, self.value_head)
        save_noise_head(directory, self.noise_head)
        checkpoint.write_json(directory / CONFIG_FILE, self.model.config.to_dict(precision))
        assets = directory / ASSETS / self.robot_stats.key
        assets.mkdir(parents=True)
        checkpoint.write_json(assets / STATS_FILE, {"norm_stats": self.robot_stats.raw})
        self.processor.tokenizer.save(directory)

    def _offset(self, actions: NDArray[np.float64], observation: Observation) -> NDArray[np.float64]:
        dims = self.model.config.relative_dims
        offset = np.zeros((len(actions), 1, actions.shape[2]))
        if dims == 0:
            return offset
        if observation.state.shape[1] < dims:
            raise EmbodrlError(
                f"actions are relative to the first {dims} dimensions of the state, which has "
                f"{observation.state.shape[1]}",
                "set env.include_state=true, with a state as the checkpoint was trained on",
                code="state-size",
            )
        offset[:, 0, :dims] = self.processor.in_units(observation.state)[:, :dims]
        offset[:, 0, list(self.model.config.absolute_dims)] = 0.0
        return offset


def default_value_input(variant: Variant, method: str) -> Literal["prefix", "suffix"]:
    """Return the meaning of ``value_head.input: auto`` for the sampling ``model.flow.method``."""
    return "prefix" if variant == "pi05" or method == "cfm" else "suffix"
