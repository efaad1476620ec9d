"""Offloading of a pool's simulators between phases, with bit-exact restoration."""

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
    """Resident bytes before and after, summed over the simulator processes; shared pages count in each."""

    before: int
    after: int


def resident(managers: Sequence[EnvManager]) -> int:
    """Return the resident bytes of all processes, summed."""
    return sum(resident_bytes(manager.pid) for manager in managers)


def onload(managers: Sequence[EnvManager], may_restart: Callable[[], bool]) -> None:
    """Bring back offloaded simulators in parallel, in the states they were saved in.

    Only processes can be lost meanwhile, not states: a process that does not come back is replaced.

    Args:
        managers: managers of a pool.
        may_restart: counts a restart; False once the limit is reached.

    Raises:
        EnvRaised: a simulator rejected its state; another process would as well.
        EnvWorkerDied, EnvTimeout: a process did not come back, and the restart limit is reached.
    """
    failed: dict[EnvManager, EnvError] = {}
    away = [manager for manager in managers if manager.is_offloaded]
    # All are asked before any is awaited, so that they start in parallel; an error must not leave the others unasked.
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
