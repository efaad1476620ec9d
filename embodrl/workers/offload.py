"""Memory between the phases of a run: what acts leaves while the policy trains, and what trains while it acts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodrl.algorithms.advantages import Advantages
from embodrl.config.schema import AlgorithmConfig, Config
from embodrl.data.batch import Batch
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.hybrid_engines.base import EngineState, TrainEngine
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine
from embodrl.workers.actor import GroupTrainEngine
from embodrl.workers.rollouts import Rollouts

logger = logging.getLogger(__name__)

MIB = 2**20


class PhaseOffload:
    """Frees memory at the borders of phases, as ``actor``, ``rollout`` and ``env.enable_offload`` say, and tells of it.

    Whoever is asked while it is away comes back by itself; here it is done in time, all at once, and measured.

    Args:
        config: the run.
        rollouts: prepared.
        engine: trains.

    Attributes:
        engine: to be used by the nodes of a pipeline: the same one, which frees what acts before it begins.
    """

    def __init__(self, config: Config, rollouts: Rollouts, engine: TrainEngine) -> None:
        self._actor, self._env = config.actor.enable_offload, config.env.enable_offload
        self._rollout = config.rollout.enable_offload
        self._ends_processes = config.env.offload_level == "process"
        self._rollouts, self._trains = rollouts, engine
        self._figures: dict[str, float] = {}
        self._acts = True
        self.engine = _PhasedEngine(engine, self.begin_training) if self._env or self._rollout else engine
        if isinstance(engine, GroupTrainEngine):
            engine.before_use = rollouts.onload_policy
        elif isinstance(engine, PolicyTrainEngine):
            rollouts.trainer = engine

    def begin_training(self) -> None:
        """Free what only acting needs, once a phase."""
        if not self._acts:
            return
        self._acts = False
        told: list[str] = []
        with self._timed("time/offload_s"):
            if self._rollout:
                told += self._note("rollout", self._rollouts.offload_policies())
            memory = self._rollouts.offload_simulators(self._ends_processes) if self._env else None
            told += [] if memory is None else [self._figure("env", memory.before, memory.after)]
        if told:
            logger.info("offloaded for training: %s", ", ".join(told))

    def end_training(self) -> dict[str, float]:
        """Free what only training needs; return the figures since the last time."""
        with self._timed("time/offload_s"):
            report = self._trains.offload() if self._actor else None
        if told := self._note("actor", report):
            logger.info("offloaded for rollouts: %s", ", ".join(told))
        figures, self._figures = self._figures, {}
        return figures

    def begin_acting(self) -> None:
        """Bring back what acting needs."""
        self._acts = True
        with self._timed("time/onload_s"):
            self._rollouts.onload()

    def finish(self) -> None:
        """Bring back the policy, of which others take a copy; the simulators stay where they are."""
        self._rollouts.onload_policy()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._actor or self._rollout or self._env:
            self._figures[name] = self._figures.get(name, 0.0) + time.perf_counter() - start

    def _note(self, name: str, report: OffloadReport | None) -> list[str]:
        if report is None:
            return []
        return [f"{self._figure(name, report.before, report.after)} on {report.device}"]

    def _figure(self, name: str, before: int, after: int) -> str:
        self._figures |= {f"memory/{name}_before_mib": before / MIB, f"memory/{name}_after_mib": after / MIB}
        return f"{name} {before / MIB:.1f} -> {after / MIB:.1f} MiB"


class _PhasedEngine(TrainEngine):
    """A train engine that tells before it computes.

    Args:
        engine: does the work.
        begin: called before.
    """

    def __init__(self, engine: TrainEngine, begin: Callable[[], None]) -> None:
        self._engine, self._begin = engine, begin

    @property
    def version(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See TrainEngine."""
        return self._engine.version

    def update(
        self, batch: TrajectoryBatch, advantages: Advantages, algorithm: AlgorithmConfig, generator: torch.Generator
    ) -> dict[str, float]:
        self._begin()
        return self._engine.update(batch, advantages, algorithm, generator)

    def imitate(self, batch: Batch, learning_rate: float, label_smoothing_bins: float) -> dict[str, float]:
        self._begin()
        return self._engine.imitate(batch, learning_rate, label_smoothing_bins)

    def reference_logprobs(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
        self._begin()
        return self._engine.reference_logprobs(batch, algorithm)

    def proximal(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor | None]:
        self._begin()
        return self._engine.proximal(batch, algorithm)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._engine.weights()

    def fetch(self) -> None:
        self._engine.fetch()

    def state_dict(self) -> EngineState:
        return self._engine.state_dict()

    def load_state_dict(self, saved: EngineState) -> None:
        self._engine.load_state_dict(saved)

    def counters(self) -> dict[str, Any]:
        return self._engine.counters()

    def save_shards(self, directory: Path) -> dict[str, dict[str, Any]]:
        return self._engine.save_shards(directory)

    def load_shards(self, directory: Path, counters: Mapping[str, Any]) -> None:
        self._engine.load_shards(directory, counters)

    def state_num_bytes(self) -> int:
        return self._engine.state_num_bytes()

    def check(self) -> None:
        self._engine.check()

    def close(self) -> None:
        self._engine.close()

    def offload(self) -> OffloadReport | None:
        return self._engine.offload()
