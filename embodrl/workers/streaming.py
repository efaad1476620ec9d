"""Episodes of a pool that begin and end independently: each group of environments is a shard of its own.

An update of an asynchronous run takes the first groups that have ended, whatever the others do; a group that has ended
begins another shard at once, and episodes go on over updates, each chunk with the version that chose it (interruptible
generation: Fu et al. 2025, "AReaL", arXiv 2505.24298). Shapes: T chunks of a rollout, B environments of the pool,
G environments of a group.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.specs import LOSSES
from embodrl.types import EnvStep, Observation, PolicyOutput
from embodrl.workers.lockstep import Shard, shard_meta, spread, stacked
from embodrl.workers.outcomes import OutcomeRecorder
from embodrl.workers.play import PlayedChunk, Recorder, Seconds
from embodrl.workers.recorders import NOT_JUDGED, Judging, make_recorders


class ShardSource(Protocol):
    """Gives out shards, and receives them."""

    def begin_now(self) -> tuple[int, Shard] | None:
        """Return a shard that may begin, with its number; None if none may at the moment."""
        ...

    def finished(self, number: int, batch: TrajectoryBatch) -> None:
        """Receive a shard, with ``shard_meta``."""
        ...

    def interrupted(self, numbers: Sequence[int]) -> None:
        """Take shards back that have to begin again."""
        ...

    def is_over(self) -> bool:
        """Return whether no shard is needed any more."""
        ...

    def wait(self) -> None:
        """Wait until something has changed, for a short time."""
        ...


class ShardStream(ABC):
    """Environments that play several shards at once, each of which begins and ends by itself.

    Attributes:
        num_shards: shards that run at once.
    """

    num_shards: int

    @abstractmethod
    def run(self, source: ShardSource, shards_a_journal: int) -> None:
        """Play until the source needs no more; then return the shards in progress.

        After so many shards none begins until all have ended, and the simulators drop their history.
        """


@dataclass
class _Slot:
    """A group of environments, and its shard in progress."""

    rows: NDArray[np.int64]
    outcomes: OutcomeRecorder
    recorders: list[Recorder]
    number: int | None = None
    shard: Shard | None = None
    last: PlayedChunk | None = None
    count: int = 0
    seconds: Seconds = field(default_factory=Seconds)

    @property
    def going(self) -> NDArray[np.bool_]:
        """``bool[G]``: environments that act next."""
        if self.number is None:
            return np.zeros(len(self.rows), np.bool_)
        return np.ones(len(self.rows), np.bool_) if self.last is None else self.last.going


class StreamRunner(ShardStream):
    """Plays shards of one group each in all environments of a pool, without auto-reset.

    Sampling depends on the shard alone, for policies that draw by row; so do seeds and tasks.
    """

    def __init__(self, config: Config, pool: EnvPool, engine: RolloutEngine, judging: Judging = NOT_JUDGED) -> None:
        self.config = config
        self.pool = pool
        self.engine = engine
        self._needs_values = LOSSES.entry(config.algorithm.loss_type).needs_values
        size = config.algorithm.group_size
        self._slots: list[_Slot] = []
        for first in range(0, pool.spec.num_envs, size):
            outcomes = OutcomeRecorder(pool)
            recorders = [outcomes, *make_recorders(config, pool, engine, judging)]
            self._slots.append(_Slot(np.arange(first, first + size), outcomes, recorders))
        self.num_shards = len(self._slots)
        self._observation: Observation | None = None
        self._ended = 0  # since the simulators dropped their history

    @property
    def numbers(self) -> list[int]:
        """Numbers of the shards in progress."""
        return [slot.number for slot in self._slots if slot.number is not None]

    def run(self, source: ShardSource, shards_a_journal: int) -> None:
        while not source.is_over():
            self.turn(source, shards_a_journal)
        source.interrupted(self.drop(()))

    def turn(self, source: ShardSource, shards_a_journal: int) -> None:
        """Begin shards where there is room, play a chunk in every environment that acts, and report what has ended."""
        if self._ended < shards_a_journal:
            self._begin(source)
        running = [slot for slot in self._slots if slot.number is not None]
        if not running:
            source.wait()
            return
        self._step()
        over = [slot for slot in running if not slot.going.any() or slot.count == self.config.rollout_chunks]
        self._ended += len(over)
        if self._ended >= shards_a_journal and len(over) == len(running):
            # Before they are reported: others may use the simulators while no shard is under way.
            self.pool.call("rebuild", restart=True)
            self._observation = None
            self._ended = 0
        for slot in over:
            assert slot.number is not None
            number, slot.number = slot.number, None
            source.finished(number, self._batch(slot))

    def drop(self, kept: Container[int]) -> list[int]:
        """Break shards off, except those of these numbers; return the numbers of the others."""
        dropped = [slot for slot in self._slots if slot.number is not None and slot.number not in kept]
        numbers = [slot.number for slot in dropped if slot.number is not None]
        for slot in dropped:
            slot.number = None
        return numbers

    def _begin(self, source: ShardSource) -> None:
        """Begin shards in free groups, as many as may begin."""
        begun: list[_Slot] = []
        for slot in self._slots:
            if slot.number is None and (given := source.begin_now()) is not None:
                slot.number, slot.shard = given
                slot.last, slot.count = None, 0
                slot.seconds = Seconds()
                begun.append(slot)
        if not begun:
            return
        clock = time.perf_counter()
        restarts = self.pool.faults.restarts
        # A pool tracks the episodes of all environments: idle ones must have begun one, too.
        fresh = self._slots if self._observation is None else begun
        seeds, tasks = np.zeros(self.pool.spec.num_envs, np.int64), np.zeros(self.pool.spec.num_envs, np.int32)
        for slot in begun:
            assert slot.shard is not None
            seeds[slot.rows], tasks[slot.rows] = slot.shard.seeds, slot.shard.task_ids
        rows = np.concatenate([slot.rows for slot in fresh])
        self._observation = self.pool.reset(seeds[rows], tasks[rows], rows)
        if self.pool.faults.restarts != restarts:
            # A process that was restarted has restarted all its episodes, and no result of a step says so.
            source.interrupted(self.drop(()))
            return
        for slot in begun:
            first = self._observation.select(slot.rows)
            for recorder in slot.recorders:
                recorder.begin(seeds[slot.rows], first)
            slot.seconds.env += (time.perf_counter() - clock) / len(begun)

    def _step(self) -> None:
        """Play one chunk in every environment that acts."""
        assert self._observation is not None
        running = [slot for slot in self._slots if slot.number is not None]
        active = np.zeros(self.pool.spec.num_envs, np.bool_)
        for slot in running:
            active[slot.rows] = slot.going
        clock = time.perf_counter()
        rows = np.flatnonzero(active)
        seen = self._observation.select(np.arange(len(active)))  # copied: the pool reuses its memory
        output = spread(self._act(seen, rows), np.arange(len(rows)), len(active), rows)
        acted = time.perf_counter()
        step = self.pool.step(output.actions, active)
        simulated = time.perf_counter()
        self._observation = step.observation
        for slot in running:
            slot.seconds.policy += (acted - clock) / len(running)
            slot.seconds.env += (simulated - acted) / len(running)
            self._record(slot, _chunk_of(slot, seen, output, step, active))

    def _act(self, seen: Observation, rows: NDArray[np.int64]) -> PolicyOutput:
        numbers = {
            int(row): (*slot.shard.random, place, slot.count)
            for slot in self._slots
            if slot.shard is not None
            for place, row in enumerate(slot.rows)
        }
        generators = self.engine.row_generators([numbers[int(row)] for row in rows])
        return self.engine.act(seen.select(rows), self._needs_values, generators)

    def _record(self, slot: _Slot, chunk: PlayedChunk) -> None:
        slot.last = chunk
        slot.count += 1
        for recorder in slot.recorders:
            recorder.after(chunk)

    def _batch(self, slot: _Slot) -> TrajectoryBatch:
        """Return the shard of a group ``[T,G]``; chunks after the end of its episodes are not valid."""
        assert slot.last is not None and slot.shard is not None
        last = slot.last
        while slot.count < self.config.rollout_chunks:
            self._record(slot, _blank(last, slot.count))
        for recorder in slot.recorders:
            recorder.end(slot.last)
        batch = stacked(slot.recorders, slot.shard.group_id)
        batch.meta = dict(shard_meta(batch, slot.outcomes.stats, slot.seconds))
        return batch


class _Given:
    """Shards that another process gives out, as a source of one request.

    Attributes:
        ended: shards that have ended, with their numbers.
    """

    def __init__(self, runner: StreamRunner, shards: Mapping[int, Shard], should_stop: Callable[[], bool]) -> None:
        self.ended: list[tuple[int, TrajectoryBatch]] = []
        self._shards = shards
        self._due = [number for number in shards if number not in runner.numbers]
        self._should_stop = should_stop

    def begin_now(self) -> tuple[int, Shard] | None:
        if not self._due:
            return None
        number = self._due.pop(0)
        return number, self._shards[number]

    def finished(self, number: int, batch: TrajectoryBatch) -> None:
        self.ended.append((number, batch))

    def interrupted(self, numbers: Sequence[int]) -> None:
        self._due += numbers

    def is_over(self) -> bool:
        return self._should_stop()

    def wait(self) -> None:
        """Do nothing: shards that could not begin now do so in the next turn."""


def play_given(
    runner: StreamRunner, shards: Mapping[int, Shard], shards_a_journal: int, should_stop: Callable[[], bool]
) -> list[tuple[int, TrajectoryBatch]]:
    """Go on with shards until some end, or after a chunk if there is room for others; return what has ended.

    Shards that have not begun begin; others in progress are broken off.

    Raises:
        InterruptedError: ``should_stop`` returned True.
    """
    runner.drop(shards)
    source = _Given(runner, shards, should_stop)
    while not source.ended:
        if source.is_over():
            runner.drop(())
            raise InterruptedError
        runner.turn(source, shards_a_journal)
        if len(shards) < runner.num_shards:
            break
    return source.ended


def _chunk_of(
    slot: _Slot, seen: Observation, output: PolicyOutput, step: EnvStep, active: NDArray[np.bool_]
) -> PlayedChunk:
    """Return the group's part of a chunk."""
    rows = slot.rows
    mine = replace(
        output,
        actions=output.actions[rows],
        logprobs=output.logprobs[rows],
        values=None if output.values is None else output.values[rows],
        forward_inputs={name: tensor[rows] for name, tensor in output.forward_inputs.items()},
    )
    part = seen.select(rows)
    return PlayedChunk(slot.count, part, part.task_id.astype(np.int64), active[rows], mine, _rows_of(step, rows))


def _rows_of(step: EnvStep, rows: NDArray[np.int64]) -> EnvStep:
    final = step.final_observation
    arrays = {name: value[rows] for name, value in vars(step).items() if isinstance(value, np.ndarray)}
    return replace(
        step,
        **arrays,
        observation=step.observation.select(rows),
        final_observation=None if final is None else final.select(rows),
    )


def _blank(last: PlayedChunk, number: int) -> PlayedChunk:
    """Return a chunk in which no environment acts."""
    nothing = np.zeros_like(last.active)
    step = replace(
        last.step,
        reward=np.zeros_like(last.step.reward),
        valid=np.zeros_like(last.step.valid),
        terminated=np.zeros_like(last.step.terminated),
        truncated=np.zeros_like(last.step.truncated),
        final_mask=nothing,
        final_observation=None,
    )
    none = np.zeros(0, np.int64)
    return replace(last, number=number, active=nothing, output=spread(last.output, none, len(nothing), none), step=step)
