"""A policy of one linear layer: enough to test the training engine against."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from embodrl.data.trajectory import TrajectoryBatch
from embodrl.models.base import VLAPolicy
from embodrl.models.common.sampling import log_distribution
from embodrl.types import EvalOutput, Observation, PolicyOutput, SamplingParams

BINS = 7
FEATURES = 6


class ToyPolicy(VLAPolicy):
    """Features -> logits of C*A tokens, and a value head on the hidden layer."""

    def __init__(self, num_action_chunks: int = 2, action_dim: int = 3, num_values: int = 1, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.num_action_chunks = num_action_chunks
        self.action_dim = action_dim
        self.body = nn.Linear(FEATURES, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, num_action_chunks * action_dim * BINS)
        self.value = nn.Linear(8, num_values)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3

    def _hidden(self, features: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.body(features)))

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
    ) -> EvalOutput:
        hidden = self._hidden(forward_inputs["features"])
        shape = (len(hidden), self.num_action_chunks, self.action_dim, BINS)
        logprobs = log_distribution(self.head(hidden).view(shape), sampling, forward_inputs["tokens"])
        chosen = logprobs.gather(-1, forward_inputs["tokens"].unsqueeze(-1)).squeeze(-1)
        entropy = -(logprobs.exp() * logprobs.clamp_min(-1e4)).sum(-1) if compute_entropy else None
        return EvalOutput(chosen, entropy, self.value(hidden).float() if compute_values else None)

    def parts(self) -> dict[str, nn.Module]:
        return {"language": nn.ModuleList([self.body, self.norm, self.head]), "value_head": self.value}

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.head.parameters())

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        raise NotImplementedError

    def predict_action_batch(
        self,
        observation: Observation,
        mode: Literal["train", "eval"],
        sampling: SamplingParams,
        generator: torch.Generator | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        raise NotImplementedError

    def sft_inputs(self, observation: Observation, actions: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def sft_loss(self, batch: dict[str, Tensor], label_smoothing_bins: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = self.evaluate_actions(batch, SamplingParams(1.0, 0), False, False).logprobs
        weight = batch["action_mask"][..., None].expand_as(logprobs).float()
        nll = -(logprobs * weight).sum() / weight.sum().clamp(min=1.0)
        return nll, {"nll": nll.detach()}


def toy_rollout(
    policy: ToyPolicy,
    num_steps: int = 5,
    num_envs: int = 4,
    seed: int = 1,
    temperature: float = 1.0,
    part_invalid: bool = True,
) -> TrajectoryBatch:
    """A rollout of random features and tokens, with the policy's own log-probs and values; some actions not valid."""
    generator = torch.Generator().manual_seed(seed)
    chunk, dim = policy.num_action_chunks, policy.action_dim
    features = torch.randn(num_steps + 1, num_envs, FEATURES, generator=generator)
    tokens = torch.randint(BINS, (num_steps + 1, num_envs, chunk, dim), generator=generator)
    with torch.no_grad():
        output = policy.evaluate_actions(
            {"features": features.flatten(0, 1), "tokens": tokens.flatten(0, 1)}, SamplingParams(temperature)
        )
    assert output.values is not None
    values = output.values.view(num_steps + 1, num_envs, -1)
    valid = torch.ones(num_steps, num_envs, chunk, dtype=torch.bool)
    terminated = torch.zeros_like(valid)
    if part_invalid:
        terminated[1, 0, 0] = True
        valid[1, 0, 1:] = False
        terminated[2, 1, -1] = True
        valid[3:, 1] = False
    return TrajectoryBatch.from_rollout(
        forward_inputs={"features": features[:-1], "tokens": tokens[:-1]},
        logprobs=output.logprobs.view(num_steps + 1, num_envs, chunk, dim)[:-1],
        values=values,
        rewards=torch.randn(num_steps, num_envs, chunk, generator=generator) * valid,
        valid=valid,
        terminated=terminated,
        truncated=torch.zeros_like(valid),
        bootstrap_values=torch.zeros_like(values[:-1]),
        policy_version=torch.zeros(num_steps, num_envs, dtype=torch.int64),
        task_id=torch.zeros(num_steps, num_envs, dtype=torch.int64),
    )
