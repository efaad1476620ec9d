"""A rollout engine that many episodes ask at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.types import Observation, PolicyOutput


@dataclass
class _Request:
    observation: Observation
    seed: tuple[int, ...] | None  # None asks for values
    answer: asyncio.Future[Any]


class BatchedEngine:
    """Gathers what waits while the engine is at work into one batch; a thread computes one batch at a time.

    Its methods belong to one event loop. Weights may be updated from any thread: ``RolloutEngine.update_weights``
    swaps them between two batches, and every answer carries the version that it was computed with.

    Args:
        engine: the policy.
        compute_values: of ``act``.
        max_batch: most observations in a batch.
        seed: of the actions that are drawn.
    """

    def __init__(self, engine: RolloutEngine, compute_values: bool, max_batch: int, seed: Sequence[int] = (0,)) -> None:
        self.engine, self.compute_values, self.max_batch = engine, compute_values, max_batch
        self.requests = self.calls = 0
        self.busy_s = 0.0
        self._seed = tuple(seed)
        self._waiting: list[_Request] = []
        self._pump: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")

    @property
    def version(self) -> int:
        """Updates that the weights have seen."""
        return self.engine.version

    def for_episode(self, *numbers: int) -> EpisodeEngine:
        """Return what an episode asks; its actions follow from the seed and these numbers, whatever else is asked."""
        return EpisodeEngine(self, (*self._seed, *numbers))

    async def act(self, observation: Observation, seed: tuple[int, ...]) -> PolicyOutput:
        """Draw a chunk of actions for an observation ``[1]``, with random numbers that follow from ``seed``.

        A policy without ``draws_by_row`` draws from the engine's generators, in the order of the batches.
        """
        return await self._ask(observation, seed)

    async def values(self, observation: Observation) -> Tensor:
        """Return ``float32[1,K]`` on the CPU."""
        return await self._ask(observation, None)

    def mean_batch(self) -> float:
        """Return how many observations a batch had, on average; 0 before the first."""
        return self.calls / self.requests if self.requests else 0.0

    def close(self) -> None:
        """Wait for the batch under way, and end the thread. Episodes must have ended, or been cancelled."""
        self._thread.shutdown()

    async def _ask(self, observation: Observation, seed: tuple[int, ...] | None) -> Any:
        request = _Request(observation, seed, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._pump is None:
            self._pump = asyncio.create_task(self._serve())
        return await request.answer

    async def _serve(self) -> None:
        """Answer until no request waits. A task starts in the next cycle of the loop: requests of this one join."""
        try:
            while self._waiting:
                batch = self._next_batch()
                if not batch:
                    continue
                self.requests += 1
                self.calls += len(batch)
                answers: list[Any]
                clock = time.perf_counter()
                try:
                    answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, batch)
                except Exception as error:  # noqa: BLE001  (it reaches all who asked)
                    answers = [error] * len(batch)
                self.busy_s += time.perf_counter() - clock
                for request, answer in zip(batch, answers, strict=True):
                    if request.answer.done():
                        continue  # its episode was cancelled
                    if isinstance(answer, Exception):
                        request.answer.set_exception(answer)
                    else:
                        request.answer.set_result(answer)
                await asyncio.sleep(0)  # whom this answered may ask again before the next batch is made
        finally:
            self._pump = None

    def _next_batch(self) -> list[_Request]:
        """Take the oldest requests of one kind, without those whose episode was cancelled."""
        alive = [request for request in self._waiting if not request.answer.done()]
        alike = [request for request in alive if (request.seed is None) == (alive[0].seed is None)][: self.max_batch]
        taken = set(map(id, alike))
        self._waiting = [request for request in alive if id(request) not in taken]
        return alike

    def _compute(self, batch: list[_Request]) -> list[Any]:
        """In the thread: answer one batch."""
        observation = Observation.concat([request.observation for request in batch])
        if batch[0].seed is None:
            return list(self.engine.values(observation).split(1))
        generators = self.engine.row_generators([request.seed or () for request in batch])
        output = self.engine.act(observation, self.compute_values, generators)
        return [select_output(output, row) for row in range(len(batch))]


class EpisodeEngine:
    """The engine as one episode sees it.

    Args:
        shared: the engine that all episodes ask.
        seed: of this episode.
    """

    def __init__(self, shared: BatchedEngine, seed: tuple[int, ...]) -> None:
        self._shared, self._seed, self._calls = shared, seed, 0

    @property
    def version(self) -> int:
        """Updates that the weights have seen."""
        return self._shared.version

    @property
    def has_values(self) -> bool:
        """Values are wanted, and ``act`` computes them."""
        return self._shared.compute_values

    async def act(self, observation: Observation) -> PolicyOutput:
        """Draw a chunk of actions ``float32[1,C,A]`` for an observation of one row."""
        self._calls += 1
        return await self._shared.act(observation, (*self._seed, self._calls))

    async def values(self, observation: Observation) -> Tensor:
        """Return ``float32[1,K]``, the values of an observation of one row; needs a policy with a value head."""
        return await self._shared.values(observation)


def select_output(output: PolicyOutput, row: int) -> PolicyOutput:
    """Return one row of an output as a batch of one, on the CPU."""
    rows = slice(row, row + 1)

    def pick(tensor: Tensor) -> Tensor:
        return tensor[rows].to("cpu", copy=True)

    return replace(
        output,
        actions=output.actions[rows].copy(),
        logprobs=pick(output.logprobs).to(torch.float32),
        values=None if output.values is None else pick(output.values).to(torch.float32),
        forward_inputs={name: pick(tensor) for name, tensor in output.forward_inputs.items()},
    )
