"""Attempts at tasks by experts or a policy, one action at a time.

Shapes: B environments, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodrl.config.schema import CollectConfig, Config
from embodrl.data.demos import ACTED_BY, EXECUTED, LOG_PROB, POLICY_VERSION, REWARD, TERMINATED, DemoEpisode, Outcomes
from embodrl.data.replay import POLICY
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvTimeout, EnvWorkerDied
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.types import TOKEN_MASK, Observation, PolicyOutput
from embodrl.workers.play import Play, PlayedChunk, Recorder, take_turns

MAX_PLAYS = 3
"""How often an attempt is played whose simulator process dies."""
_FREE_ROW = -1
_STREAM = 1  # simulators draw from their seeds, too
SHOWN = "action"
"""Key in ``PolicyOutput.forward_inputs``: demonstrated action, ``float32[B,A]``, if it differs from the executed one.
"""


class Demonstrator(ABC):
    """Chooses single actions ``float32[B,1,A]``; ``forward_inputs`` holds further columns of the demonstration.

    Both methods raise EnvWorkerDied or EnvTimeout when a simulator process is lost.
    """

    @abstractmethod
    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        """Handle the start of attempts with ``seeds int64[n]`` in ``rows int64[n]``."""

    @abstractmethod
    def __call__(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        """Choose the next action of every environment (a ``Choose``)."""


class Experts(Demonstrator):
    """The scripted experts of a simulator, slowed down and perturbed (``float32[B]``) according to ``collect``.

    Speed and noise of an attempt depend only on its seed.
    """

    def __init__(self, settings: CollectConfig, pool: EnvPool) -> None:
        self.settings = settings
        self.pool = pool
        self.noise_std = np.zeros(pool.spec.num_envs, np.float32)
        self.speed = np.ones(pool.spec.num_envs, np.float32)
        self._random = [np.random.default_rng(0) for _ in range(pool.spec.num_envs)]

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            self._random[row] = rng = np.random.default_rng([seed, _STREAM])
            self.noise_std[row] = self.settings.noise_std if rng.random() < self.settings.noise_fraction else 0.0
            if self.settings.min_speed < 1:
                self.speed[row] = rng.uniform(self.settings.min_speed, self.settings.max_speed)
        self.pool.expert_reset(rows)

    def __call__(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        expert = self.pool.expert_actions()
        expert[:, :-1] *= self.speed[:, None]  # the gripper is not slowed down
        drawn = np.stack([rng.standard_normal(expert.shape[1]) for rng in self._random])
        noise = drawn.astype(np.float32) * self.noise_std[:, None]
        noise[:, -1] = 0  # a perturbed gripper would drop the object
        executed = np.clip(expert + noise, -1, 1).astype(np.float32)
        return _output(executed, {SHOWN: expert})


class StepwiseActor(Demonstrator):
    """A policy that acts one action at a time: it is queried when its chunk is used up or an episode begins.

    Args:
        sample: sample actions, as rollouts do, instead of taking the most probable ones.
        seed: of the samples, which then depend only on it, the attempt's seed and the chunk's number if the policy
            draws by row; None draws from the engine's generators.
    """

    def __init__(self, engine: RolloutEngine, num_envs: int, sample: bool, seed: int | None = None) -> None:
        self.engine = engine
        self.sample = sample
        self.seed = seed
        self._seeds = np.zeros(num_envs, np.int64)  # of the attempts
        self._chunks = np.zeros(num_envs, np.int64)  # chunks that the attempts have queried
        self._versions = np.zeros(num_envs, np.int64)  # policy version of the last actions
        self._left: list[list[tuple[NDArray[np.float32], np.float32 | None]]] = [[] for _ in range(num_envs)]

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        self._seeds[rows] = seeds
        self._chunks[rows] = 0
        self.replan(rows)

    def replan(self, rows: NDArray[np.int64]) -> None:
        """Drop the rest of the chunks in ``rows``."""
        for row in rows:
            self._left[row] = []

    def __call__(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        acting = np.flatnonzero(active)
        empty = np.array([row for row in acting if not self._left[row]], np.int64)
        if len(empty):
            output = self._query(observation.select(empty), empty)
            self._versions[empty] = output.version
            for row, chunk, each in zip(empty, output.actions, self._log_probs(output), strict=True):
                self._left[row] = list(zip(chunk, each, strict=True))
        actions, log_probs = zip(*(self._left[row].pop(0) for row in acting), strict=True)
        columns: dict[str, NDArray[np.generic]] = {}
        if None not in log_probs:
            columns[LOG_PROB] = _spread(np.array(log_probs), active)
        columns |= {POLICY_VERSION: self._versions.copy(), ACTED_BY: np.full(len(active), POLICY, np.int64)}
        return _output(_spread(np.stack(actions), active), columns)

    def _query(self, observation: Observation, rows: NDArray[np.int64]) -> PolicyOutput:
        if not self.sample:
            return self.engine.decide(observation, "greedy")
        if self.seed is None:
            return self.engine.act(observation, False)
        numbers = [(self.seed, int(self._seeds[row]), int(self._chunks[row])) for row in rows]
        self._chunks[rows] += 1
        return self.engine.act(observation, False, self.engine.row_generators(numbers))

    def _log_probs(self, output: PolicyOutput) -> NDArray[Any]:
        """Return ``float32[B,C]``; None if log-probs belong to whole-chunk tokens, or nothing was sampled."""
        if not self.sample or TOKEN_MASK in output.forward_inputs:
            return np.full(output.actions.shape[:2], None)
        return output.logprobs.sum(dim=2).float().cpu().numpy()


def _spread(values: NDArray[Any], active: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the values ``[n,...]`` of the n active environments as ``[B,...]``, 0 elsewhere."""
    spread = np.zeros((len(active), *values.shape[1:]), values.dtype)
    spread[active] = values
    return spread


