"""A model from outside the package with what RL needs, and nothing else; an extension that registers itself."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from embodrl import EvalOutput, LoadReport, Observation, PolicyOutput, VLAPolicy, checkpoint, register_model, sampling
from embodrl.config.schema import ModelConfig

BINS = 5


class RlOnly(VLAPolicy):
    """Bins of each action dimension from a coarse picture."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_action_chunks, self.action_dim = config.num_action_chunks, config.action_dim
        self.body = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 16), nn.Tanh())
        self.head = nn.Linear(16, self.num_action_chunks * self.action_dim * BINS)
        self.value_head = nn.Linear(16, 1)

    def _forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.body(inputs["images"].permute(0, 3, 1, 2).float() / 255)
        logits = self.head(hidden).view(len(hidden), self.num_action_chunks, self.action_dim, BINS)
        return logits, self.value_head(hidden).float()

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        return {"images": torch.tensor(observation.images[:, 0], device=self.device)}

    @torch.no_grad()
    def predict_action_batch(self, observation, mode, sampling_params, generator=None, compute_values=True):
        inputs = self.preprocess(observation)
        logits, values = self._forward(inputs)
        noise = torch.empty(logits.shape).exponential_(generator=generator) if mode == "train" else None
        bins = sampling.draw(logits, sampling_params, noise)
        actions = (bins.float() / (BINS - 1) * 2 - 1).numpy()
        logprobs = sampling.action_log_probs(logits, bins, sampling_params)
        return PolicyOutput(actions, logprobs, values, {**inputs, "bins": bins})

    def evaluate_actions(self, forward_inputs, sampling_params, compute_entropy=True, compute_values=True):
        logits, values = self._forward(forward_inputs)
        bins = forward_inputs["bins"]
        entropy = sampling.action_entropy(logits, bins, sampling_params)
        return EvalOutput(sampling.action_log_probs(logits, bins, sampling_params), entropy, values)


class Tied(RlOnly):
    """Two layers have one weight, and are in two groups."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.emb = nn.Linear(48, 16)
        self.body[2].weight = self.emb.weight

    def _forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, values = super()._forward(inputs)
        seen = self.body[:2](inputs["images"].permute(0, 3, 1, 2).float() / 255)
        return logits, values + self.emb(seen).mean(-1, keepdim=True).float()


def build(config: ModelConfig, *, device, dtype, seed: int) -> tuple[RlOnly, LoadReport]:
    """Build the policy, with the weights of a directory that ``save_pretrained`` wrote where one is given."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = (Tied if config.model_type == "rl_tied" else RlOnly)(config)
    source = config.model_path or config.warm_start
    report = LoadReport(source or "random weights")
    if source is not None:
        checkpoint.load_strict(policy, checkpoint.weight_files(Path(source)), report, device=device, dtype=dtype)
    return policy, report


register_model("rl_only", build, "learns from reward alone", uses_state=False, max_cameras=1)
register_model("rl_tied", build, "as rl_only, with tied weights", uses_state=False, max_cameras=1)
