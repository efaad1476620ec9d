"""The rollout backend "huggingface": the policy's own modules, in the same process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from embodrl.config.schema import RolloutConfig, SamplingConfig
from embodrl.data.rng import RandomSource, RowGenerators, generator_state, restore_generator
from embodrl.hybrid_engines.parallel import on_threads
from embodrl.hybrid_engines.precision import Precision, autocast, resolve_precision
from embodrl.models.base import VLAPolicy
from embodrl.types import Observation, PolicyOutput, SamplingParams


class NativeRolloutEngine:
    """Acts with a policy: the one that trains, whose weights are always the newest, or a copy that is told of them.

    On a CPU a batch is cut into ``num_threads`` parts, each with a random generator of its own. Several threads may ask
    at once: one batch is computed at a time, and weights change only between batches.

    Args:
        policy: shared with the train engine, or a copy (``frozen_copy``).
        config: section ``rollout``.
        sampling: section ``algorithm.sampling``.
        seed: of the actions that are drawn.
        num_threads: parts of a batch computed at the same time on a CPU.

    Attributes:
        version: updates that the weights have seen.
    """

    def __init__(
        self, policy: VLAPolicy, config: RolloutConfig, sampling: SamplingConfig, seed: int, num_threads: int = 1
    ) -> None:
        self.policy = policy
        self.device = policy.device
        self.precision: Precision = resolve_precision(config.precision, self.device)
        self.sampling = SamplingParams(sampling.temperature, sampling.top_k)
        self.num_threads = num_threads if self.device.type == "cpu" else 1
        self.generators = self.make_generators([seed])
        self.version = 0
        self._lock = threading.Lock()

    def make_generators(self, seed: Sequence[int]) -> list[torch.Generator]:
        """Return generators for ``act``, one a thread, that follow from the numbers."""
        # A list of one number and the number itself give the same sequence.
        seeds = np.random.SeedSequence(list(seed)).generate_state(self.num_threads)
        return [torch.Generator().manual_seed(int(s)) for s in seeds]

    def row_generators(self, seeds: Sequence[Sequence[int]]) -> list[RandomSource] | None:
        """Return generators for ``act`` such that each row draws from its own, which follows from its numbers.

        None if the policy can't; it then draws from the engine's.
        """
        if not self.policy.draws_by_row:
            return None
        numbers = [int(np.random.SeedSequence(list(seed)).generate_state(1)[0]) for seed in seeds]
        rows = [torch.Generator().manual_seed(number) for number in numbers]
        parts = np.array_split(np.arange(len(rows)), min(self.num_threads, len(rows)))
        return [RowGenerators(tuple(rows[i] for i in part)) for part in parts]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over weights, between two batches.

        Args:
            weights: names and tensors of the policy; what this engine shares already is passed over.
            version: updates that they have seen.

        Raises:
            KeyError: a name is unknown.
        """
        mine = dict(self.policy.named_parameters()) | dict(self.policy.named_buffers())
        with self._lock, torch.no_grad():
            for name, tensor in weights:
                if mine[name].data_ptr() != tensor.data_ptr():
                    mine[name].copy_(tensor)
            self.version = version

    def act(
        self, observation: Observation, compute_values: bool, generators: Sequence[RandomSource] | None = None
    ) -> PolicyOutput:
        """Draw a chunk of actions for each row, with the engine's own generators unless others are given."""
        return self._predict(observation, "train", compute_values, generators or self.generators)

    def act_greedily(self, observation: Observation) -> PolicyOutput:
        """Choose the most probable chunk of actions for each row."""
        return self._predict(observation, "eval", False, self.generators)

    def values(self, observation: Observation) -> Tensor:
        """Return ``float32[B,K]`` on the CPU."""

        def compute(part: Observation) -> Tensor:
            with torch.no_grad(), autocast(self.precision, self.device):
                return self.policy.predict_values(part).float().cpu()

        tasks = [lambda part=part: compute(part) for part in self._parts(observation)]
        with self._lock:
            return torch.cat(on_threads(tasks, self.num_threads))

    def _predict(
        self,
        observation: Observation,
        mode: Literal["train", "eval"],
        compute_values: bool,
        generators: Sequence[RandomSource],
    ) -> PolicyOutput:
        def compute(part: Observation, generator: RandomSource) -> PolicyOutput:
            with torch.no_grad(), autocast(self.precision, self.device):
                return self.policy.predict_action_batch(part, mode, self.sampling, generator, compute_values)

        pairs = zip(self._parts(observation), generators, strict=False)
        tasks = [lambda part=part, generator=generator: compute(part, generator) for part, generator in pairs]
        with self._lock:
            outputs, version = on_threads(tasks, self.num_threads), self.version
        return replace(outputs[0] if len(outputs) == 1 else concat_outputs(outputs), version=version)

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
