"""The rollout backend "huggingface": the training weights themselves, in the same process."""

from __future__ import annotations

import torch
from torch import Tensor

from embodrl.config.schema import RolloutConfig, SamplingConfig
from embodrl.hybrid_engines.precision import autocast, resolve_precision
from embodrl.models.base import VLAPolicy
from embodrl.types import Observation, PolicyOutput, SamplingParams


class NativeRolloutEngine:
    """Acts with a policy whose weights somebody else trains; there is nothing to synchronise.

    Args:
        policy: shared with the train engine.
        config: section ``rollout``.
        sampling: section ``algorithm.sampling``.
        seed: of the actions that are drawn.
    """

    def __init__(self, policy: VLAPolicy, config: RolloutConfig, sampling: SamplingConfig, seed: int) -> None:
        self.policy = policy
        self.device = policy.device
        self.precision = resolve_precision(config.precision, self.device)
        self.sampling = SamplingParams(sampling.temperature, sampling.top_k)
        self.generator = torch.Generator().manual_seed(seed)

    def act(self, observation: Observation, compute_values: bool) -> PolicyOutput:
        """Draw a chunk of actions for each row."""
        with torch.no_grad(), autocast(self.precision, self.device):
            return self.policy.predict_action_batch(
                observation, "train", self.sampling, self.generator, compute_values=compute_values
            )

    def act_greedily(self, observation: Observation) -> PolicyOutput:
        """Choose the most probable chunk of actions for each row."""
        with torch.no_grad(), autocast(self.precision, self.device):
            return self.policy.predict_action_batch(observation, "eval", self.sampling, compute_values=False)

    def values(self, observation: Observation) -> Tensor:
        """Return ``float32[B,K]`` on the CPU."""
        with torch.no_grad(), autocast(self.precision, self.device):
            return self.policy.predict_values(observation).float().cpu()
