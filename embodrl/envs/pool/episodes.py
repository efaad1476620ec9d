"""Episodes in progress in the environments of one manager: seeds, tasks and losses. Shapes: B environments."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.stepping import next_seed
from embodrl.errors import EnvOrderError
from embodrl.types import EnvSpec, EnvStep

SHOWN = 8


# Compared by identity: `==` of two arrays has no single truth value.
@dataclass(eq=False)
class EnvEpisodes:
    """A manager's record of its environments, which outlives their process; str() names them in messages.

    Attributes:
        name: manager name.
        env_type: name in the environment registry.
        first_env: index of the first environment in the whole run.
        auto_reset: the next episode begins where one has ended.
        found: EnvSpec of the environments; None before the first start.
        seeds: ``int64[B]``, -1 before the first episode.
        task_ids: ``int32[B]``.
        refused: ``int64[B]``, consecutive episodes lost to invalid values; see EnvPool.
        has_stepped: a chunk has succeeded in any process of this manager.
    """

    name: str
    env_type: str
    first_env: int
    auto_reset: bool
    found: EnvSpec | None = None
    seeds: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    task_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    refused: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    has_stepped: bool = False

    def __str__(self) -> str:
        text = f"env manager '{self.name}' ({self.env_type}"
        if self.found is None:
            return text + ")"
        last = self.first_env + self.found.num_envs - 1
        tasks = sorted({self.found.tasks[int(task)] for task in self.task_ids})
        seeds = [int(seed) for seed in self.seeds if seed >= 0]
        shown = ", ".join(map(str, seeds[:SHOWN])) + (", ..." if len(seeds) > SHOWN else "")
        return f"{text}, envs {self.first_env}-{last}, tasks {', '.join(tasks[:SHOWN])}, seeds {shown or 'none yet'})"

    @property
    def spec(self) -> EnvSpec:
        """EnvSpec of the environments, known from the first start on."""
        if self.found is None:
            raise EnvOrderError(f"{self} has not been started", "call start() first")
        return self.found

    def started(self, spec: EnvSpec) -> None:
        """Take over a started process's spec; a restarted process continues with the same episodes."""
        self.found = spec
        # A restarted process announces the same count; it is reset to the episodes recorded here.
        if len(self.seeds) != (batch := spec.num_envs):
            self.seeds = np.full(batch, -1, np.int64)
            self.task_ids = np.zeros(batch, np.int32)
            self.refused = np.zeros(batch, np.int64)

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64], task_ids: NDArray[np.int32]) -> None:
        """Record new episodes in ``rows``, in this process or in the next one."""
        self.seeds[rows] = seeds
        self.task_ids[rows] = task_ids

    def follow(self, step: EnvStep) -> None:
        """Update the episodes in progress from the outcome of a chunk."""
        # An environment that did not act in this chunk carries no information about its episode.
        seeded = (step.episode_seed >= 0) & step.valid[:, 0]
        self.seeds[seeded] = step.episode_seed[seeded]
        # The simulator numbers the episode after an auto-reset by the same rule, so that a restart repeats that very
        # episode.
        ended = np.flatnonzero(seeded & step.done & self.auto_reset)
        self.seeds[ended] = [next_seed(seed) for seed in self.seeds[ended].tolist()]
        self.task_ids[:] = step.observation.task_id
        self.has_stepped = True

    def again(self) -> NDArray[np.int64]:
        """Return ``int64[B]``: seeds for a restart, with defaults where no episode has begun yet."""
        # Numbered over the whole run, so that no two environments get the same episode.
        return np.where(self.seeds < 0, self.first_env + np.arange(len(self.seeds)), self.seeds)
