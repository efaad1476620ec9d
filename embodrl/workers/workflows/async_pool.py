"""A pool's environments as asynchronous ones, each with its own episode.

Concurrent calls of episodes share the requests to a simulator process: whenever it is idle, all waiting calls go out
together, and the other environments are untouched. A thread per process waits for answers, so a slow simulator delays
only its own episodes. Everything else happens on one event loop, without locks.

Shapes: C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.environment import Environment, Tool, ToolResult
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvError, EnvOrderError
from embodrl.processes.batching import BatchPump, Request
from embodrl.processes.codec import decode, encode
from embodrl.types import Observation


@dataclass(frozen=True)
class _Content:
    """Content of a request: a new episode, a chunk of actions, or a query of the simulator."""

    row: int
    episode: tuple[int, int] | None = None  # seed, task id
    actions: NDArray[np.float32] | None = None  # [C,A]
    call: tuple[str, dict[str, object]] | None = None

    def shares_batch(self, other: _Content) -> bool:
        """Return whether both fit into one request to the simulator process; chunks must have equal length."""
        if self.episode is not None:
            return other.episode is not None
        return self.actions is not None and other.actions is not None and len(self.actions) == len(other.actions)


class _Process(BatchPump[_Content, object]):
    """The requests to one simulator process; ``pool`` has only that manager."""

    def __init__(self, pool: EnvPool) -> None:
        super().__init__(pool.managers[0].name)
        self.pool = pool
        self.spec = pool.spec
        self.running: set[int] = set()  # rows with a running episode
        self.lost: set[int] = set()  # the ones whose process has been restarted since
        self._restarted = False
        self._latest: dict[int, Request[_Content, object]] = {}  # by row

    async def ask(self, content: _Content) -> object:
        """Queue a request and wait for its answer.

        Raises:
            EnvError: an earlier request of the environment is still pending.
        """
        latest = self._latest.get(content.row)
        if latest is not None and not latest.answer.done():
            raise EnvOrderError(
                "this environment received a request while another one is pending",
                "await every call, or cancel it, first",
            )
        request = self._latest[content.row] = Request(content)
        return await self.submit(request)

    def choose(self, waiting: list[Request[_Content, object]]) -> list[Request[_Content, object]]:
        first = waiting[0]
        alike = [item for item in waiting if item is first or first.content.shares_batch(item.content)]
        if first.content.actions is None:
            return alike
        for request in alike:
            # A restart of the process has ended the episode: its next chunk is answered with None, and counted.
            if (row := request.content.row) in self.lost:
                self.lost.discard(row)
                self.running.discard(row)
                self.pool.faults.count("lost_episodes")
                request.settle(None)
        return [request for request in alike if not request.answer.done()]

    def computed(self, batch: Sequence[_Content], answers: Sequence[object]) -> None:
        if self._restarted:  # idle rows have lost an episode, too
            self.lost |= self.running - {content.row for content in batch}
        for content, answer in zip(batch, answers, strict=True):
            if content.episode is not None:
                self.running.add(content.row)
                self.lost.discard(content.row)
            if isinstance(answer, ToolResult) and answer.done:
                self.running.discard(content.row)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def compute(self, batch: list[_Content]) -> Sequence[object]:
        process = self.pool.managers[0].process
        before = process.starts
        try:
            if batch[0].call is not None:
                return self.pool.call(*batch[0].call)
            return self._reset(batch) if batch[0].episode is not None else self._step(batch)
        finally:
            self._restarted = process.starts != before

    def _reset(self, batch: list[_Content]) -> list[Observation]:
        rows = np.array([content.row for content in batch])
        episodes = np.array([content.episode for content in batch])
        observation = self.pool.reset(episodes[:, 0].astype(np.int64), episodes[:, 1].astype(np.int32), rows)
        return [observation.select(rows[index : index + 1]) for index in range(len(batch))]

    def _step(self, batch: list[_Content]) -> list[ToolResult]:
        chunks = np.stack([content.actions for content in batch if content.actions is not None])
        rows = [content.row for content in batch]
        actions = np.zeros((self.spec.num_envs, *chunks.shape[1:]), np.float32)
        active = np.zeros(self.spec.num_envs, np.bool_)
        actions[rows] = chunks
        active[rows] = True
        step = self.pool.step(actions, active)
        return [ToolResult.of_row(step, row) for row in rows]


class AsyncPool:
    """Asynchronous environments over the rows of a pool without auto-reset and without other pending requests.

    Use it on one event loop. ``close`` leaves the pool usable.
    """

    def __init__(self, pool: EnvPool) -> None:
        self.spec = pool.spec
        self._processes = [_Process(part) for part in pool.split(len(pool.managers))]

    def environments(self) -> list[PoolEnvironment]:
        """Return one environment per row, in pool order."""
        return [PoolEnvironment(process, row) for process in self._processes for row in range(process.spec.num_envs)]

    def busy_s(self) -> float:
        """Return the mean busy time of a process in seconds."""
        return sum(process.busy_s for process in self._processes) / len(self._processes)

    def mean_batch(self) -> float:
        """Return the mean number of environment calls per request to a process; 0 before the first."""
        batches = sum(process.batches for process in self._processes)
        return sum(process.requests for process in self._processes) / batches if batches else 0.0

    def close(self) -> None:
        """Wait until every process is idle, so that the pool can be used otherwise, and end the threads.

        Episodes must have ended or been cancelled.
        """
        for process in self._processes:
            process.close()


class PoolEnvironment(Environment):
    """One row of a pool; see AsyncPool.

    A simulator fault ends the episode with ``ToolResult.lost``; by then the pool has restarted the process. A cancelled
    call ends it, too: continue with ``initialize`` or ``load_state``. Concurrent calls raise EnvError.
    """

    def __init__(self, process: _Process, row: int) -> None:
        self.spec = process.spec
        self._process = process
        self._row = row
        self._observation: Observation | None = None
        self._done = True
        self._begun: Callable[[Observation], Awaitable[None]] | None = None

    def on_begin(self, begun: Callable[[Observation], Awaitable[None]]) -> None:
        """Have a function called with the first observation of every episode."""
        self._begun = begun

    async def initialize(self, task: str, seed: int) -> Observation:
        if task not in self.spec.tasks:
            raise EnvError(
                f"there is no task '{task}'", f"choose one of {', '.join(self.spec.tasks)}", code="task-unknown"
            )
        observation = await self._ask(_Content(self._row, episode=(seed, self.spec.tasks.index(task))))
        assert isinstance(observation, Observation)
        self._observation = observation
        self._done = False
        if self._begun is not None:
            await self._begun(observation)
        return observation

    async def call(self, method: str, **arguments: object) -> object:
        """Return the answer of the simulator's ``method`` about this row."""
        return await self._process.ask(_Content(self._row, call=(method, {"row": self._row, **arguments})))

    def list_tools(self) -> list[Tool]:
        """Return the only tool, ``act``."""
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
        return [Tool("act", "execute a chunk of actions, float32[C,A] in environment units", schema)]

    async def execute(self, tool: str, arguments: Mapping[str, object]) -> ToolResult:
        if tool != "act":
            raise EnvError(f"there is no tool '{tool}'", "choose act", code="tool-unknown")
        if self._done or self._observation is None:
            raise EnvError(
                "no episode is in progress in this environment", "call initialize() first", code="episode-not-started"
            )
        actions = self._checked(arguments)
        result = await self._ask(_Content(self._row, actions=actions))
        if not isinstance(result, ToolResult):
            result = ToolResult.lost_chunk(self._observation, len(actions))
        self._observation = result.observation
        self._done = result.done
        return result

    async def _ask(self, content: _Content) -> object:
        try:
            return await self._process.ask(content)
        except asyncio.CancelledError:
            self._done = True  # whether the simulator has executed it is unknown
            raise

    def _checked(self, arguments: Mapping[str, object]) -> NDArray[np.float32]:
        if set(arguments) != {"actions"}:
            raise EnvError(
                f"act got {', '.join(sorted(arguments)) or 'nothing'}",
                "pass actions and nothing else",
                code="actions-shape",
            )
        actions = np.asarray(arguments["actions"], np.float32)
        if actions.ndim != 2 or actions.shape[1] != self.spec.action_dim or not 0 < len(actions) <= self.spec.max_chunk:
            raise EnvError(
                f"actions of shape {list(actions.shape)}",
                f"give [1 to {self.spec.max_chunk}, {self.spec.action_dim}]",
                code="actions-shape",
            )
        if not np.isfinite(actions).all():
            raise EnvError(
                "an action is not finite", "check the code that computes the actions", code="actions-not-finite"
            )
        return actions

    async def get_state(self) -> bytes:
        if self._observation is None:
            raise EnvError(
                "no episode has begun in this environment", "call initialize() first", code="episode-not-started"
            )
        row = await self.call("get_row_state")
        if self._row in self._process.lost:
            raise EnvError(
                "the episode of this environment was lost with its simulator process",
                "begin a new one",
                code="episode-lost",
            )
        seen = vars(self._observation)
        return encode({"row": row, "observation": seen, "done": self._done})

    async def load_state(self, state: bytes) -> Observation:
        content = decode(state)
        await self._ask(_Content(self._row, call=("set_row_state", {"row": self._row, "state": content["row"]})))
        self._observation = Observation(**content["observation"])
        self._done = content["done"]
        if not self._done:
            self._process.running.add(self._row)
        self._process.lost.discard(self._row)
        return self._observation

    async def close(self) -> None:
        self._process.running.discard(self._row)
        self._process.lost.discard(self._row)
        self._observation = None
        self._done = True
