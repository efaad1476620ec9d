"""EnvManager: a VectorEnv in its own process.

Shapes: B environments, C actions in a chunk, A action dimensions. docs/env_manager.md explains the design.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.pool.episodes import SHOWN, EnvEpisodes
from embodrl.envs.pool.launch import Launch, ProcessLaunch
from embodrl.envs.pool.options import EnvTimeouts
from embodrl.envs.pool.process import SimulatorProcess
from embodrl.envs.pool.transport import ResultSlot, copy_observation, copy_step
from embodrl.errors import EnvError, EnvRaised
from embodrl.processes.frames import Kind
from embodrl.types import EnvSpec, EnvStep, Observation

if TYPE_CHECKING:
    from typing import Unpack  # not in Python 3.10, which simulators may use

    from embodrl.envs.pool.options import ProcessOptions


class EnvManager:
    """Runs a VectorEnv in its own process; observations and actions go through shared memory.

    Results are views of the shared memory, valid until the next but one result of this manager; ask for ``copy=True``
    to keep them longer. One request is in progress at a time, and only one thread may use a manager. After
    EnvWorkerDied or EnvTimeout the process is gone: ``restart`` and ``reset``. After EnvRaised it continues.

    Args:
        env_type: name in the environment registry.
        kwargs: keyword arguments of the VectorEnv, plain values only.
        name: name in messages and of the log file.
        first_env: index of its first environment in the whole run, for messages.
        launch: starts the child; None starts a process as configured by the options.
        options: see ``ProcessOptions``.

    Attributes:
        episodes: episodes in progress, whatever becomes of the process.
        lasting: requests that EnvPool repeats to a restarted process.
    """

    def __init__(
        self,
        env_type: str,
        kwargs: Mapping[str, object] | None = None,
        *,
        name: str = "env",
        first_env: int = 0,
        launch: Launch | None = None,
        **options: Unpack[ProcessOptions],
    ) -> None:
        kwargs = kwargs or {}
        self.name = name
        self.timeouts = options.get("timeouts") or EnvTimeouts()
        self._starts_with_auto_reset = bool(kwargs.get("auto_reset", True))
        self.episodes = EnvEpisodes(name, env_type, first_env, self._starts_with_auto_reset)
        launch = launch or ProcessLaunch.of(name, env_type, kwargs, **options)
        self.process = SimulatorProcess(launch, self.episodes, options.get("debug", False))
        self.lasting: dict[str, Mapping[str, object] | None] = {}

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> EnvSpec:
        """EnvSpec of the environment, known from the first start on."""
        return self.episodes.spec

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def start(self) -> None:
        """Start the process and wait until the environment is ready; after ``offload``, continue there bit-exactly.

        Raises EnvRaised, EnvWorkerDied or EnvTimeout if the start failed; it can be retried.
        """
        self.start_async()
        self.wait_started()

    def start_async(self) -> None:
        """Start the process, or bring back offloaded simulators, without waiting, to start several in parallel."""
        # If the process is alive, the simulator is rebuilt there; otherwise a new process starts and gets the state
        # once ready.
        if self.process.saved is not None and self.pid is not None:
            self.process.request(Kind.ONLOAD, self.timeouts.reset_s, value=self.process.saved)
            return
        self.process.start(self.timeouts.heartbeat_s)
        # A new process starts with its arguments' setting, whatever `set_auto_reset` changed in the previous one.
        self.episodes.auto_reset = self._starts_with_auto_reset

    def wait_started(self) -> None:
        """Wait until the environment is ready; after ``offload``, until its state is restored."""
        try:
            if self.process.pending == Kind.ONLOAD:
                # The simulator is rebuilt, so the start limit applies, not the reset limit.
                self.process.receive(Kind.ONLOAD, self.timeouts.start_s)
            else:
                self.process.wait_started(self.timeouts.start_s)
                if self.process.saved is not None:
                    self.set_state(self.process.saved)
        except EnvRaised:
            # It has no environments to answer with, and if kept would block the next start.
            self.process.drop()
            raise
        self.process.saved = None

    def restart(self) -> None:
        """Start a new process, whatever the state of the current one; its environments need a reset."""
        self.process.drop()
        # Otherwise the new process would be asked to continue from the abandoned process's state.
        self.process.saved = None
        self.start()

    @property
    def is_offloaded(self) -> bool:
        """Whether the simulators are offloaded."""
        return self.process.saved is not None

    def offload(self, end_process: bool = True) -> None:
        """Save the state and free the simulators; until ``start``, they accept no requests.

        ``end_process`` frees all memory of the process, once no view of a result is held; otherwise the process stays,
        with its loaded libraries, and comes back sooner.
        """
        if end_process:
            # Kept before the process ends: an interruption meanwhile must not lose it.
            self.process.saved = self.get_state()
            self.close()
        else:
            # Set last: while it is set, OFFLOAD would be refused.
            self.process.saved = self.process.state(Kind.OFFLOAD, self.timeouts.reset_s)

    def close_async(self) -> None:
        """Ask the process to end, or kill it if a request is in progress; ``close`` waits for it."""
        self.process.close_async(self.timeouts.reset_s)

    def close(self, deadline: float | None = None) -> None:
        """End the process; a pending request is abandoned.

        It is killed at ``deadline`` (``time.monotonic()``), by default after some seconds.
        """
        self.close_async()
        self.process.close(deadline)

    def __enter__(self) -> EnvManager:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return str(self.episodes)

    # -- simulation ---------------------------------------------------------------------------------------------------

    def reset(
        self,
        seeds: NDArray[np.int64],
        task_ids: NDArray[np.int32],
        indices: NDArray[np.int64] | None = None,
        *,
        copy: bool = False,
    ) -> Observation:
        """Start new episodes; arguments as in ``VectorEnv.reset``, all environments without ``indices``."""
        self.reset_async(seeds, task_ids, indices)
        return self.wait_reset(copy=copy)

    def reset_async(
        self, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], indices: NDArray[np.int64] | None = None
    ) -> None:
        """Request new episodes; ``wait_reset`` returns the observation."""
        batch = self.spec.num_envs
        rows = np.arange(batch, dtype=np.int64) if indices is None else np.asarray(indices, np.int64)
        count = len(rows)
        problem = None
        if not count or count > batch or rows.min() < 0 or rows.max() >= batch or len(set(rows.tolist())) < count:
            problem = f"cannot reset environments {rows.tolist()} of {batch}"
        elif np.shape(seeds) != (count,) or np.shape(task_ids) != (count,):
            problem = f"{count} seeds and task ids expected, got {np.shape(seeds)} and {np.shape(task_ids)}"
        elif np.min(task_ids) < 0 or np.max(task_ids) >= len(self.spec.tasks):
            problem = f"task ids {np.unique(task_ids).tolist()} for {len(self.spec.tasks)} tasks"
        if problem is not None:
            raise EnvError(f"{self}: {problem}", "pass each index once, with its seed and task id", code="env-reset")
        # Written before the frame is sent: the frame hands the memory over to the child.
        request = self.process.ring.request
        request["seeds"][:count] = seeds
        request["task_ids"][:count] = task_ids
        request["indices"][:count] = rows
        # Recorded before the request: if the process is lost, its successor is reset to these episodes.
        self.episodes.begin(rows, seeds, task_ids)
        self.process.request(Kind.RESET, self.timeouts.reset_s, count)

    def wait_reset(self, timeout: float | None = None, *, copy: bool = False) -> Observation:
        """Return the observation of all B environments after ``reset_async``."""
        timeout = self.timeouts.reset_s if timeout is None else timeout
        observation = self.process.result(Kind.RESET, timeout, lambda slot, _: slot.observation())
        return copy_observation(observation) if copy else observation

    def step_async(self, actions: NDArray[np.float32], active: NDArray[np.bool_] | None = None) -> None:
        """Send ``actions float32[B,C,A]``; environments where ``active bool[B]`` is False are not simulated."""
        spec = self.spec
        chunk = actions.shape[1] if actions.ndim == 3 else 0
        if not 1 <= chunk <= spec.max_chunk or actions.shape != (spec.num_envs, chunk, spec.action_dim):
            raise EnvError(
                f"{self}: actions of shape {list(actions.shape)}, expected "
                f"[{spec.num_envs}, 1 to {spec.max_chunk}, {spec.action_dim}]",
                "check model.num_action_chunks and model.action_dim",
                code="actions-shape",
            )
        # Rows that do not act may hold any values.
        acted = actions if active is None else actions[active]
        if not np.isfinite(acted).all():
            broken = np.flatnonzero(~np.isfinite(actions).all(axis=(1, 2)) & (True if active is None else active))
            raise EnvError(
                f"the policy returned non-finite actions for environments"
                f" {', '.join(str(self.episodes.first_env + row) for row in broken[:SHOWN].tolist())}",
                "its weights or action statistics are broken: check the checkpoint, and the loss and gradient norm of"
                " the last iterations",
                code="actions-not-finite",
            )
        request = self.process.ring.request
        request["actions"][:, :chunk] = actions
        request["active"][:] = True if active is None else active
        self.process.request(Kind.STEP, self.timeouts.reset_s, chunk)

    def wait(self, timeout: float | None = None, *, copy: bool = False) -> EnvStep:
        """Return the outcome of ``step_async``, in private memory with ``copy``; raises as described for the class.

        ``timeout`` is in seconds from now; None uses ``timeouts.step_s``.
        """
        step = self.process.result(Kind.STEP, self.timeouts.step_s if timeout is None else timeout, ResultSlot.step)
        self.episodes.follow(step)
        return copy_step(step) if copy else step

    def step(
        self, actions: NDArray[np.float32], active: NDArray[np.bool_] | None = None, *, copy: bool = False
    ) -> EnvStep:
        """Execute a chunk and wait for it."""
        self.step_async(actions, active)
        return self.wait(copy=copy)

    def get_state(self) -> bytes:
        return self.process.state(Kind.GET_STATE, self.timeouts.reset_s)

    def set_state(self, state: bytes) -> None:
        """Continue bit-exactly from a state of ``get_state``."""
        self.process.request(Kind.SET_STATE, self.timeouts.reset_s, value=state)
        # A simulator may have to be rebuilt and replayed.
        self.process.receive(Kind.SET_STATE, self.timeouts.start_s)

    def call(self, method: str, arguments: Mapping[str, object] | None = None, timeout: float | None = None) -> object:
        """Return the answer of ``VectorEnv.call``; plain values and numeric arrays in both directions."""
        self.call_async(method, arguments)
        return self.wait_call(method, timeout)

    def call_async(self, method: str, arguments: Mapping[str, object] | None = None) -> None:
        """Send a request of ``VectorEnv.call``; ``wait_call`` returns the answer."""
        self.process.request(
            Kind.CALL, self.timeouts.reset_s, value={"method": method, "arguments": dict(arguments or {})}
        )
        # Recorded when sent: if the process is lost first, its successor gets the request again (``lasting``).
        if method == "set_auto_reset":
            self.episodes.auto_reset = bool((arguments or {}).get("value", self.episodes.auto_reset))

    def wait_call(self, method: str, timeout: float | None = None) -> object:
        """Return the answer to ``call_async``; ``method`` is for messages."""
        return self.process.receive(Kind.CALL, self.timeouts.reset_s if timeout is None else timeout, method).value
