"""A model from outside the package: a small CNN over the picture, the instruction as a bag of words, binned actions.

PYTHONPATH=examples/new_model embodrl train --config examples/new_model/config.yaml
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from new_model import SmallVlaConfig
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl import (
    EvalOutput,
    LoadReport,
    Observation,
    PolicyOutput,
    SamplingParams,
    ValueHead,
    VLAPolicy,
    checkpoint,
)
from embodrl import (
    sampling as sampler,
)

BINS, WORDS = 21, 64
Tensors = dict[str, Tensor]


class SmallVLA(VLAPolicy):
    """21 bins of [-1, 1] for each of the C actions' A dimensions, all drawn at once."""

    def __init__(self, config: SmallVlaConfig) -> None:
        super().__init__()
        self.num_action_chunks, self.action_dim, width = config.num_action_chunks, config.action_dim, config.hidden_size
        layers = [layer for i in (3, 32, 32) for layer in (nn.Conv2d(i, 32, 5, stride=2, padding=2), nn.ReLU())]
        self.vision = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 16, width))
        self.words = nn.Linear(WORDS, width)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
        self.head = nn.Linear(width, self.num_action_chunks * self.action_dim * BINS)
        num_values = self.num_action_chunks if config.value_head.output == "action" else 1
        self.value_head = ValueHead(width, config.value_head.hidden_sizes, num_values)

    def _forward(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Return logits ``[B,C,A,BINS]`` and hidden states ``[B,hidden_size]``, from which values are read."""
        picture = self.vision(inputs["images"].permute(0, 3, 1, 2).float() / 127.5 - 1.0)
        hidden = self.body(torch.cat([picture, self.words(inputs["words"])], dim=1))
        return self.head(hidden).view(len(hidden), self.num_action_chunks, self.action_dim, BINS), hidden

    def preprocess(self, observation: Observation) -> Tensors:
        words = torch.zeros(observation.batch_size, WORDS)
        for row, text in enumerate(observation.instruction):
            for word in text.lower().split():
                words[row, zlib.crc32(word.encode()) % WORDS] += 1.0
        return {"images": torch.tensor(observation.images[:, 0], device=self.device), "words": words.to(self.device)}

    @torch.no_grad()
    def predict_action_batch(self, observation, mode, sampling, generator=None, compute_values=True) -> PolicyOutput:
        inputs = self.preprocess(observation)
        logits, hidden = self._forward(inputs)
        noise = torch.empty(logits.shape).exponential_(generator=generator).to(self.device) if mode == "train" else None
        bins = sampler.draw(logits, sampling, noise)
        actions = (bins.cpu().float() / (BINS - 1) * 2.0 - 1.0).numpy()
        values = self.value_head(hidden) if compute_values else None
        return PolicyOutput(actions, sampler.action_log_probs(logits, bins, sampling), values, {**inputs, "bins": bins})

    def evaluate_actions(
        self, forward_inputs: Tensors, sampling: SamplingParams, compute_entropy=True, compute_values=True
    ) -> EvalOutput:
        (logits, hidden), bins = self._forward(forward_inputs), forward_inputs["bins"]
        entropy = sampler.action_entropy(logits, bins, sampling) if compute_entropy else None
        values = self.value_head(hidden) if compute_values else None
        return EvalOutput(sampler.action_log_probs(logits, bins, sampling), entropy, values)

    # -- imitation, which RL can do without ----------------------------------------------------------------------------

    def sft_inputs(self, observation: Observation, actions: Tensor) -> Tensors:
        bins = ((actions.clamp(-1.0, 1.0) + 1.0) / 2.0 * (BINS - 1)).round().long()
        return {**self.preprocess(observation), "bins": bins.to(self.device)}

    def sft_loss(self, batch: Tensors, label_smoothing_bins: float = 0.0) -> tuple[Tensor, Tensors]:
        logits, bins = self._forward(batch)[0], batch["bins"]
        weight = batch["action_mask"][..., None].expand(bins.shape).float()  # 0 beyond the end of an episode
        loss = F.cross_entropy(logits.flatten(0, -2), bins.flatten(), reduction="none").view(bins.shape)
        hit = (logits.argmax(dim=-1) == bins).float()
        total = weight.sum().clamp(min=1.0)
        return (loss * weight).sum() / total, {"accuracy": (hit * weight).sum() / total}


def build(config: SmallVlaConfig, *, device, dtype, seed: int) -> tuple[SmallVLA, LoadReport]:
    """Build the policy with random weights, or with those of a directory that ``save_pretrained`` wrote."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = SmallVLA(config).to(device)
    source = config.model_path or config.warm_start
    report = LoadReport(source or "random weights")
    if source is not None:
        checkpoint.load_strict(policy, checkpoint.weight_files(Path(source)), report, device=device, dtype=dtype)
    return policy, report
