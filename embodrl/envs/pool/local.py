"""LocalPool: an environment pool over simulators in this process, for tests and debuggers.

Everything a pool does is unchanged (views of results, lost episodes, restarts, snapshots), but nothing starts, hangs or
dies: a "process" is an object that builds its environments at each start and answers on request.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from embodrl.envs.base import VectorEnv
from embodrl.envs.pool.faults import Bounds
from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.pool.worker_main import HostedEnv
from embodrl.processes.frames import Frame, Kind, PeerGoneError
from embodrl.processes.serve import describe_error


class LocalChild:
    """Answers a manager's frames immediately, in this process; replaces ``ChildProcess``."""

    log_path: Path | None = None

    def __init__(self, hosted: HostedEnv) -> None:
        self.hosted = hosted
        self.connection = self
        self.pid = os.getpid()
        # A process answers START unasked, as soon as its environments are built; so does this object.
        self._answer = self._carry_out(Frame(Kind.START))

    def _carry_out(self, frame: Frame) -> Frame:
        try:
            return Frame(Kind.OK, frame.number, frame.argument, self.hosted.carry_out(frame))
        except PeerGoneError:
            # Tests simulate the death of a process by this error, so it must not become an answer.
            raise
        except Exception as error:  # noqa: BLE001 - like a process boundary; the manager raises it
            return Frame(Kind.RAISED, frame.number, frame.argument, describe_error(error))

    def send(self, frame: Frame, deadline: float | None = None) -> None:
        self._answer = self._carry_out(frame)

    def receive(self, deadline: float | None = None) -> Frame:
        return self._answer

    def exit_reason(self) -> str:
        return "was given up"

    def log_tail(self) -> str:
        return ""

    def dump_stack(self) -> None:
        """Nothing to dump: there is no other process."""

    def wait_ended(self, grace_s: float) -> bool:
        return True

    def end_group(self) -> int:
        return 0

    def kill(self) -> None:
        env = self.hosted.env
        # Cleared first, so that a second call does not close it again.
        self.hosted.env = None
        if env is not None:
            env.close()


class LocalLaunch:
    """Builds environments in this process with the factory ``make``."""

    interpreter = sys.executable

    def __init__(self, make: Callable[[], VectorEnv]) -> None:
        self._make = make
        self.child: LocalChild | None = None

    def __call__(self, memory_fd: int, heartbeat_s: float) -> LocalChild:
        self.child = LocalChild(HostedEnv(self._make, memory_fd))
        return self.child


class LocalPool(EnvPool):
    """An ``EnvPool`` whose simulators live in this process; one that raises PeerGoneError counts as dead.

    ``make`` returns a VectorEnv for the keyword arguments ``kwargs``, for example its class; there are
    ``num_simulators`` of them, the "processes" of the pool.
    """

    def __init__(
        self,
        make: Callable[..., VectorEnv],
        kwargs: Mapping[str, object] | None = None,
        num_simulators: int = 1,
        max_restarts: int = 3,
        bounds: Bounds | None = None,
    ) -> None:
        given = dict(kwargs or {})
        self._launches = [LocalLaunch(lambda: make(**given)) for _ in range(num_simulators)]
        managers = [
            EnvManager("local", given, name=f"local/{rank}", launch=launch)
            for rank, launch in enumerate(self._launches)
        ]
        super().__init__(managers, max_restarts=max_restarts, bounds=bounds)

    @property
    def envs(self) -> list[VectorEnv]:
        """The current environments of each simulator; a restart replaces them."""
        hosted = [launch.child.hosted for launch in self._launches if launch.child is not None]
        return [one.env for one in hosted if one.env is not None]
