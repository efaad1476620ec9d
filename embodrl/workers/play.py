"""One loop in which a policy acts in a pool of environments, and recorders keep what is wanted of it.

Training, evaluations and collections differ in who chooses the actions (``Choose``), in which environments act next
(``Schedule``) and in what is kept (``Recorder``).

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
"""Chooses the chunk with a number of all environments; only those of ``bool[B]`` act."""

Schedule = Callable[["Play"], "NDArray[np.bool_] | None"]
"""Returns the environments ``bool[B]`` that act next, or None at the end; it may reset some of them before."""


@dataclass
class Seconds:
    """Time that was spent waiting for simulation and for the policy."""

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
        number: count of the chunks before it.
        seen: observation that the actions were chosen by; the pool reuses its memory after the next chunk.
        task_id: ``int64[B]``, tasks of the episodes that the chunk belongs to.
        active: ``bool[B]``, environments that acted.
        output: chosen actions, of no meaning where an environment did not act.
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
        """Environments whose episode was truncated, with a final observation; lost episodes have none."""
        return np.flatnonzero(self.step.final_mask & self.step.valid.any(axis=1))

    @property
    def going(self) -> NDArray[np.bool_]:
        """``bool[B]``: the episode that acted continues."""
        return self.active & ~self.step.done


class Recorder:
    """Keeps something of what is played. Each hook does nothing unless a recorder defines it."""

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        """All environments begin fresh episodes.

        Args:
            seeds: ``int64[B]``.
            observation: first observation of each episode.
        """

    def before(self, observation: Observation, output: PolicyOutput) -> PolicyOutput:
        """Return the output to execute, most often the one that was chosen; asked before the actions are sent."""
        return output

    def after(self, chunk: PlayedChunk) -> None:
        """Keep what is wanted of a chunk; ``chunk.lost`` names the episodes that a fault ended."""

    def end(self, last: PlayedChunk) -> None:
        """No chunk follows; some episodes may still be in progress."""

    def columns(self) -> dict[str, Any]:
        """Return columns ``[T,B,...]`` for a ``TrajectoryBatch``, by name."""
        return {}

    def release(self) -> None:
        """Nothing more is played: free what it holds."""


class Play:
    """Environments in which a policy acts, chunk by chunk.

    ``begin``, then ``turn`` until it returns False (``take_turns`` does so for several plays), then ``end``. One thread
    uses a play at a time.

    Args:
        pool: its managers, started.
        choose: function that chooses the actions.
        recorders: recorders in the order in which they are called.
        schedule: function that tells which environments act next.

    Attributes:
        observation: newest observation of all environments.
        number: count of the chunks that were received.
        last: the chunk that was received last, None before the first.
        seconds: spent since ``begin``.
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
        """``bool[B]``: environments that have acted in every chunk so far without the end of an episode."""
        return np.ones(self.pool.spec.num_envs, np.bool_) if self.last is None else self.last.going

    def begin(self, seeds: NDArray[np.int64], tasks: NDArray[np.int32]) -> None:
        """Start fresh episodes.

        Args:
            seeds: ``int64[B]``.
            tasks: ``int32[B]``.
        """
        clock = time.perf_counter()
        self.seconds = Seconds()
        self.start(seeds, self.pool.reset(seeds, tasks))
        self.lap("env", clock)

    def start(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        """Continue from the first observation of episodes that have begun."""
        self.observation = observation
        self.number = 0
        self.last = None
        self._sent = None
        for recorder in self.recorders:
            recorder.begin(seeds, observation)

    def turn(self) -> bool:
        """Receive the chunk that is under way, and send the next one; return False where the schedule has no more."""
        if self._sent is not None:
            self._receive(self._sent)
        active = self.schedule(self)
        if active is None:
            return False
        # Sent before other plays take their turn, so that these simulators work meanwhile.
        self._send(active)
        return True

    def release(self) -> None:
        """Tell the recorders that nothing more is played."""
        for recorder in self.recorders:
            recorder.release()

    def abandon(self) -> None:
        """Wait for the chunk that is under way, and forget it: such a pool takes no other request."""
        if self._sent is not None:
            self._sent = None
            self.pool.wait()

    def end(self) -> None:
        """Tell the recorders that no chunk follows; at least one was played."""
        clock = time.perf_counter()
        assert self.last is not None
        for recorder in self.recorders:
            recorder.end(self.last)
        self.lap("policy", clock)

    def lap(self, name: str, clock: float) -> float:
        """Count the time since ``clock`` as ``env`` or ``policy``; return the time now."""
        now = time.perf_counter()
        setattr(self.seconds, name, getattr(self.seconds, name) + now - clock)
        record("wait for simulators" if name == "env" else name, clock, now)
        return now

    def _send(self, active: NDArray[np.bool_]) -> None:
        clock = time.perf_counter()
        assert self.observation is not None
        output = self.choose(self.observation, active, self.number)
        # Not a local variable: `choose` may have reset the environments, where their simulators were lost.
        for recorder in self.recorders:
            output = recorder.before(self.observation, output)
        # Copied: a simulator that is restarted meanwhile writes into the memory of the observation.
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
    """Return the schedule of one episode in each of these environments, without auto-reset."""

    def schedule(play: Play) -> NDArray[np.bool_] | None:
        active = play.going & np.isin(np.arange(play.pool.spec.num_envs), rows)
        return active if active.any() else None

    return schedule


def take_turns(plays: Sequence[Play], should_stop: Callable[[], bool] = lambda: False) -> None:
    """Let the policy serve several plays in turn, each to its end: the simulators of the others work meanwhile.

    Raises:
        InterruptedError: ``should_stop`` answered True, with no chunk under way; it is asked before every turn of all.
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
    """A chunk that is under way; see PlayedChunk."""

    seen: Observation
    task_id: NDArray[np.int64]
    active: NDArray[np.bool_]
    output: PolicyOutput
