"""The loop in which a policy acts in a pool of environments and recorders keep the results.

Training, evaluation and collection differ in the choice of actions (``Choose``), in which environments act next
(``Schedule``) and in the data that is kept (``Recorder``).

Shapes: B environments of the pool, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.pool.pool import EnvPool
from embodrl.processes.trace import record
from embodrl.types import EnvStep, Observation, PolicyOutput

Choose = Callable[[Observation, NDArray[np.bool_], int], PolicyOutput]
"""Chooses chunk number n of all environments; only the environments in ``bool[B]`` act."""

Schedule = Callable[["Play"], "NDArray[np.bool_] | None"]
"""Returns the environments ``bool[B]`` that act next, or None at the end; it may reset some of them first."""


@dataclass
class Seconds:
    """Seconds spent waiting for simulation and for the policy."""

    env: float = 0.0
    policy: float = 0.0

    def merge(self, other: Seconds) -> None:
        """Add the times of another rollout."""
        self.env += other.env
        self.policy += other.policy


@dataclass(frozen=True)
class PlayedChunk:
    """One chunk of all environments.

    Attributes:
        number: index of the chunk.
        seen: observation that the actions were based on; the pool reuses its memory after the next chunk.
        task_id: ``int64[B]``, tasks of the chunk's episodes.
        active: ``bool[B]``, environments that acted.
        output: chosen actions, meaningless where an environment did not act.
        step: results of the simulators; the pool reuses their memory after the next chunk.
    """

    number: int
    seen: Observation
    task_id: NDArray[np.int64]
    active: NDArray[np.bool_]
    output: PolicyOutput
    step: EnvStep

    @property
    def lost(self) -> NDArray[np.bool_]:
        """``bool[B]``: a fault of the simulator ended the episode."""
        return self.active & self.step.done & ~self.step.valid.any(axis=1)

    @property
    def ended(self) -> NDArray[np.bool_]:
        """``bool[B]``: the episode ended by itself or at the step limit."""
        return self.active & self.step.done & self.step.valid.any(axis=1)

    @property
    def cut_off(self) -> NDArray[np.int64]:
        """Environments with a truncated episode and a final observation; lost episodes have no final observation."""
        return np.flatnonzero(self.step.final_mask & self.step.valid.any(axis=1))

    @property
    def going(self) -> NDArray[np.bool_]:
        """``bool[B]``: the episode that acted continues."""
        return self.active & ~self.step.done


class Recorder:
    """Keeps data of a play. Hooks do nothing unless overridden."""

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        """All environments begin fresh episodes, with ``seeds int64[B]`` and first observations."""

    def before(self, observation: Observation, output: PolicyOutput) -> PolicyOutput:
        """Return the output to execute, usually the chosen one; called before the actions are sent."""
        return output

    def after(self, chunk: PlayedChunk) -> None:
        """Keep data of a chunk; ``chunk.lost`` marks episodes ended by a fault."""

    def end(self, last: PlayedChunk) -> None:
        """No chunk follows; some episodes may still be running."""

    def columns(self) -> dict[str, Any]:
        """Return columns ``[T,B,...]`` for a ``TrajectoryBatch``, by name."""
        return {}

    def release(self) -> None:
        """Release resources; no more play follows."""


class Play:
    """Environments in which a policy acts, chunk by chunk.

    Call ``begin``, then ``turn`` until it returns False (``take_turns`` does so for several plays), then ``end``.
    Recorders are called in order; ``last`` is the last received chunk. Not thread-safe.
    """

    def __init__(self, pool: EnvPool, choose: Choose, recorders: Sequence[Recorder], schedule: Schedule) -> None:
        self.pool = pool
        self.choose = choose
        self.recorders = recorders
        self.schedule = schedule
        self.observation: Observation | None = None
        self.number = 0
        self.last: PlayedChunk | None = None
        self.seconds = Seconds()
        self._sent: _Sent | None = None

    @property
    def going(self) -> NDArray[np.bool_]:
        """``bool[B]``: environments that acted in every chunk so far and whose episodes have not ended."""
        return np.ones(self.pool.spec.num_envs, np.bool_) if self.last is None else self.last.going

    def begin(self, seeds: NDArray[np.int64], tasks: NDArray[np.int32]) -> None:
        """Start fresh episodes with ``seeds int64[B]`` and ``tasks int32[B]``."""
        clock = time.perf_counter()
        self.seconds = Seconds()
        self.start(seeds, self.pool.reset(seeds, tasks))
        self.lap("env", clock)

    def start(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        """Continue from the first observation of running episodes."""
        self.observation = observation
        self.number = 0
        self.last = None
        self._sent = None
        for recorder in self.recorders:
            recorder.begin(seeds, observation)

    def turn(self) -> bool:
        """Receive the pending chunk and send the next one; return False when the schedule is exhausted."""
        if self._sent is not None:
            self._receive(self._sent)
        active = self.schedule(self)
        if active is None:
            return False
        # Sent before other plays take their turn, so that these simulators work in the meantime.
        self._send(active)
        return True

    def release(self) -> None:
        """Release the recorders; no more play follows."""
        for recorder in self.recorders:
            recorder.release()

    def abandon(self) -> None:
        """Wait for the pending chunk and discard it, since the pool accepts no other request until then."""
        if self._sent is not None:
            self._sent = None
            self.pool.wait()

    def end(self) -> None:
        """Tell the recorders that no chunk follows; requires at least one chunk."""
        clock = time.perf_counter()
        assert self.last is not None
        for recorder in self.recorders:
            recorder.end(self.last)
        self.lap("policy", clock)

    def lap(self, name: str, clock: float) -> float:
        """Add the time since ``clock`` to ``env`` or ``policy``; return the current time."""
        now = time.perf_counter()
        setattr(self.seconds, name, getattr(self.seconds, name) + now - clock)
        record("wait for simulators" if name == "env" else name, clock, now)
        return now

    def _send(self, active: NDArray[np.bool_]) -> None:
        clock = time.perf_counter()
        assert self.observation is not None
        output = self.choose(self.observation, active, self.number)
        # Not a local variable: `choose` may have reset the environments after losing their simulators.
        for recorder in self.recorders:
            output = recorder.before(self.observation, output)
        # Copied: a simulator that restarts in the meantime overwrites the observation's memory.
        self._sent = _Sent(self.observation, self.observation.task_id.astype(np.int64), active, output)
        clock = self.lap("policy", clock)
        self.pool.step_async(output.actions, active)
        self.lap("env", clock)

    def _receive(self, sent: _Sent) -> None:
        clock = time.perf_counter()
        step = self.pool.wait()
        clock = self.lap("env", clock)
        self._sent = None
        self.last = chunk = PlayedChunk(self.number, sent.seen, sent.task_id, sent.active, sent.output, step)
        self.observation = step.observation
        self.number += 1
        for recorder in self.recorders:
            recorder.after(chunk)
        self.lap("policy", clock)


def one_episode(rows: NDArray[np.int64]) -> Schedule:
    """Return a schedule of one episode in each of these environments, without auto-reset."""

    def schedule(play: Play) -> NDArray[np.bool_] | None:
        active = play.going & np.isin(np.arange(play.pool.spec.num_envs), rows)
        return active if active.any() else None

    return schedule


def take_turns(plays: Sequence[Play], should_stop: Callable[[], bool] = lambda: False) -> None:
    """Let the policy serve several plays in turn until all end; simulators of the other plays work in the meantime.

    Raises:
        InterruptedError: ``should_stop``, called before every round of turns, returned True; no chunk is pending.
    """
    running = list(plays)
    while running:
        if should_stop():
            for one in running:
                one.abandon()
            raise InterruptedError
        running = [one for one in running if one.turn()]


@dataclass(frozen=True)
class _Sent:
    """A pending chunk; see PlayedChunk."""

    seen: Observation
    task_id: NDArray[np.int64]
    active: NDArray[np.bool_]
    output: PolicyOutput
