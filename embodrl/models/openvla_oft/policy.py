"""OpenVLA-OFT with discrete actions as a reinforcement-learning policy.

Shapes: B batch, V cameras, C actions in a chunk, A action dimensions, H x W pixels, L prompt tokens, D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.data.rng import RandomSource
from embodrl.models.common.lora import merged_state_dict
from embodrl.models.common.norm_stats import ActionStats
from embodrl.models.common.sampling import draw
from embodrl.models.common.value_head import ValueHead
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.models.openvla.token_policy import TokenPolicy, exponential_noise
from embodrl.models.openvla_oft.config import PROPRIO_FILE
from embodrl.models.openvla_oft.modeling import ProprioProjector, append_action_places, at_action_places
from embodrl.models.openvla_oft.processing import OpenVLAOFTProcessor
from embodrl.models.openvla_oft.spec import OpenVlaOftConfig
from embodrl.storage.files import write_safetensors
from embodrl.types import Observation, PolicyOutput, SamplingParams


class OpenVLAOFTPolicy(TokenPolicy):
    """All action tokens of a chunk from one bidirectional pass over images, state, prompt and empty places for them.

    The tokens chosen are never fed back, so a chunk's tokens are independent given the observation, and rollout and
    training run the same pass. ``preprocess`` returns ``images uint8[B,V,H,W,3]``, ``input_ids`` and
    ``attention_mask`` ``int64[B,L]``, and ``proprio float32[B,S]`` with a state token.

    Args:
        model: the network, not causal.
        processor: makes its inputs.
        stats: action statistics of the robot.
        config: section ``model``.
        value_head: the critic, or None.
        proprio_projector: makes the state token, or None.
    """

    def __init__(
        self,
        model: OpenVLAModel,
        processor: OpenVLAOFTProcessor,
        stats: ActionStats,
        config: OpenVlaOftConfig,
        value_head: ValueHead | None = None,
        proprio_projector: ProprioProjector | None = None,
    ) -> None:
        super().__init__(model, processor, stats, config, value_head)
        self.keep_stop_token = config.keep_stop_token
        self.proprio_projector = proprio_projector

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: Literal["train", "eval"],
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Choose a chunk of actions for each row: sampled in ``train`` mode, the most probable bins in ``eval`` mode.

        ``forward_inputs`` has what ``preprocess`` returns and ``action_tokens int64[B,C,A]``.

        Raises:
            EmbodrlError: see ``preprocess``; or values are wanted and there is no value head.
        """
        inputs = self.preprocess(observation)
        logits, features = self.action_logits(inputs)
        noise = exponential_noise(logits.shape, generator, self.device) if mode == "train" else None
        values = self.values_from(features) if compute_values else None
        return self.make_output(inputs, draw(logits, sampling, noise), logits, values, sampling)

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        """The whole pass, since the prompt's hidden states depend on the empty places after it.

        Raises:
            EmbodrlError: see ``preprocess``; or there is no value head.
        """
        return self.values_from(self.action_logits(self.preprocess(observation))[1])

    def action_logits(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """``action_tokens`` are not read."""
        prefix, prefix_mask = self.prompt_embeddings(inputs)
        length, num_tokens = prefix.shape[1], self.num_action_chunks * self.action_dim
        sequence = append_action_places(self.model, prefix, num_tokens, self.keep_stop_token)
        mask = None if prefix_mask is None else F.pad(prefix_mask, (0, sequence.shape[1] - length), value=1)
        hidden = self.model.hidden_states(sequence, mask)
        logits = self.model.action_logits(at_action_places(hidden, length, num_tokens))
        return logits, self._features(hidden[:, :length], prefix_mask)

    def state_tokens(self, inputs: dict[str, Tensor]) -> Tensor | None:
        if self.proprio_projector is None:
            return None
        return self.proprio_projector(inputs["proprio"].to(self.proprio_projector.fc1.weight.dtype))[:, None]

    def parts(self) -> dict[str, nn.Module]:
        """With a state token there is also ``proprio_projector``."""
        own = {} if self.proprio_projector is None else {"proprio_projector": self.proprio_projector}
        return {**super().parts(), **own}

    def own_section(self) -> dict[str, object]:
        return {**super().own_section(), "keep_stop_token": self.keep_stop_token}

    def save_extras(self, directory: Path) -> None:
        """Write the value head and the projector of the state; the latter not pickled, as public ones are."""
        super().save_extras(directory)
        if self.proprio_projector is not None:
            write_safetensors(directory / PROPRIO_FILE, merged_state_dict(self.proprio_projector))
