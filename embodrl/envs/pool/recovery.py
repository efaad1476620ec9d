"""Recovery of a pool's failed managers: restarts them, ends their episodes, and counts losses.

Shapes: B environments of a manager, C actions in a chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.pool.faults import Bounds, FaultCounts, clear_frames, count_invalid, lost_step, terminate_invalid
from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.transport import copy_observation, copy_step
from embodrl.errors import EnvError, EnvRaised, EnvTimeout, EnvWorkerDied
from embodrl.processes.restarts import RestartBudget
from embodrl.types import EnvStep, Observation

logger = logging.getLogger("embodrl.envs")

FAULTS = (EnvRaised, EnvWorkerDied, EnvTimeout)


class Recovery:
    """Restarts managers and ends lost episodes; see ``EnvPool``.

    Attributes:
        max_restarts: maximum consecutive episodes of one environment lost to invalid values.
        failed: pending fault of a manager, by rank, to be raised in place of its next answer.
        last: newest good observation of each manager.
    """

    def __init__(
        self,
        managers: Sequence[EnvManager],
        max_restarts: int,
        faults: FaultCounts,
        bounds: Bounds,
        budget: RestartBudget,
    ) -> None:
        self.managers = managers
        self.max_restarts = max_restarts
        self.faults = faults
        self.bounds = bounds
        self.budget = budget
        self.failed: dict[int, EnvError] = {}
        self.last: list[Observation | None] = [None] * len(managers)

    def keep_last(self) -> None:
        """Copy the last observations out of memory that is about to be freed."""
        self.last = [observation and copy_observation(observation) for observation in self.last]

    def send_reset(
        self, rank: int, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], rows: NDArray[np.int64]
    ) -> None:
        """Request new episodes from a manager; a fault is kept for ``raise_failed``."""
        manager = self.managers[rank]
        if rank in self.failed:  # its episodes after the restart
            manager.episodes.begin(rows, seeds, task_ids)
            return
        try:
            manager.reset_async(seeds, task_ids, rows)
        except FAULTS as error:
            self.failed[rank] = error

    def raise_failed(self, rank: int) -> None:
        """Raise a manager's pending fault, if any."""
        # Raised once: its successor has not failed.
        error = self.failed.pop(rank, None)
        if error is not None:
            raise error

    def checked(self, manager: EnvManager, observation: Observation) -> Observation:
        """Return the observation after a reset; raise if it is invalid."""
        if self.bounds.broken_states(observation).any():
            raise EnvRaised(
                f"{manager}: the state after a reset is not finite or beyond env.max_abs_state={self.bounds.state:g}",
                "look at the simulator, or raise env.max_abs_state",
            )
        return observation

    def may_restart(self) -> bool:
        """Count a restart; return False once the limit is reached."""
        allowed = self.budget.take()
        if allowed:
            self.faults.count("restarts")
        return allowed

    def restart(self, rank: int, error: EnvError) -> Observation:
        """Restart a manager and reset it to its seeds; raise once ``max_restarts`` are used up."""
        manager = self.managers[rank]
        if isinstance(error, EnvRaised) and not manager.episodes.has_stepped:
            raise error  # faulty code, not a rare fault: a new process would raise again
        while True:
            if not self.may_restart():
                raise type(error)(
                    f"stopped after {self.budget} (env.max_restarts), rank {rank} of"
                    f" {len(self.managers)}: {error.message}",
                    error.hint,
                ) from error
            logger.warning("restart %s: %s", self.budget.used, error.message)
            # The frames hold views of the old shared memory, which would stay mapped during the restart.
            clear_frames(error)
            try:
                manager.restart()
                # Before the reset, so that they hold from the first episode on.
                for method, arguments in manager.lasting.items():
                    manager.call(method, arguments)
                return self.checked(manager, manager.reset(manager.episodes.again(), manager.episodes.task_ids.copy()))
            except FAULTS as again:
                error = again

    def lost_step(self, rank: int, error: EnvError, active: NDArray[np.bool_], chunk: int) -> EnvStep:
        """Restart a manager, by rank, and return the outcome of its unfinished chunk of ``active bool[B]``."""
        last = self.last[rank]
        # The observation is a view of the old process's memory; a copy does not hold that memory.
        last = None if last is None else copy_observation(last)
        observation = copy_observation(self.restart(rank, error))
        rows = np.flatnonzero(active)
        self.faults.count("lost_episodes", len(rows))
        return lost_step(observation, self.managers[rank].episodes.seeds, chunk, rows, last)

    def quarantine(self, rank: int, step: EnvStep) -> EnvStep:
        """End the episodes of environments with an invalid reward or state, and reset those environments."""
        manager = self.managers[rank]
        last = self.last[rank]
        place = f"rank {rank} of {len(self.managers)}"
        rows = count_invalid(manager.episodes, step, self.bounds, self.max_restarts, place)
        if not len(rows):
            return step
        # The reset below writes its result into the slot that this step is a view of.
        step = copy_step(step)
        last = None if last is None else copy_observation(last)
        # Not the episode begun by an auto-reset: the one that ends here is repeated.
        seeds = np.where(step.episode_seed < 0, manager.episodes.again(), step.episode_seed)
        manager.process.replace_result()  # the observation before the step stays valid
        again = manager.reset(seeds[rows], manager.episodes.task_ids[rows], rows)
        step.observation = copy_observation(self.checked(manager, again))
        terminate_invalid(step, rows, last)
        self.faults.count("lost_episodes", len(rows))
        self.faults.count("quarantined", len(rows))
        return step
