"""The environments of a pool as asynchronous ones, each with an episode of its own.

The calls of episodes that run at the same time share the requests to a simulator process: whenever it is idle, all
that wait for it go out together, and the other environments are left alone. A thread a process waits for answers, so
a slow simulator delays only its own episodes. Everything else happens on one event loop, without locks.

Legend: C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.environment import Environment, Tool, ToolResult
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvError
from embodrl.processes.codec import decode, encode
from embodrl.types import Observation


@dataclass
class _Request:
    """What an environment waits for: a new episode, a chunk of actions, or an answer of its simulator."""

    row: int
    answer: asyncio.Future[Any]
    episode: tuple[int, int] | None = None  # seed, task id
    actions: NDArray[np.float32] | None = None  # [C,A]
    call: tuple[str, dict[str, object]] | None = None


class _Process:
    """The requests to one simulator process, in order; ``pool`` has that one manager only."""

    def __init__(self, pool: EnvPool) -> None:
        self.pool = pool
        self.spec = pool.spec
        self.playing: set[int] = set()  # rows with an episode under way
        self.lost: set[int] = set()  # of those, rows whose process has been restarted since
        self.requests = self.calls = 0
        self.busy_s = 0.0
        self._waiting: list[_Request] = []
        self._latest: dict[int, _Request] = {}  # by row
        self._pump: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=pool.managers[0].name)

    async def ask(self, row: int, **what: Any) -> Any:
        """Queue a request and wait for its answer.

        Raises:
            EnvError: the environment has a request already that is still waited for.
        """
        latest = self._latest.get(row)
        if latest is not None and not latest.answer.done():
            raise EnvError(
                "this environment is asked again before it has answered", "await every call, or cancel it, first"
            )
        request = self._latest[row] = _Request(row, asyncio.get_running_loop().create_future(), **what)
        self._waiting.append(request)
        if self._pump is None:
            self._pump = asyncio.create_task(self._serve())
        return await request.answer

    async def _serve(self) -> None:
        """Answer requests until none waits. A task starts in the next cycle of the loop, so all of this one join."""
        loop, manager = asyncio.get_running_loop(), self.pool.managers[0]
        try:
            while self._waiting:
                batch = self._next_batch()
                if not batch:
                    continue
                before = manager.pid
                answers: list[object]
                clock = time.perf_counter()
                try:
                    answers = await loop.run_in_executor(self._thread, self._work(batch))
                except Exception as error:  # noqa: BLE001  (it reaches all who asked)
                    answers = [error] * len(batch)
                self.busy_s += time.perf_counter() - clock
                if manager.pid != before:  # restarted: whoever was not asked has lost an episode, too
                    self.lost |= self.playing - {request.row for request in batch}
                for request, answer in zip(batch, answers, strict=True):
                    self._settle(request, answer)
                await asyncio.sleep(0)  # whom this answered may ask again before the next batch is made
        finally:
            self._pump = None

    def _settle(self, request: _Request, answer: Any) -> None:
        if request.episode is not None:
            self.playing.add(request.row)
            self.lost.discard(request.row)
        if isinstance(answer, ToolResult) and answer.done:
            self.playing.discard(request.row)
        if request.answer.done():
            return  # its episode was cancelled
        if isinstance(answer, Exception):
            request.answer.set_exception(answer)
        else:
            request.answer.set_result(answer)

    def _next_batch(self) -> list[_Request]:
        """Take all waiting requests of the kind that waits longest; chunks of one length go together.

        What nobody waits for any more is left out: it would be played in the next episode of its row.
        """
        self._waiting = [request for request in self._waiting if not request.answer.done()]
        if not self._waiting:
            return []
        first = self._waiting[0]

        def alike(request: _Request) -> bool:
            if first.call is not None:
                return request is first
            if first.episode is not None:
                return request.episode is not None
            assert first.actions is not None
            return request.actions is not None and len(request.actions) == len(first.actions)

        taken = [request for request in self._waiting if alike(request)]
        self._waiting = [request for request in self._waiting if not alike(request)]
        batch = [request for request in taken if request.actions is None or not self._forget_lost(request)]
        self.requests += bool(batch)
        self.calls += len(batch)
        return batch

    def _forget_lost(self, request: _Request) -> bool:
        """Answer the next chunk of an episode that a restart of the process has cost: None. It is over and counted."""
        if request.row not in self.lost:
            return False
        self.lost.discard(request.row)
        self.playing.discard(request.row)
        self.pool.faults.count("lost_episodes")
        self._settle(request, None)
        return True

    def _work(self, batch: list[_Request]) -> Callable[[], list[object]]:
        """Return what the thread has to do for a batch."""
        if batch[0].call is not None:
            method, arguments = batch[0].call
            return lambda: self.pool.call(method, arguments)
        if batch[0].episode is not None:
            return lambda: self._reset(batch)
        return lambda: self._step(batch)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _reset(self, batch: list[_Request]) -> list[object]:
        rows = np.array([request.row for request in batch])
        episodes = np.array([request.episode for request in batch])
        observation = self.pool.reset(episodes[:, 0].astype(np.int64), episodes[:, 1].astype(np.int32), rows)
        return [observation.select(rows[index : index + 1]) for index in range(len(batch))]

    def _step(self, batch: list[_Request]) -> list[object]:
        chunks = np.stack([request.actions for request in batch if request.actions is not None])
        rows = [request.row for request in batch]
        actions = np.zeros((self.spec.num_envs, *chunks.shape[1:]), np.float32)
        active = np.zeros(self.spec.num_envs, np.bool_)
        actions[rows], active[rows] = chunks, True
        step = self.pool.step(actions, active)
        return [ToolResult.of_row(step, row) for row in rows]

    def close(self) -> None:
        """Wait until the process is idle, and end the thread."""
        self._thread.shutdown()


class AsyncPool:
    """Asynchronous environments over the rows of a pool, which is not auto-reset and has no other request under way.

    Everything is used on one event loop. ``close`` leaves the pool as it is.

    Args:
        pool: started.
    """

    def __init__(self, pool: EnvPool) -> None:
        self.spec = pool.spec
        self._processes = [_Process(part) for part in pool.split(len(pool.managers))]

    def environments(self) -> list[PoolEnvironment]:
        """Return one environment a row, in the order of the pool."""
        return [PoolEnvironment(process, row) for process in self._processes for row in range(process.spec.num_envs)]

    def busy_s(self) -> float:
        """Return the seconds that a process has been at work, on average."""
        return sum(process.busy_s for process in self._processes) / len(self._processes)

    def mean_batch(self) -> float:
        """Return how many calls of environments a request to a process was made of, on average; 0 before the first."""
        requests = sum(process.requests for process in self._processes)
        return sum(process.calls for process in self._processes) / requests if requests else 0.0

    def close(self) -> None:
        """Wait until every process is idle, so that the pool can be used in other ways again, and end the threads.

        Episodes must have ended, or been cancelled.
        """
        for process in self._processes:
            process.close()


class PoolEnvironment(Environment):
    """One row of a pool; see AsyncPool.

    A fault of the simulator ends the episode with ``ToolResult.lost``; the pool has restarted the process by then. A
    call that is cancelled ends it, too: go on with ``initialize`` or ``load_state``. One call at a time, else EnvError.
    """

    def __init__(self, process: _Process, row: int) -> None:
        self.spec = process.spec
        self._process, self._row = process, row
        self._observation: Observation | None = None
        self._done = True

    async def initialize(self, task: str, seed: int) -> Observation:
        """See Environment."""
        if task not in self.spec.tasks:
            raise EnvError(f"there is no task '{task}'", f"choose one of {', '.join(self.spec.tasks)}")
        observation = await self._ask(episode=(seed, self.spec.tasks.index(task)))
        self._observation, self._done = observation, False
        return observation

    def list_tools(self) -> list[Tool]:
        """See Environment; the one tool is ``act``."""
        action = {
            "type": "array",
            "prefixItems": [
                {"type": "number", "minimum": low, "maximum": high}
                for low, high in zip(self.spec.action_low, self.spec.action_high, strict=True)
            ],
            "minItems": self.spec.action_dim,
            "maxItems": self.spec.action_dim,
        }
        actions = {"type": "array", "items": action, "minItems": 1, "maxItems": self.spec.max_chunk}
        schema = {"type": "object", "properties": {"actions": actions}, "required": ["actions"]}
        return [Tool("act", "play a chunk of actions, float32[C,A] in environment units", schema)]

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """See Environment."""
        if tool != "act":
            raise EnvError(f"there is no tool '{tool}'", "choose act")
        if self._done or self._observation is None:
            raise EnvError("no episode is under way in this environment", "call initialize() first")
        actions = self._checked(arguments)
        result = await self._ask(actions=actions)
        if result is None:
            result = ToolResult.lost_chunk(self._observation, len(actions))
        self._observation, self._done = result.observation, result.done
        return result

    async def _ask(self, **what: Any) -> Any:
        try:
            return await self._process.ask(self._row, **what)
        except asyncio.CancelledError:
            self._done = True  # whether the simulator has done it is not known
            raise

    def _checked(self, arguments: Mapping[str, object]) -> NDArray[np.float32]:
        if set(arguments) != {"actions"}:
            raise EnvError(f"act got {', '.join(sorted(arguments)) or 'nothing'}", "give it actions and nothing else")
        actions = np.asarray(arguments["actions"], np.float32)
        if actions.ndim != 2 or actions.shape[1] != self.spec.action_dim or not 0 < len(actions) <= self.spec.max_chunk:
            raise EnvError(
                f"actions of shape {list(actions.shape)}",
                f"give [1 to {self.spec.max_chunk}, {self.spec.action_dim}]",
            )
        if not np.isfinite(actions).all():
            raise EnvError("an action is not finite", "look at what makes the actions")
        return actions

    async def get_state(self) -> bytes:
        """See Environment."""
        if self._observation is None:
            raise EnvError("no episode has begun in this environment", "call initialize() first")
        row = await self._process.ask(self._row, call=("get_row_state", {"row": self._row}))
        if self._row in self._process.lost:
            raise EnvError("the episode of this environment was lost with its simulator process", "begin a new one")
        seen = vars(self._observation)
        return encode({"row": row, "observation": seen, "done": self._done})

    async def load_state(self, state: bytes) -> Observation:
        """See Environment."""
        content = decode(state)
        await self._ask(call=("set_row_state", {"row": self._row, "state": content["row"]}))
        self._observation, self._done = Observation(**content["observation"]), content["done"]
        if not self._done:
            self._process.playing.add(self._row)
        self._process.lost.discard(self._row)
        return self._observation

    async def close(self) -> None:
        """See Environment."""
        self._process.playing.discard(self._row)
        self._process.lost.discard(self._row)
        self._observation, self._done = None, True
