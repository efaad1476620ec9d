"""EnvPool: several EnvManagers as one batch of environments, with recovery from their failures.

Shapes: B environments over all managers, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.pool.faults import Bounds, FaultCounts
from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.offload import SimulatorMemory, onload, resident
from embodrl.envs.pool.options import ManagerOptions, RemoteEnv
from embodrl.envs.pool.recovery import FAULTS, Recovery
from embodrl.envs.pool.requests import Requests
from embodrl.envs.pool.saved import pack_states, unpack_states
from embodrl.envs.pool.transport import NUM_SLOTS, ResultSlot, copy_observation, copy_step
from embodrl.errors import EnvError, EnvOrderError, EnvRaised
from embodrl.processes.ending import closing_grace_s
from embodrl.processes.restarts import WINDOW_S, RestartBudget
from embodrl.types import EnvSpec, EnvStep, Observation

if TYPE_CHECKING:
    from typing import Unpack  # not in Python 3.10, which simulators may use


class EnvPool:
    """Several EnvManagers as one batch, with rows in the order of the managers.

    A manager whose process dies, hangs or raises is restarted and reset to its seeds, and its episodes in progress end:
    the chunk is not valid, ``truncated`` at its first action, and the final observation is the last good one. A single
    environment with a non-finite or out-of-bounds reward or state is handled the same way. Both are counted in
    ``faults``. The error is raised once ``max_restarts`` are used up, or once that many consecutive episodes of one
    environment are lost to invalid values.

    Results are valid until the next but one result of the pool; ask for ``copy=True`` to keep them longer.

    Args:
        managers: managers, equal except for their number of environments.
        max_restarts: process restarts of the pool and its parts within ``restart_window_s``; also consecutive episodes
            of one environment lost to invalid values.
        faults: counters to add to.
        bounds: bounds of rewards and states.
        restart_window_s: seconds.
        budget: restart budget, shared with other pools; None makes one.

    Attributes:
        keeps_state: its simulators can save their state; set by the caller of ``check_state``.
    """

    def __init__(
        self,
        managers: Sequence[EnvManager],
        *,
        max_restarts: int = 3,
        faults: FaultCounts | None = None,
        bounds: Bounds | None = None,
        restart_window_s: float = WINDOW_S,
        budget: RestartBudget | None = None,
    ) -> None:
        if not managers:
            raise EnvError("a pool needs at least one manager", code="pool-layout")
        self.managers = tuple(managers)
        budget = budget or RestartBudget(max_restarts, restart_window_s)
        self.recovery = Recovery(self.managers, max_restarts, faults or FaultCounts(), bounds or Bounds(), budget)
        self.requests = Requests(self.recovery)
        self.keeps_state = True
        self._spec: EnvSpec | None = None
        self._offsets: list[int] = []
        self._batch: list[ResultSlot] = []
        self._parts: list[list[ResultSlot]] = []
        self._turn = 0
        self._active: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._chunk = 0

    @staticmethod
    def create(
        env_type: str,
        kwargs: Mapping[str, object],
        *,
        total_num_envs: int,
        num_processes: int,
        shard_kwargs: Sequence[Mapping[str, object]] | None = None,
        cpus: Sequence[int | None] | None = None,
        numa_nodes: Sequence[int | None] | None = None,
        environs: Sequence[Mapping[str, str]] | None = None,
        remotes: Sequence[RemoteEnv] | None = None,
        name: str = "env",
        max_restarts: int = 3,
        bounds: Bounds | None = None,
        restart_window_s: float = WINDOW_S,
        **manager_options: Unpack[ManagerOptions],
    ) -> EnvPool:
        """Return a pool of equal shards, not yet started; arguments not listed are explained at the class.

        ``kwargs`` are keyword arguments of every VectorEnv (``num_envs`` is added), ``shard_kwargs`` extra ones per
        process (e.g. seeds). ``num_processes`` must divide ``total_num_envs``. ``cpus``, ``numa_nodes``, ``environs``
        (environment variables) and ``remotes`` (servers) have one entry per process; None binds none, or stays on this
        machine. Managers are named ``<name>/<number>`` and get ``manager_options``.
        """
        if total_num_envs % num_processes:
            raise EnvError(
                f"{total_num_envs} environments cannot be spread evenly over {num_processes} processes",
                "make total_num_envs a multiple of env.num_processes",
                code="pool-layout",
            )
        size = total_num_envs // num_processes
        shared: Mapping[str, str] = manager_options.get("environ") or {}
        options: list[ManagerOptions] = [
            {**manager_options, "environ": {**shared, **(environs[rank] if environs else {})}}
            for rank in range(num_processes)
        ]
        managers = [
            EnvManager(
                env_type,
                {**kwargs, "num_envs": size, **(shard_kwargs[rank] if shard_kwargs else {})},
                name=f"{name}/{rank}",
                cpu=cpus[rank] if cpus else None,
                numa_node=numa_nodes[rank] if numa_nodes else None,
                first_env=rank * size,
                remote=remotes[rank] if remotes else None,
                **options[rank],
            )
            for rank in range(num_processes)
        ]
        return EnvPool(managers, max_restarts=max_restarts, bounds=bounds, restart_window_s=restart_window_s)

    @property
    def faults(self) -> FaultCounts:
        return self.recovery.faults

    @property
    def spec(self) -> EnvSpec:
        """EnvSpec of the whole batch; EnvError if not started, or if the managers disagree."""
        if self._spec is None:
            specs = [manager.spec for manager in self.managers]
            counts = [spec.num_envs for spec in specs]
            # Equal except for their number of environments: rows of all managers share one batch.
            if any(replace(spec, num_envs=counts[0]) != specs[0] for spec in specs):
                raise EnvError(
                    "the environments of a pool differ in cameras, state, actions or tasks",
                    "use two pools",
                    code="pool-layout",
                )
            self._spec = replace(specs[0], num_envs=sum(counts))
            self._offsets = np.cumsum([0, *counts]).tolist()
            # A single manager returns its own views; several are gathered by a copy.
            if len(self.managers) > 1:
                self._batch = [ResultSlot.allocate(self._spec) for _ in range(NUM_SLOTS)]
                borders = list(itertools.pairwise(self._offsets))
                self._parts = [[slot.rows(start, stop) for start, stop in borders] for slot in self._batch]
        return self._spec

    def start(self) -> None:
        """Start all processes in parallel and wait until they are ready; after ``offload``, continue there."""
        self.start_async()
        self.wait_started()

    def start_async(self) -> None:
        """Start all processes without waiting; see ``wait_started``."""
        try:
            for manager in self.managers:
                manager.start_async()
        except EnvError:
            # Started processes must not outlive a pool that failed to start.
            self.close()
            raise

    def wait_started(self) -> None:
        """Wait until all processes are ready."""
        try:
            for manager in self.managers:
                manager.wait_started()
            self.requests.ask_again(range(len(self.managers)))
        except EnvError:
            self.close()
            raise

    def split(self, num_parts: int) -> list[EnvPool]:
        """Return pools of contiguous managers, e.g. one per pipeline stage; they share ``faults`` with this pool."""
        if num_parts < 1 or len(self.managers) % num_parts:
            raise EnvError(
                f"{len(self.managers)} env processes cannot form {num_parts} stages",
                "make env.num_processes a multiple of rollout.pipeline_stages",
                code="pool-layout",
            )
        again = self.recovery
        # The restart budget is shared: env.max_restarts bounds the run, whatever its number of stages.
        size = len(self.managers) // num_parts
        parts = (self.managers[start : start + size] for start in range(0, len(self.managers), size))
        return [
            EnvPool(
                part, max_restarts=again.max_restarts, faults=again.faults, bounds=again.bounds, budget=again.budget
            )
            for part in parts
        ]

    def close(self) -> None:
        """End all processes; several hanging ones take no longer than one."""
        # All are asked before any is awaited, and under one deadline: several that hang cost the time of one.
        for manager in self.managers:
            manager.close_async()
        deadline = time.monotonic() + closing_grace_s()
        for manager in self.managers:
            manager.close(deadline)

    def offload(self, end_processes: bool = True) -> SimulatorMemory | None:
        """Save the states and free the simulators; the next request, or ``onload``, brings them back.

        A dead process is restarted first, as between episodes. Returns None if all are already offloaded.
        """
        ranks = [rank for rank, manager in enumerate(self.managers) if not manager.is_offloaded]
        before = resident(self.managers)
        for rank in ranks:
            self.requests.answer(rank, lambda manager: manager.offload(end_processes), restart=True)
        # The last observations are views, which would keep the memory of an ended process alive.
        self.recovery.keep_last()
        return SimulatorMemory(before, resident(self.managers)) if ranks else None

    def onload(self) -> None:
        """Bring back offloaded simulators; see ``envs.offload.onload``."""
        away = [rank for rank, manager in enumerate(self.managers) if manager.is_offloaded]
        onload(self.managers, self.recovery.may_restart)
        self.requests.ask_again(away)

    def get_state(self, *, restart: bool = False) -> list[bytes]:
        """Return the state of every manager, with its EnvSpec; ``restart`` as in ``call``."""
        self.onload()
        states = [self.requests.answer(rank, EnvManager.get_state, restart) for rank in range(len(self.managers))]
        return pack_states([manager.spec for manager in self.managers], states)

    def set_state(self, states: Sequence[bytes]) -> None:
        """Continue bit-exactly from states of ``get_state``; a dead process is restarted first.

        Raises CheckpointError if the states are of other environments.
        """
        self.onload()
        fitting = unpack_states([manager.spec for manager in self.managers], states)
        for rank, state in enumerate(fitting):
            self.requests.answer(rank, lambda manager, state=state: manager.set_state(state), restart=True)

    def call(
        self, method: str, arguments: Mapping[str, object] | None = None, *, restart: bool = False
    ) -> list[object]:
        """Return the answer of every manager to the request ``method`` of ``VectorEnv.call``; they work in parallel.

        ``restart`` restarts a dead or hanging process and repeats the request; only between episodes, since episodes in
        progress start again without notice.
        """
        self.onload()
        return self.requests.ask_all(method, arguments, restart)

    def call_one(self, rank: int, method: str, arguments: Mapping[str, object] | None = None) -> object:
        """Like ``call``, for one manager. If its process is lost, the next step or reset restarts it."""
        return self.requests.ask(rank, method, arguments)

    def get_row_states(self, rows: Sequence[int]) -> dict[int, object]:
        """Return the states of single environments by row, omitting those of a lost process.

        The next step or reset restarts such a process.
        """
        return self.requests.ask_rows("get_row_state", {row: {} for row in rows}, self._offsets)

    def set_row_states(self, states: Mapping[int, object]) -> dict[int, object]:
        """Continue each row from a state of ``get_row_states``, possibly of another row; return the answers by row.

        The next step or reset restarts a lost process, all of whose episodes then start again.
        """
        asked = {row: {"state": state} for row, state in states.items()}
        return self.requests.ask_rows("set_row_state", asked, self._offsets)

    def expert_reset(self, rows: NDArray[np.int64]) -> None:
        """Start scripted experts in ``rows``, whose episodes have just begun.

        Raises EnvWorkerDied or EnvTimeout if a process was lost; the next step or reset restarts it.
        """
        size = self.spec.num_envs // len(self.managers)
        for rank in range(len(self.managers)):
            mine = rows[(rows >= rank * size) & (rows < (rank + 1) * size)] - rank * size
            if len(mine):
                self.call_one(rank, "expert_reset", {"rows": mine.tolist()})

    def expert_actions(self) -> NDArray[np.float32]:
        """Return the scripted experts' actions, ``float32[B,A]``; EnvRaised if the environment returns others."""
        parts: list[NDArray[np.float32]] = []
        for manager, answer in zip(self.managers, self.call("expert_actions"), strict=True):
            shape = (manager.spec.num_envs, manager.spec.action_dim)
            if not isinstance(answer, np.ndarray) or answer.shape != shape or answer.dtype.kind != "f":
                found = (
                    f"{answer.dtype}{list(answer.shape)}" if isinstance(answer, np.ndarray) else type(answer).__name__
                )
                raise EnvRaised(
                    f"{manager}: expert_actions() returned {found}, not floats {list(shape)}",
                    "return one action per environment",
                )
            parts.append(answer.astype(np.float32))
        return np.concatenate(parts)

    def __enter__(self) -> EnvPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(
        self,
        seeds: NDArray[np.int64],
        task_ids: NDArray[np.int32],
        indices: NDArray[np.int64] | None = None,
        *,
        copy: bool = False,
    ) -> Observation:
        """Start new episodes, like ``VectorEnv.reset``; all environments without ``indices``."""
        self.onload()
        rows = np.arange(self.spec.num_envs) if indices is None else np.asarray(indices)
        seeds = np.asarray(seeds)
        task_ids = np.asarray(task_ids)
        # All managers are asked before the first is awaited, so that they work in parallel.
        asked: list[int] = []
        for rank in range(len(self.managers)):
            mine = (rows >= self._offsets[rank]) & (rows < self._offsets[rank + 1])
            if mine.any():
                asked.append(rank)
                self.recovery.send_reset(rank, seeds[mine], task_ids[mine], rows[mine] - self._offsets[rank])
        parts: list[Observation] = []
        for rank, manager in enumerate(self.managers):
            last = self.recovery.last[rank]
            if rank in asked:
                try:
                    self.recovery.raise_failed(rank)
                    last = self.recovery.checked(manager, manager.wait_reset())
                except FAULTS as error:
                    last = self.recovery.restart(rank, error)
            elif last is None:
                raise EnvOrderError(f"{manager} has never been reset", "reset all environments first")
            parts.append(last)
        self.recovery.last = list(parts)
        if not self._batch:
            return copy_observation(parts[0]) if copy else parts[0]
        # Batch slots alternate like a manager's, so that results of a pool have the same lifetime.
        self._turn = (self._turn + 1) % NUM_SLOTS
        for target, part in zip(self._parts[self._turn], parts, strict=True):
            target.write_observation(part)
        result = self._batch[self._turn].observation()
        return copy_observation(result) if copy else result

    def step_async(self, actions: NDArray[np.float32], active: NDArray[np.bool_] | None = None) -> None:
        """Send ``actions float32[B,C,A]``; environments where ``active bool[B]`` is False are not simulated."""
        self.onload()
        batch = self.spec.num_envs
        if len(actions) != batch:
            raise EnvError(f"actions for {len(actions)} of {batch} environments", code="actions-shape")
        # A copy: ``wait`` needs it, and the caller may reuse its array by then.
        self._active = np.ones(batch, np.bool_) if active is None else np.array(active, np.bool_)
        self._chunk = actions.shape[1] if actions.ndim == 3 else 0
        for rank, manager in enumerate(self.managers):
            rows = slice(self._offsets[rank], self._offsets[rank + 1])
            # Lost in an earlier request; ``wait`` restarts it and reports this chunk as not valid.
            if rank in self.recovery.failed:
                continue
            try:
                manager.step_async(actions[rows], self._active[rows])
            except FAULTS as error:
                self.recovery.failed[rank] = error

    def wait(self, timeout: float | None = None, *, copy: bool = False) -> EnvStep:
        """Return the outcome of the chunk of ``step_async`` in all environments."""
        parts: list[EnvStep] = []
        for rank, manager in enumerate(self.managers):
            try:
                self.recovery.raise_failed(rank)
                step = self.recovery.quarantine(rank, manager.wait(timeout))
            except FAULTS as error:
                active = self._active[self._offsets[rank] : self._offsets[rank + 1]]
                step = self.recovery.lost_step(rank, error, active, self._chunk)
            parts.append(step)
        # Only now: until here a lost process needs the observation before the chunk, which becomes the final one.
        self.recovery.last = [part.observation for part in parts]
        if not self._batch:
            return copy_step(parts[0]) if copy else parts[0]
        self._turn = (self._turn + 1) % NUM_SLOTS
        for target, part in zip(self._parts[self._turn], parts, strict=True):
            target.write_step(part)
        result = self._batch[self._turn].step(self._chunk)
        return copy_step(result) if copy else result

    def step(
        self, actions: NDArray[np.float32], active: NDArray[np.bool_] | None = None, *, copy: bool = False
    ) -> EnvStep:
        """Execute a chunk and wait for it."""
        self.step_async(actions, active)
        return self.wait(copy=copy)
