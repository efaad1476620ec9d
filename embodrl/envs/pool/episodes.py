"""The episodes in progress in the environments of one manager: their seeds, tasks and losses.

Shapes: B environments.
"""

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
    """What a manager knows of its environments whatever becomes of their process; as text, it names them in messages.

    Attributes:
        name: name of the manager.
        env_type: a name of the environment registry.
        first_env: number of the first environment in the whole run.
        auto_reset: the next episode begins where one has ended.
        found: what the environments offer; None before the first start.
        seeds: ``int64[B]``, -1 before the first episode.
        task_ids: ``int32[B]``.
        refused: ``int64[B]``, consecutive episodes that were lost to invalid values; see EnvPool.
        has_stepped: a chunk has worked, in any process of this manager.
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
        """What the environments offer; known from the first start on."""
        if self.found is None:
            raise EnvOrderError(f"{self} has not been started", "call start() first")
        return self.found

    def started(self, spec: EnvSpec) -> None:
        """Take what a process has announced; a process after the first continues with the same episodes."""
        self.found = spec
        # A restarted process announces the same number; the episodes known here are the ones that it is reset to.
        if len(self.seeds) != (batch := spec.num_envs):
            self.seeds = np.full(batch, -1, np.int64)
            self.task_ids = np.zeros(batch, np.int32)
            self.refused = np.zeros(batch, np.int64)

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64], task_ids: NDArray[np.int32]) -> None:
        """New episodes begin in ``rows``, in this process or in the next one."""
        self.seeds[rows] = seeds
        self.task_ids[rows] = task_ids

    def follow(self, step: EnvStep) -> None:
        """Take from the outcome of a chunk which episodes are in progress after it."""
        # An environment that did not act in this chunk has no information about its episode.
        seeded = (step.episode_seed >= 0) & step.valid[:, 0]
        self.seeds[seeded] = step.episode_seed[seeded]
        # The simulator numbers the episode after an auto-reset by the same rule, so that a restart repeats that very
        # episode.
        ended = np.flatnonzero(seeded & step.done & self.auto_reset)
        self.seeds[ended] = [next_seed(seed) for seed in self.seeds[ended].tolist()]
        self.task_ids[:] = step.observation.task_id
        self.has_stepped = True

    def again(self) -> NDArray[np.int64]:
        """Return ``int64[B]``: the seeds of the episodes, or some where none has begun yet."""
        # Numbered over the whole run, so that no two environments get the same episode.
        return np.where(self.seeds < 0, self.first_env + np.arange(len(self.seeds)), self.seeds)