def _output(executed: NDArray[np.float32], columns: dict[str, NDArray[np.generic]]) -> PolicyOutput:
    known = {name: torch.from_numpy(values) for name, values in columns.items()}
    return PolicyOutput(executed[:, None], torch.zeros(len(executed), 1, 0), None, known)


Assign = Callable[[NDArray[np.int64]], "tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]"]
"""From free environments to those that begin an attempt now, its seeds, and its tasks; the others wait."""


class Attempts(Recorder):
    """Plays one attempt in every environment, starts another whenever one ends, and keeps the steps.

    An attempt that a fault ended is replaced like any other. If a simulator process is lost between two steps, all
    attempts start over: no step result tells which of them that process ran.

    Args:
        pool: started pool, without auto-reset.
        assign: chooses new attempts; environments without one are idle, and are offered again before every step.
        acted: names of the columns that record how actions were chosen, besides log-probs.

    Attributes:
        seeds, task_ids: ``int64[B]`` and ``int32[B]``, of the current attempts.
    """

    def __init__(
        self,
        pool: EnvPool,
        actor: Demonstrator,
        assign: Assign,
        keeper: Recorder,
        acted: Sequence[str] = (),
    ) -> None:
        self.pool = pool
        self.actor = actor
        self.assign = assign
        self.acted = acted
        self._every = np.arange(pool.spec.num_envs)
        self.seeds = np.zeros(pool.spec.num_envs, np.int64)
        self.task_ids = np.zeros(pool.spec.num_envs, np.int32)
        self._idle = np.zeros(pool.spec.num_envs, np.bool_)
        self._instructions: list[str] = []
        self._steps: list[list[dict[str, NDArray[np.generic]]]] = [[] for _ in self._every]
        self._is_over: Callable[[], bool] = lambda: False
        self._play = Play(pool, self._choose, [self, keeper], self._schedule)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Play until ``is_over``, called before every step, returns True; at least one attempt runs until then.

        Raises:
            EmbodrlError: the simulators fail too often.
        """
        self._is_over = is_over
        take_turns([self._play])

    def _schedule(self, play: Play) -> NDArray[np.bool_] | None:
        free = self._every if play.last is None else np.flatnonzero(self._idle | play.last.step.done)
        if self._is_over():
            return None
        if len(free):
            self._begin(free)
        return ~self._idle

    def _begin(self, rows: NDArray[np.int64]) -> Observation:
        restarts = self.pool.faults.restarts
        begun, seeds, tasks = self.assign(rows)
        self._idle[rows] = True
        self._idle[begun] = False
        self.seeds[begun] = seeds
        self.task_ids[begun] = tasks
        # A pool tracks the episodes of all environments: idle ones must have begun one, too.
        fresh = rows if len(rows) == len(self._every) else begun
        for row in fresh:
            self._steps[row] = []
        if len(fresh):
            self._play.observation = self.pool.reset(self.seeds[fresh], self.task_ids[fresh], fresh)
        assert self._play.observation is not None
        # A restarted process has restarted all its episodes, and no step result says so.
        if self.pool.faults.restarts == restarts:
            try:
                if len(begun):
                    self.actor.begin(begun, self.seeds[begun])
                return self._play.observation
            except (EnvWorkerDied, EnvTimeout):
                pass  # the next reset restarts it
        return self._begin(np.flatnonzero(~self._idle))

    def _choose(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        try:
            return self.actor(observation, active, number)
        except (EnvWorkerDied, EnvTimeout):
            return self._choose(self._begin(np.flatnonzero(~self._idle)), active, number)

    def before(self, observation: Observation, output: PolicyOutput) -> PolicyOutput:
        self._instructions = list(observation.instruction)
        known = {name: tensor.numpy() for name, tensor in output.forward_inputs.items()}
        columns = {"images": observation.images, "state": observation.state, EXECUTED: output.actions[:, 0], **known}
        for row in np.flatnonzero(~self._idle):
            self._steps[row].append({name: np.array(values[row]) for name, values in columns.items()})
        return output

    def after(self, chunk: PlayedChunk) -> None:
        for row in np.flatnonzero(chunk.active):
            self._steps[row][-1] |= {
                REWARD: np.array(chunk.step.reward[row, 0]),
                TERMINATED: np.array(chunk.step.terminated[row, 0]),
            }

    def episode(self, row: int, success: bool, name: str | None = None) -> DemoEpisode:
        """Return the attempt of an environment as ``DemoEpisode``, with ``success`` and the id ``name``."""
        steps = self._steps[row]
        columns: dict[str, Any] = {
            key: np.stack([step[key] for step in steps]) for key in steps[-1] if all(key in step for step in steps)
        }
        executed = columns[EXECUTED].astype(np.float32)
        return DemoEpisode(
            columns["images"],
            columns["state"],
            columns.get(SHOWN, executed),
            self._instructions[row],
            self.pool.spec.tasks[self.task_ids[row]],
            int(self.seeds[row]),
            success,
            Outcomes(executed, columns[REWARD], columns[TERMINATED], columns.get(LOG_PROB)),
            {key: columns[key] for key in self.acted},
            name,
        )


@dataclass(frozen=True)
class Attempted:
    """Outcome of an attempt.

    Attributes:
        number: number of the attempt.
        success: whether the task was solved; None if faults of the simulator ended the attempt.
        episode: its demonstration, if it may be kept.
    """

    number: int
    success: bool | None
    episode: DemoEpisode | None = None


class NumberedAttempts(Recorder):
    """Plays numbered attempts at the T tasks of a pool: number n has the seed ``collect.seed`` + n and task n mod T.

    An attempt that was lost with its simulator process is played again, up to ``MAX_PLAYS`` times.

    Args:
        config: run configuration; section ``collect``.
        pool: started pool, without auto-reset.
        policy: engine of the policy that acts; None for the experts.
        take: returns at most this many numbers to play next.
        report: receives the outcomes.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        policy: RolloutEngine | None,
        take: Callable[[int], Sequence[int]],
        report: Callable[[Attempted], None],
    ) -> None:
        self.settings = settings = config.collect
        size = pool.spec.num_envs
        actor = (
            Experts(settings, pool)
            if policy is None
            else StepwiseActor(policy, size, settings.sample, config.runner.seed)
        )
        self._take = take
        self._report = report
        self._numbers = np.full(size, _FREE_ROW)
        self._plays = np.zeros(size, np.int64)
        self._restarts = 0
        self._attempts = Attempts(pool, actor, self._assign, self)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Play until ``is_over``, called before every step, returns True; see ``Attempts.run``."""
        self._attempts.run(is_over)

    def _assign(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        free = rows[self._numbers[rows] == _FREE_ROW]
        taken = self._take(len(free)) if len(free) else []
        self._numbers[free[: len(taken)]] = taken
        self._plays[free] = 0
        begun = rows[self._numbers[rows] != _FREE_ROW]
        self._plays[begun] += 1
        numbers = self._numbers[begun]
        tasks = numbers % len(self._attempts.pool.spec.tasks)
        return begun, self.settings.seed + numbers, tasks.astype(np.int32)

    def before(self, observation: Observation, output: PolicyOutput) -> PolicyOutput:
        self._restarts = self._attempts.pool.faults.restarts
        return output

    def after(self, chunk: PlayedChunk) -> None:
        restarted = self._attempts.pool.faults.restarts != self._restarts
        lost, ended = chunk.lost, chunk.ended
        # By number, so that each step's outcomes arrive in order.
        for row in np.argsort(self._numbers, kind="stable").tolist():
            if ended[row]:
                self._finish(row, bool(chunk.step.success[row]))
            elif lost[row] and not (restarted and self._plays[row] < MAX_PLAYS):
                self._finish(row, None)

    def _finish(self, row: int, success: bool | None) -> None:
        is_kept = success or (success is not None and self.settings.keep_failures)
        episode = self._attempts.episode(row, bool(success)) if is_kept else None
        number = int(self._numbers[row])
        self._numbers[row] = _FREE_ROW
        self._report(Attempted(number, success, episode))
