"""The rollout backend "huggingface": the training weights themselves, in the same process."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from embodrl.config.schema import RolloutConfig, SamplingConfig
from embodrl.data.rng import generator_state, restore_generator
from embodrl.hybrid_engines.parallel import on_threads
from embodrl.hybrid_engines.precision import Precision, autocast, resolve_precision
from embodrl.models.base import VLAPolicy
from embodrl.types import Observation, PolicyOutput, SamplingParams


class NativeRolloutEngine:
    """Acts with a policy whose weights somebody else trains; there is nothing to synchronise.

    On a CPU a batch is cut into ``num_threads`` parts, each with a random generator of its own.

    Args:
        policy: shared with the train engine.
        config: section ``rollout``.
        sampling: section ``algorithm.sampling``.
        seed: of the actions that are drawn.
        num_threads: parts of a batch computed at the same time on a CPU.
    """

    def __init__(
        self, policy: VLAPolicy, config: RolloutConfig, sampling: SamplingConfig, seed: int, num_threads: int = 1
    ) -> None:
        self.policy = policy
        self.device = policy.device
        self.precision: Precision = resolve_precision(config.precision, self.device)
        self.sampling = SamplingParams(sampling.temperature, sampling.top_k)
        self.num_threads = num_threads if self.device.type == "cpu" else 1
        seeds = np.random.SeedSequence(seed).generate_state(self.num_threads)
        self.generators = [torch.Generator().manual_seed(int(s)) for s in seeds]

    def act(self, observation: Observation, compute_values: bool) -> PolicyOutput:
        """Draw a chunk of actions for each row."""
        return self._predict(observation, "train", compute_values)

    def act_greedily(self, observation: Observation) -> PolicyOutput:
        """Choose the most probable chunk of actions for each row."""
        return self._predict(observation, "eval", compute_values=False)

    def values(self, observation: Observation) -> Tensor:
        """Return ``float32[B,K]`` on the CPU."""

        def compute(part: Observation) -> Tensor:
            with torch.no_grad(), autocast(self.precision, self.device):
                return self.policy.predict_values(part).float().cpu()

        tasks = [lambda part=part: compute(part) for part in self._parts(observation)]
        return torch.cat(on_threads(tasks, self.num_threads))

    def _predict(self, observation: Observation, mode: Literal["train", "eval"], compute_values: bool) -> PolicyOutput:
        def compute(part: Observation, generator: torch.Generator) -> PolicyOutput:
            with torch.no_grad(), autocast(self.precision, self.device):
                return self.policy.predict_action_batch(part, mode, self.sampling, generator, compute_values)

        pairs = zip(self._parts(observation), self.generators, strict=False)
        tasks = [lambda part=part, generator=generator: compute(part, generator) for part, generator in pairs]
        outputs = on_threads(tasks, self.num_threads)
        return outputs[0] if len(outputs) == 1 else concat_outputs(outputs)

    def _parts(self, observation: Observation) -> list[Observation]:
        rows = np.array_split(np.arange(observation.batch_size), min(self.num_threads, observation.batch_size))
        return [observation] if len(rows) == 1 else [observation.select(part) for part in rows]

    def random_state(self) -> list[str]:
        """Return the state of the generators, as text."""
        return [generator_state(generator) for generator in self.generators]

    def set_random_state(self, states: list[str]) -> None:
        """Restore what ``random_state`` returned.

        Raises:
            ValueError: it was another number of threads.
        """
        for generator, state in zip(self.generators, states, strict=True):
            restore_generator(generator, state)


def concat_outputs(parts: list[PolicyOutput]) -> PolicyOutput:
    """Return the rows of all parts, in order."""
    values = [part.values for part in parts if part.values is not None]
    inputs = parts[0].forward_inputs
    return PolicyOutput(
        np.concatenate([part.actions for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat(values) if values else None,
        {name: torch.cat([part.forward_inputs[name] for part in parts]) for name in inputs},
    )
