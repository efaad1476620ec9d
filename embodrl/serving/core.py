"""The policy shared by all protocols: one thread computes batches of requests from every connection.

The event loop never computes. Requests that arrive during a batch form the next one. An idle policy waits up to
``serve.max_wait_ms`` for more requests, but not once every client active in the last second has sent one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from embodrl.config.schema import ServeConfig
from embodrl.errors import EmbodrlError, ServingError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.rollout.batched import select_output
from embodrl.models.common.chat import LiveToken
from embodrl.models.common.live import OnToken
from embodrl.processes.batching import BatchPump, Request
from embodrl.serving.metrics import Metrics
from embodrl.serving.stall import BatchWatch
from embodrl.types import ChunkPrefix, Decoding, Observation, PolicyOutput, SamplingParams

logger = logging.getLogger(__name__)

ACTIVE_S = 1.0
"""A client counts as active for this many seconds after its last request."""


LOOK_S = 1.0
GIVE_UP = 4
"""The server ends when a batch hangs for this many times ``serve.stall_timeout_s``."""


@dataclass(frozen=True)
class ServedChunk:
    """The response to an observation.

    Attributes:
        actions: ``float32[C,A]`` in environment units.
        version: number of updates behind the weights.
        infer_ms: compute time of the batch, in milliseconds.
        total_ms: milliseconds from the request's arrival to the response.
        output: the row that the policy computed, a batch of one, of a request for a message; else None.
    """

    actions: NDArray[np.float32]
    version: int
    batch_size: int
    infer_ms: float
    total_ms: float = 0.0
    output: PolicyOutput | None = None


@dataclass(frozen=True)
class Writing:
    """How a message is written.

    Attributes:
        decoding: ``greedy`` or ``sampled``.
        sampling: temperature, top k and rules of tokens; messages of one batch have the same.
        seed: of its random numbers.
        on_token: called with each token and the policy version as it is written, in the policy's thread; a token may
            be reported again if its batch has to be computed again.
    """

    decoding: Decoding
    sampling: SamplingParams
    seed: tuple[int, ...]
    on_token: Callable[[LiveToken, int], None] | None = None


@dataclass(frozen=True)
class _Query:
    observation: Observation
    arrived: float
    prefix: tuple[NDArray[np.float32], int] | None = None
    writing: Writing | None = None


class ModelCore(BatchPump[_Query, ServedChunk]):
    """Answers observations with action chunks; its methods belong to one event loop.

    ``engine`` may get new weights from any thread, between two batches.

    Attributes:
        check_observation: called with every observation of ``act``; raises if the policy must not act on it.
    """

    def __init__(self, engine: RolloutEngine, settings: ServeConfig) -> None:
        super().__init__("policy")
        self.engine = engine
        self.settings = settings
        self.metrics = Metrics()
        self._active: OrderedDict[object, float] = OrderedDict()
        self._arrival = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._under_way: set[Request[_Query, ServedChunk]] = set()
        self._rollouts = 0
        self._watch = BatchWatch(settings.stall_timeout_s)
        self.is_stopping = False
        self.check_observation: Callable[[Observation], None] = lambda observation: None

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def stalled(self) -> str:
        """Why the current batch counts as hung; "" if none does."""
        return self._watch.found

    @property
    def is_computing(self) -> bool:
        return self._watch.is_entered

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for ``resume``."""
        return not self._running.is_set()

    def pause(self) -> None:
        """Hold new requests; the current batch completes."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def warm_up(self, observation: Observation) -> None:
        """Compute a batch of one row, so that the first client does not wait for compilation and caches."""
        try:
            self.engine.decide(observation, self.settings.decoding)
        except EmbodrlError as error:  # the example observation may lack the state that the policy reads
            logger.warning("warm-up failed: %s", error.message)

    async def act(
        self,
        observation: Observation,
        client: object,
        protocol: str,
        prefix: tuple[NDArray[np.float32], int] | None = None,
        writing: Writing | None = None,
    ) -> ServedChunk:
        """Return the action chunk for an observation ``[1]``, decoded as ``serve.decoding`` says, or a message.

        Args:
            observation: observation of one row.
            client: hashable id of the client, the same for all requests of a connection.
            protocol: label of the metrics.
            prefix: remaining actions of the client's current chunk, and the delay; see ``ChunkPrefix``.
            writing: how a message is written; the observation is then a conversation.

        Raises:
            ServingError: the server is stopping, or the policy failed.
            EmbodrlError: the observation does not fit the policy.
        """
        if self.is_stopping:
            raise ServingError("the server is stopping", "connect to another server", code="server-stopping")
        if self.stalled:
            raise self._stalled()
        self.check_observation(observation)
        query = _Query(observation, time.perf_counter(), prefix, writing)
        self._note(client, query.arrived)
        request: Request[_Query, ServedChunk] = Request(query)
        self._under_way.add(request)
        self._idle.clear()
        self._arrival.set()
        try:
            chunk = await self.submit(request)
        finally:
            self._under_way.discard(request)
            self._note_idle()
        total_s = time.perf_counter() - query.arrived
        self.metrics.count("requests_total", protocol)
        self.metrics.took(total_s)
        return replace(chunk, total_ms=1000 * total_s)

    async def roll_out(self, compute: Callable[[], PolicyOutput]) -> PolicyOutput:
        """Run ``compute``, which uses the engine on a batch formed by a training run, in a thread.

        Raises:
            ServingError: the server is stopping.
            EmbodrlError: the observations do not fit the policy.
        """
        if self.is_stopping:
            raise ServingError("the server is stopping", "connect to another server", code="server-stopping")
        if self.stalled:
            raise self._stalled()
        await self._running.wait()
        with self._counted_rollout():
            return await asyncio.to_thread(compute)

    @contextmanager
    def _counted_rollout(self) -> Iterator[None]:
        self._rollouts += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._rollouts -= 1
            self._note_idle()

    def _note_idle(self) -> None:
        if not self._under_way and not self._rollouts:
            self._idle.set()

    def _note(self, client: object, now: float) -> None:
        self._active[client] = now
        self._active.move_to_end(client)
        while next(iter(self._active.values())) < now - ACTIVE_S:
            self._active.popitem(last=False)

    def forget(self, client: object) -> None:
        """Stop expecting requests of a client whose connection has ended."""
        self._active.pop(client, None)

    async def gather(self, waiting: Sequence[Request[_Query, ServedChunk]]) -> None:
        await self._running.wait()
        deadline = waiting[0].content.arrived + self.settings.max_wait_ms / 1000
        while len(waiting) < min(self.settings.max_batch_size, len(self._active)):
            left = deadline - time.perf_counter()
            if left <= 0 or self.is_stopping:
                return
            self._arrival.clear()
            try:
                await asyncio.wait_for(self._arrival.wait(), left)
            except TimeoutError:
                return

    def choose(self, waiting: list[Request[_Query, ServedChunk]]) -> list[Request[_Query, ServedChunk]]:
        """Return the oldest requests whose image and state shapes match the oldest one.

        Requests that continue a chunk form batches of their own, since guidance needs gradients, and so do messages of
        one temperature.
        """

        def shapes(request: Request[_Query, ServedChunk]) -> tuple[object, ...]:
            observation, how = request.content.observation, request.content.writing
            writing = None if how is None else (how.decoding, how.sampling)
            return observation.images.shape, observation.state.shape, request.content.prefix is None, writing

        wanted = shapes(waiting[0])
        return [request for request in waiting if shapes(request) == wanted][: self.settings.max_batch_size]

    async def watch(self, give_up: Callable[[], None]) -> None:
        """Check the current batch for a hang once per second, until the task is cancelled.

        While a batch hangs, its requests and all new ones fail; after ``GIVE_UP`` times the limit, ``give_up`` is
        called.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            was = self.stalled
            if self._watch.look() and not was:
                logger.error("%s\n%s", self.stalled, self._watch.stack())
                for request in list(self._under_way):
                    request.settle(self._stalled())
            elif was and not self.stalled:
                logger.warning("the batch has ended: serving requests again")
            if self._watch.idle_s >= GIVE_UP * self.settings.stall_timeout_s:
                give_up()

    def _stalled(self) -> ServingError:
        hint = "its log has the stack; the server ends unless the batch does"
        return ServingError(self.stalled, hint, code="server-model-hangs")

    def compute(self, batch: list[_Query]) -> Sequence[ServedChunk]:
        with self._watch:
            return self._compute(batch)

    def _compute(self, batch: list[_Query]) -> Sequence[ServedChunk]:
        clock = time.perf_counter()
        try:
            observation = Observation.concat([query.observation for query in batch])
            prefixes = [query.prefix for query in batch if query.prefix is not None]
            seeds = [query.writing.seed for query in batch if query.writing is not None]
            how = batch[0].writing
            if prefixes:  # all or none have a prefix: see ``choose``
                limit = self.settings.rtc_max_guidance_weight
                output = self.engine.continue_chunk(observation, ChunkPrefix.stack(prefixes), limit)
            elif how is not None:
                generators = self.engine.row_generators(seeds) if how.decoding == "sampled" else None
                output = self.engine.decide(
                    observation, how.decoding, generators, how.sampling, _reports(batch, self.engine)
                )
            else:
                output = self.engine.decide(observation, self.settings.decoding)
        except Exception:  # a single observation may be unreadable for the policy: answer the others
            if len(batch) == 1:
                raise
            return [self._alone(query) for query in batch]
        chunks = _chunks(output, 1000 * (time.perf_counter() - clock))
        if how is None:
            return chunks
        return [replace(chunk, output=select_output(output, row)) for row, chunk in enumerate(chunks)]

    def _alone(self, query: _Query) -> ServedChunk:
        # An exception in place of a result is raised for that request only: see ``Request.settle``.
        try:
            return self._compute([query])[0]
        except Exception as error:  # noqa: BLE001 - the request raises it
            return error  # pyright: ignore[reportReturnType]

    async def drain(self) -> bool:
        """Refuse new requests and finish the current ones; return whether all were answered in time."""
        self.is_stopping = True
        self.resume()
        self._arrival.set()
        try:
            await asyncio.wait_for(self._idle.wait(), self.settings.drain_timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the thread, without waiting for a batch that has outlasted ``drain``."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def abandon(self) -> None:
        """Make ``drain`` return at once."""
        self._idle.set()

    def figures(self) -> str:
        """Return all metrics in the Prometheus text format."""
        return self.metrics.text(
            {
                "policy_version": self.version,
                "paused": float(self.is_paused),
                "in_flight": len(self._under_way),
                "model_hangs": float(bool(self.stalled)),
                "active_clients": len(self._active),
                "batches_total": self.batches,
                "batched_requests_total": self.requests,
                "compute_seconds_total": self.busy_s,
            }
        )


def _reports(batch: list[_Query], engine: RolloutEngine) -> OnToken | None:
    wanted = [None if query.writing is None else query.writing.on_token for query in batch]
    if not any(wanted):
        return None

    def report(row: int, token: LiveToken) -> None:
        if (on_token := wanted[row]) is not None:
            on_token(token, engine.version)

    return report


def _chunks(output: PolicyOutput, infer_ms: float) -> list[ServedChunk]:
    rows = len(output.actions)
    return [ServedChunk(np.array(output.actions[row]), output.version, rows, infer_ms) for row in range(rows)]


def explain(error: Exception) -> str:
    """Return an error's message and hint for a client, without the server's paths or stack traces."""
    if isinstance(error, EmbodrlError):
        return f"{error.message} ({error.hint}) [{error.code}]" if error.hint else f"{error.message} [{error.code}]"
    logger.error("a request failed", exc_info=error)
    return f"the policy raised {type(error).__name__}; the server's log has the details [policy-raised]"
