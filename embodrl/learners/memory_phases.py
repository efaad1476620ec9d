"""Device memory between the phases of a run: rollout tensors leave while the policy trains, and vice versa."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from embodrl.config.schema import Config
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.processes.trace import record
from embodrl.workers.rollout_backend import RolloutBackend

logger = logging.getLogger(__name__)

MIB = 2**20
TRAIN_ROLES = frozenset({"reference", "proximal", "train"})
"""Roles of pipeline nodes that compute with the train engine."""


def peak_memory(engine: TrainEngine) -> dict[str, float]:
    """Return ``memory/gpu_peak_mib`` since the last call; empty on a CPU. See ``TrainEngine.take_peak_memory``."""
    peak = engine.take_peak_memory()
    return {} if peak is None else {"memory/gpu_peak_mib": peak / MIB}


class MemoryPhases:
    """Frees memory between phases according to ``actor``, ``rollout`` and ``env.enable_offload``, and measures it.

    The loop enters ``act`` before rollouts and evaluations, ``train`` before the first node that trains, and ``rest``
    after updates and checkpoints. Offloaded tensors return by themselves when requested; entering a phase does so at
    the right time and all at once.
    """

    def __init__(self, config: Config, rollouts: RolloutBackend, engine: TrainEngine) -> None:
        self._actor = config.actor.enable_offload
        self._env = config.env.enable_offload
        self._rollout = config.rollout.enable_offload
        self._ends_processes = config.env.offload_level == "process"
        self._rollouts = rollouts
        self._engine = engine
        self._figures: dict[str, float] = {}
        self._acts = True

    def enter(self, phase: Literal["act", "train", "rest"]) -> None:
        """Free the memory that this phase does not need, then bring back the rest."""
        if phase == "act":
            self._acts = True
            with self._timed("time/onload_s"):
                self._rollouts.onload()
        elif phase == "rest":
            with self._timed("time/offload_s"):
                report = self._engine.offload() if self._actor else None
            if report is not None:
                logger.info("offloaded for rollouts: %s", self._noted("actor", report))
        elif self._acts:
            self._acts = False
            freed: list[str] = []
            with self._timed("time/offload_s"):
                if self._rollout and (report := self._rollouts.offload_policies()) is not None:
                    freed.append(self._noted("rollout", report))
                memory = self._rollouts.offload_simulators(self._ends_processes) if self._env else None
                if memory is not None:
                    freed.append(self._figure("env", memory.before, memory.after))
            if freed:
                logger.info("offloaded for training: %s", ", ".join(freed))

    def take_metrics(self) -> dict[str, float]:
        """Return the figures since the last call: ``memory/..._mib`` before and after, and seconds spent."""
        figures = self._figures
        self._figures = {}
        return figures

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._actor or self._rollout or self._env:
            now = time.perf_counter()
            self._figures[name] = self._figures.get(name, 0.0) + now - start
            record(name, start, now)

    def _noted(self, name: str, report: OffloadReport) -> str:
        return f"{self._figure(name, report.before, report.after)} on {report.device}"

    def _figure(self, name: str, before: int, after: int) -> str:
        self._figures |= {f"memory/{name}_before_mib": before / MIB, f"memory/{name}_after_mib": after / MIB}
        return f"{name} {before / MIB:.1f} -> {after / MIB:.1f} MiB"
