"""The rollout engine: from observations to actions, with a policy in this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodrl.config.schema import Config, RolloutConfig, SamplingConfig
from embodrl.data.rng import RandomSource, RowGenerators, generator_state, restore_generator
from embodrl.hybrid_engines.offload import Offload, OffloadReport
from embodrl.hybrid_engines.training.parallel import on_threads
from embodrl.hybrid_engines.training.precision import Precision, autocast, resolve_precision
from embodrl.models.base import VLAPolicy, check_decoding
from embodrl.models.common.condition import condition_observation
from embodrl.models.common.live import OnToken
from embodrl.models.common.own_critic import own_critic
from embodrl.types import MODES, ActMode, ChunkPrefix, Decoding, Observation, PolicyOutput, SamplingParams


@dataclass(frozen=True)
class ActRequest:
    """A batch of observations that needs actions.

    Attributes:
        observation: ``[B]``.
        mode: ``train`` samples actions, ``eval`` takes the most probable ones, ``mean`` the ones nearest to the mean.
        compute_values: also compute values.
        generators: random generators of the samples: one per thread, each for its part of the rows.
        sampling: of a message whose client chooses it; None for the engine's.
        on_token: gets the tokens of messages as they are written, from a ``LiveWriter``; other policies report none.
    """

    observation: Observation
    mode: ActMode
    compute_values: bool
    generators: Sequence[RandomSource]
    sampling: SamplingParams | None = None
    on_token: OnToken | None = None


@dataclass(frozen=True)
class RolloutParts:
    """Constructor inputs of a rollout engine.

    Attributes:
        policy: policy on its device; shared with the train engine, or a copy (``frozen_copy``).
        num_threads: value of ``cluster.num_threads``.
        memory: the policy's weights (``policy_memory``), if nothing else uses them between rollouts.
        weights_dir: directory in which a training run publishes its weights.
    """

    config: Config
    policy: VLAPolicy
    num_threads: int = 1
    part: tuple[int, int] = (0, 1)
    memory: Offload | None = None
    weights_dir: Path | None = None

    @property
    def common(self) -> tuple[VLAPolicy, RolloutConfig, SamplingConfig, int, int, tuple[int, int]]:
        """The arguments common to all rollout engines."""
        config = self.config
        sampling = config.algorithm.sampling
        seed = config.runner.seed
        return self.policy, config.rollout, sampling, seed, self.num_threads, self.part


class RolloutEngine(ABC):
    """Computes actions with the trained policy, or a copy that receives its weights.

    Thread-safe: one batch is computed at a time, and weights change only between batches. Samples come from generators
    on the CPU, so that every backend draws the same actions from the same random state.

    Args:
        config: section ``rollout``.
        sampling: section ``algorithm.sampling``.
        num_threads: number of parts of a batch computed in parallel on a CPU, each with its own random generator.
        part: rank and number of the processes that share the environments: together they draw like one process with the
            sum of their threads.
        memory: the policy's weights, if ``offload`` may move them because nothing else uses them meanwhile; None if
            they stay.

    Attributes:
        offload_report: report of the last ``offload`` that freed memory; None without one.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        config: RolloutConfig,
        sampling: SamplingConfig,
        seed: int,
        num_threads: int = 1,
        part: tuple[int, int] = (0, 1),
        memory: Offload | None = None,
    ) -> None:
        self.part = part
        self._memory = memory
        self.policy = policy
        self.device = policy.device
        self.precision: Precision = resolve_precision(config.precision, self.device)
        self.sampling = SamplingParams(sampling.temperature, sampling.top_k)
        self.num_threads = num_threads if self.device.type == "cpu" else 1
        self.generators = self.make_generators([seed])
        self.version = 0
        self.offload_report: OffloadReport | None = None
        # Reentrant: the stream of new weights may itself bring back offloaded memory.
        self._lock = threading.RLock()

    @property
    def decodings(self) -> tuple[Decoding, ...]:
        """Decodings that ``decide`` supports."""
        return self.policy.decodings

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Use new weights from the next batch on; tensors that share memory with the policy's are skipped.

        Raises:
            KeyError: a name is unknown.
        """

    @abstractmethod
    def _predict(self, request: ActRequest) -> PolicyOutput:
        """Choose a chunk of actions for each row."""

    @abstractmethod
    def offload(self) -> None:
        """Free device memory until the next request, which brings it back."""

    @abstractmethod
    def onload(self) -> None:
        """Bring back the memory freed by ``offload``."""

    def make_generators(self, seed: Sequence[int]) -> list[torch.Generator]:
        """Return generators for ``act``, one per thread, seeded from the numbers."""
        # A list of one number and the number itself seed the same sequence.
        rank, count = self.part
        # Derived for the threads of all processes before taking this part's, so that together they draw as one process.
        seeds = np.random.SeedSequence(list(seed)).generate_state(self.num_threads * count)
        mine = seeds[rank * self.num_threads : (rank + 1) * self.num_threads]
        return [torch.Generator().manual_seed(int(s)) for s in mine]

    def row_generators(self, seeds: Sequence[Sequence[int]]) -> list[RandomSource] | None:
        """Return generators for ``act`` such that each row draws from its own, seeded from its numbers.

        None if the policy does not support it and draws from the engine's generators.
        """
        if not self.policy.draws_by_row:
            return None
        numbers = [int(np.random.SeedSequence(list(seed)).generate_state(1)[0]) for seed in seeds]
        rows = [torch.Generator().manual_seed(number) for number in numbers]
        # Split like ``_parts`` splits the observation.
        parts = np.array_split(np.arange(len(rows)), min(self.num_threads, len(rows)))
        return [RowGenerators(tuple(rows[i] for i in part)) for part in parts]

    def act(
        self, observation: Observation, compute_values: bool, generators: Sequence[RandomSource] | None = None
    ) -> PolicyOutput:
        """Sample a chunk of actions for each row, with the engine's own generators by default."""
        return self._predict(
            ActRequest(self._conditioned(observation), "train", compute_values, generators or self.generators)
        )

    def decide(
        self,
        observation: Observation,
        decoding: Decoding,
        generators: Sequence[RandomSource] | None = None,
        sampling: SamplingParams | None = None,
        on_token: OnToken | None = None,
    ) -> PolicyOutput:
        """Choose a chunk of actions for each row with one of ``decodings``, without values.

        ``generators`` serve ``sampled``; None draws from the engine's own. ``sampling`` other than the engine's, and
        ``on_token``, are for policies that write text, whose backend is ``native``.

        Raises:
            EmbodrlError: there is no such decoding.
        """
        check_decoding(decoding, self.decodings, type(self.policy).__name__)
        seen, sources = self._conditioned(observation), generators or self.generators
        return self._predict(ActRequest(seen, MODES[decoding], False, sources, sampling, on_token))

    def continue_chunk(self, observation: Observation, prefix: ChunkPrefix, guidance: float) -> PolicyOutput:
        """Like ``decide`` with ``greedy``, continuing chunks that robots are executing: see ``VLAPolicy``."""
        with self._lock:
            self.onload()
            with torch.no_grad(), autocast(self.precision, self.device):
                actions = self.policy.continue_chunk(self._conditioned(observation), prefix, guidance)
            return PolicyOutput(actions, torch.zeros(actions.shape), None, {}, self.version)

    def values(self, observation: Observation) -> Tensor:
        """Return ``float32[B,K]`` on the CPU."""

        def compute(part: Observation) -> Tensor:
            with torch.no_grad(), autocast(self.precision, self.device):
                critic = own_critic(self.policy)
                values = self.policy.predict_values(part) if critic is None else critic(critic.inputs(part))
                return values.float().cpu()

        tasks = [lambda part=part: compute(part) for part in self._parts(self._conditioned(observation))]
        # Weights must not change within a batch.
        with self._lock:
            return torch.cat(on_threads(tasks, self.num_threads))

    def inputs(self, observation: Observation) -> dict[str, Tensor]:
        """Return the policy's inputs for observations (``VLAPolicy.preprocess``), on the CPU."""
        with self._lock:
            return {
                name: tensor.cpu() for name, tensor in self.policy.preprocess(self._conditioned(observation)).items()
            }

    def _conditioned(self, observation: Observation) -> Observation:
        self.policy.seen_state_dim = observation.state.shape[1]
        return condition_observation(observation, self.policy.condition)

    def _parts(self, observation: Observation) -> list[Observation]:
        rows = np.array_split(np.arange(observation.batch_size), min(self.num_threads, observation.batch_size))
        return [observation] if len(rows) == 1 else [observation.select(part) for part in rows]

    def _copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into the policy, except shared ones; the lock must be held."""
        # Tied weights appear under each of their names, as in the state_dict.
        mine = dict(self.policy.named_parameters(remove_duplicate=False))
        mine |= dict(self.policy.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in weights:
                if mine[name].data_ptr() != tensor.data_ptr():
                    mine[name].copy_(tensor)

    def random_state(self) -> list[str]:
        """Return the state of the generators, as text."""
        return [generator_state(generator) for generator in self.generators]

    def set_random_state(self, states: list[str]) -> None:
        """Restore a result of ``random_state``.

        Raises:
            ValueError: the number of threads differs.
        """
        for generator, state in zip(self.generators, states, strict=True):
            restore_generator(generator, state)
