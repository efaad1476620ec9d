"""Simulators of a pool that leave memory between phases and are restored bit-exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from embodrl.envs.pool.manager import EnvManager
from embodrl.errors import EnvError, EnvTimeout, EnvWorkerDied
from embodrl.processes.memory import resident_bytes

logger = logging.getLogger("embodrl.envs")


@dataclass(frozen=True)
class SimulatorMemory:
    """Memory of simulator processes, before and after.

    Attributes:
        before, after: resident bytes, summed over the processes; what they share counts in each.
    """

    before: int
    after: int


def resident(managers: Sequence[EnvManager]) -> int:
    """Return the resident bytes of all processes, summed."""
    return sum(resident_bytes(manager.pid) for manager in managers)


def onload(managers: Sequence[EnvManager], may_restart: Callable[[], bool]) -> None:
    """Bring back the simulators that are away, at the same time, in the states that they left in.

    What was lost meanwhile is a process, not a state: a process that does not come back is replaced by a new one.

    Args:
        managers: managers of a pool.
        may_restart: function that counts a restart; False once there were too many.

    Raises:
        EnvRaised: one refused its state; another process would as well.
        EnvWorkerDied, EnvTimeout: one did not come back, and there were too many restarts.
    """
    failed: dict[EnvManager, EnvError] = {}
    away = [manager for manager in managers if manager.is_offloaded]
    # All are asked before any is awaited, so that they start at the same time; an error must not leave the others
    # unasked.
    for manager in away:
        try:
            manager.start_async()
        except (EnvWorkerDied, EnvTimeout) as error:
            failed[manager] = error
    for manager in away:
        try:
            if manager in failed:
                raise failed[manager]
            manager.wait_started()
        except (EnvWorkerDied, EnvTimeout) as error:
            _restore_env(manager, error, may_restart)


def _restore_env(manager: EnvManager, error: EnvError, may_restart: Callable[[], bool]) -> None:
    while manager.is_offloaded:
        if not may_restart():
            raise type(error)(
                f"given up, no restarts are left: {error.message}", error.hint, code=error.code
            ) from error
        logger.warning("restart of an offloaded simulator process: %s", error.message)
        try:
            manager.start()
        except (EnvWorkerDied, EnvTimeout) as again:
            error = again
