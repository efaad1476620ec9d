"""A group of environments that runs in lockstep, chunk by chunk, and its part of the batch.

Shapes: T policy steps (chunks), B environments of the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.stepping import REPLAY
from embodrl.errors import EnvError
from embodrl.fields import Fields
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.specs import LOSSES
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.outcomes import EndedEpisode, EpisodeStats, OutcomeRecorder
from embodrl.workers.play import Play, PlayedChunk, Recorder, Seconds, take_turns
from embodrl.workers.recorders import NOT_JUDGED, Judging, make_recorders


@dataclass(frozen=True)
class Shard:
    """One unit of work of a group of environments.

    Attributes:
        seeds, task_ids: ``int64[B]`` and ``int32[B]``, of the first episode of each environment.
        group_id: ``int64[B]``, equal where episodes begin in the same initial state.
        first: number of its first episode among those that are drawn with ``random``.
        points: ``int64[B]``, chunks before each episode starts, equal within a group; None starts all at resets.
    """

    iteration: int
    seeds: NDArray[np.int64]
    task_ids: NDArray[np.int32]
    group_id: Tensor
    random: Sequence[int]
    first: int = 0
    points: NDArray[np.int64] | None = None


class ReplayedPrefix(NamedTuple):
    """Actions executed before the policy acts: their number, and whether the episode ended, and began again."""

    steps: int
    ended: bool


class ShardMeta(TypedDict):
    """JSON-serialisable metadata of a shard, besides its columns.

    ``episodes`` and ``seconds`` are arguments of ``EpisodeStats`` and ``Seconds``; for ``counts`` and ``means`` see
    ``combine_extras``.
    """

    env_steps: NotRequired[int]
    episodes: dict[str, Any]
    seconds: dict[str, float]
    counts: NotRequired[dict[str, float]]
    means: NotRequired[dict[str, float]]


def shard_meta(batch: TrajectoryBatch, stats: EpisodeStats, seconds: Seconds) -> ShardMeta:
    """Return the metadata of a shard."""
    return {
        "env_steps": int(batch.valid.sum()),
        "episodes": stats.as_dict(),
        "seconds": dict(vars(seconds)),
    }


def meta_of(batch: TrajectoryBatch) -> ShardMeta:
    """Return a shard's ``shard_meta`` after transport through another process."""
    meta: ShardMeta = {"episodes": batch.meta["episodes"], "seconds": batch.meta["seconds"]}
    for name in ("env_steps", "counts", "means"):
        if name in batch.meta:
            meta[name] = batch.meta[name]
    return meta


def combine_extras(metas: Sequence[ShardMeta]) -> dict[str, float | None]:
    """Combine the further metrics of shards: ``counts`` are summed, ``means`` averaged."""
    result: dict[str, float | None] = {}
    for name in {name for meta in metas for name in meta.get("counts", {})}:
        result[name] = float(sum(meta.get("counts", {})[name] for meta in metas))
    for name in {name for meta in metas for name in meta.get("means", {})}:
        result[name] = sum(meta.get("means", {})[name] for meta in metas) / len(metas)
    return dict(sorted(result.items()))


class LockstepRunner:
    """Plays T chunks with the recorders that a run needs.

    Call ``begin``, then the turns of ``play``, then ``stack``; or ``roll_out``, which does all of it. Actions are
    sampled with ``generators``, one per engine thread; None uses the engine's own.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        engine: RolloutEngine,
        rows: slice,
        judging: Judging = NOT_JUDGED,
    ) -> None:
        self.config = config
        self.pool = pool
        self.engine = engine
        self.rows = rows
        self.generators: list[torch.Generator] | None = None
        self._needs_values = LOSSES.entry(config.algorithm.loss_type).needs_values
        self._outcomes = OutcomeRecorder(pool)
        recorders = [self._outcomes, *make_recorders(config, pool, engine, judging)]
        self.play = Play(pool, self._choose, recorders, self._schedule)

    @property
    def stats(self) -> EpisodeStats:
        """Episode outcomes of the current rollout."""
        return self._outcomes.stats

    @property
    def ended(self) -> list[EndedEpisode]:
        """Episodes that ended in the current rollout, numbered by the environments of the whole collector."""
        return [episode._replace(row=episode.row + self.rows.start) for episode in self._outcomes.ended]

    @property
    def seconds(self) -> Seconds:
        """Times of the current rollout."""
        return self.play.seconds

    def begin(
        self,
        seeds: NDArray[np.int64],
        tasks: NDArray[np.int32],
        generators: list[torch.Generator] | None = None,
    ) -> None:
        """Start fresh episodes with ``seeds int64[B]`` and ``tasks int32[B]``; ``generators`` as in the class."""
        self.generators = generators
        self.play.begin(seeds, tasks)

    def replay(
        self, seeds: NDArray[np.int64], prefixes: Mapping[int, NDArray[np.float32]]
    ) -> dict[int, ReplayedPrefix]:
        """Execute actions ``float32[n,A]`` in some environments, by row, before the policy acts.

        Call after ``begin``, with its seeds. Returns what was executed, by row; empty if a simulator was lost, whose
        episodes have then begun again.
        """
        clock = time.perf_counter()
        restarts = self.pool.faults.restarts
        answers = self.pool.set_row_states({row: {REPLAY: actions} for row, actions in prefixes.items()})
        self.play.start(seeds, self._observe())
        self.play.lap("env", clock)
        if self.pool.faults.restarts != restarts:
            return {}
        fields = {
            row: Fields(cast("Mapping[str, object]", answer), "a replay", EnvError) for row, answer in answers.items()
        }
        return {row: ReplayedPrefix(each.integer("steps"), each.flag("ended")) for row, each in fields.items()}

    def _observe(self) -> Observation:
        """Return the observation of restored states: that of a step of no environment."""
        spec = self.pool.spec
        nothing = np.zeros((spec.num_envs, self.config.model.num_action_chunks, spec.action_dim), np.float32)
        return self.pool.step(nothing, np.zeros(spec.num_envs, np.bool_)).observation

    def branch(self, points: NDArray[np.int64], should_stop: Callable[[], bool]) -> int:
        """Move each group to its leader's (first environment's) state after some chunks; return the simulated steps.

        Call after ``begin``. If the leader's episode ends earlier, they start at its last chunk, or at the reset. The
        way there is not recorded, but counts in episode returns and lengths. ``points int64[B]`` are numbers of chunks,
        equal within a group.

        Raises:
            InterruptedError: ``should_stop`` returned True; it is called before every chunk.
        """
        assert self.play.observation is not None
        every = np.arange(len(points))
        leader = every // self.config.algorithm.group_size * self.config.algorithm.group_size

        def schedule(play: Play) -> NDArray[np.bool_] | None:
            active = play.going & (every == leader) & (points > play.number)
            return active if active.any() else None

        states = _RowStates(self.pool, every[every == leader])
        prefix = Play(self.pool, self._choose_prefix, [states], schedule)
        prefix.start(every, self.play.observation)
        take_turns([prefix], should_stop)
        clock = time.perf_counter()
        # A leader whose process was lost has no state; its group then starts at the reset.
        known = [row for row in range(len(points)) if leader[row] in states.states]
        self.pool.set_row_states({row: states.states[int(leader[row])] for row in known})
        self.play.observation = self._observe()
        self.seconds.merge(prefix.seconds)
        self.play.lap("env", clock)
        return states.num_steps

    def roll_out(self, shard: Shard, should_stop: Callable[[], bool]) -> TrajectoryBatch:
        """Return all chunks of a shard, with ``shard_meta``; its ``env_steps`` include those before branch points.

        Raises:
            InterruptedError: ``should_stop``, called before every chunk, returned True.
        """
        if shard.points is not None:
            self.rebuild()  # then a state restored by replay has only one episode to replay
        # Sampling depends on the shard alone, not on the stage or its history.
        self.begin(shard.seeds, shard.task_ids, self.engine.make_generators(shard.random))
        prefix_steps = 0 if shard.points is None else self.branch(shard.points, should_stop)
        take_turns([self.play], should_stop)
        batch = self.stack(shard.group_id)
        batch.meta = dict(shard_meta(batch, self.stats, self.seconds))
        batch.meta["env_steps"] += prefix_steps
        return batch

    def rebuild(self) -> None:
        """Rebuild the environments to clear their history."""
        self.pool.call("rebuild", restart=True)

    def stack(self, group_id: Tensor) -> TrajectoryBatch:
        """Return the gathered batch; ``group_id int64[B]`` is equal for equal initial states."""
        self.play.end()
        clock = time.perf_counter()
        batch = stacked(self.play.recorders, group_id)
        self.play.lap("policy", clock)
        return batch

    def _schedule(self, play: Play) -> NDArray[np.bool_] | None:
        """Schedule T chunks of all environments; without auto-reset, only environments with running episodes act."""
        if play.number == self.config.rollout_chunks:
            return None
        return np.ones_like(play.going) if self.config.env.train.auto_reset else play.going

    def _choose(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        """Return the policy's output, computed for the acting environments only; zeros elsewhere."""
        rows = np.flatnonzero(active)
        if len(rows) == len(active):
            return self.engine.act(observation, self._needs_values, self.generators)
        if not len(rows):
            # No environment acts, but the batch has a row per chunk: the last output provides the shapes.
            assert self.play.last is not None
            return spread(self.play.last.output, rows, len(active), rows)
        output = self.engine.act(observation.select(rows), self._needs_values, self.generators)
        return spread(output, np.arange(len(rows)), len(active), rows)

    def _choose_prefix(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        """Return the leaders' actions, without values."""
        rows = np.flatnonzero(active)
        output = self.engine.act(observation.select(rows), False, self.generators)
        return spread(output, np.arange(len(rows)), len(active), rows)


class _RowStates(Recorder):
    """Keeps the newest state of environments whose episodes continue."""

    def __init__(self, pool: EnvPool, rows: NDArray[np.int64]) -> None:
        self.pool = pool
        self.states: dict[int, object] = pool.get_row_states(rows.tolist())
        self.num_steps = 0

    def after(self, chunk: PlayedChunk) -> None:
        self.states |= self.pool.get_row_states(np.flatnonzero(chunk.going).tolist())
        self.num_steps += int(chunk.step.valid.sum())


def stacked(recorders: Sequence[Recorder], group_id: Tensor) -> TrajectoryBatch:
    """Return what recorders kept of T chunks as a batch; ``group_id int64[B]`` is as in ``Shard``."""
    columns: dict[str, Any] = {}
    for recorder in recorders:  # later recorders override earlier ones, e.g. on who acted
        columns |= recorder.columns()
    # A group of columns is added to the batch by name, see below.
    expert = columns.pop("expert", None)
    columns["group_id"] = group_id.expand(columns["task_id"].shape)
    batch = TrajectoryBatch.from_rollout(**columns)
    if expert is not None:
        batch["expert"] = expert
    return batch


def spread(output: PolicyOutput, rows: NDArray[np.int64], batch: int, places: NDArray[np.int64]) -> PolicyOutput:
    """Expand an output to ``batch`` environments: given rows at their positions, zeros elsewhere."""
    source = torch.from_numpy(rows)
    target = torch.from_numpy(places)

    def spread(x: Tensor) -> Tensor:
        whole = x.new_zeros((batch, *x.shape[1:]))
        whole[target] = x[source.to(x.device)]
        return whole

    actions = np.zeros((batch, *output.actions.shape[1:]), output.actions.dtype)
    actions[places] = output.actions[rows]
    return replace(
        output,
        actions=actions,
        logprobs=spread(output.logprobs),
        values=None if output.values is None else spread(output.values),
        forward_inputs={name: spread(tensor) for name, tensor in output.forward_inputs.items()},
    )
