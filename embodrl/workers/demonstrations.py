"""Attempts at tasks by experts or a policy, one action at a time, and the collection of successful episodes.

Shapes: B environments, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodrl.config.identity import changes, describe, record_of, settings_read
from embodrl.config.schema import CollectConfig, Config
from embodrl.data.dataset_writer import DatasetWriter
from embodrl.data.demos import ACTED_BY, EXECUTED, LOG_PROB, POLICY_VERSION, REWARD, TERMINATED, DemoEpisode, Outcomes
from embodrl.data.replay import POLICY
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError, EnvError, EnvTimeout, EnvWorkerDied
from embodrl.fields import Fields
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.reporting.progress import Progress
from embodrl.types import TOKEN_MASK, Observation, PolicyOutput
from embodrl.workers.play import Play, PlayedChunk, Recorder, take_turns
from embodrl.workers.policy import RecordedPolicy

logger = logging.getLogger(__name__)

MAX_ATTEMPTS_PER_EPISODE = 10
COMMIT_EPISODES = 50
"""Commit interval in episodes: a kill loses at most this many."""
SHOWN = "action"
"""Key in ``PolicyOutput.forward_inputs``: demonstrated action, ``float32[B,A]``, if it differs from the executed one.
"""


_FREE = (r"collect\.(num_episodes|output_dir)", r"env\.train\.total_num_envs")
"""Settings that may change when an interrupted collection continues."""


class Demonstrator(ABC):
    """Chooses single actions ``float32[B,1,A]``; ``forward_inputs`` holds further columns of the demonstration.

    Both methods raise EnvWorkerDied or EnvTimeout when a simulator process is lost.
    """

    @abstractmethod
    def begin(self, rows: NDArray[np.int64]) -> None:
        """Handle the start of attempts in ``rows``."""

    @abstractmethod
    def __call__(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        """Choose the next action of every environment (a ``Choose``)."""


class Experts(Demonstrator):
    """The scripted experts of a simulator, slowed down and perturbed (``float32[B]``) according to ``collect``."""

    def __init__(self, settings: CollectConfig, pool: EnvPool, rng: np.random.Generator) -> None:
        self.settings = settings
        self.pool = pool
        self.rng = rng
        self.noise_std = np.zeros(pool.spec.num_envs, np.float32)
        self.speed = np.ones(pool.spec.num_envs, np.float32)

    def begin(self, rows: NDArray[np.int64]) -> None:
        for row in rows:
            noisy = self.rng.random() < self.settings.noise_fraction
            self.noise_std[row] = self.settings.noise_std if noisy else 0.0
            if self.settings.min_speed < 1:
                self.speed[row] = self.rng.uniform(self.settings.min_speed, self.settings.max_speed)
        self.pool.expert_reset(rows)

    def __call__(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        expert = self.pool.expert_actions()
        expert[:, :-1] *= self.speed[:, None]  # the gripper is not slowed down
        noise = self.rng.standard_normal(expert.shape).astype(np.float32) * self.noise_std[:, None]
        noise[:, -1] = 0  # a perturbed gripper would drop the object
        executed = np.clip(expert + noise, -1, 1).astype(np.float32)
        return _output(executed, {SHOWN: expert})


class StepwiseActor(Demonstrator):
    """A policy that acts one action at a time: it is queried when its chunk is used up or an episode begins.

    With ``sample`` it samples actions, as rollouts do, instead of taking the most probable ones.
    """

    def __init__(self, engine: RolloutEngine, num_envs: int, sample: bool) -> None:
        self.engine = engine
        self.sample = sample
        self._versions = np.zeros(num_envs, np.int64)  # policy version of the last actions
        self._left: list[list[tuple[NDArray[np.float32], np.float32 | None]]] = [[] for _ in range(num_envs)]

    def begin(self, rows: NDArray[np.int64]) -> None:
        for row in rows:
            self._left[row] = []

    def __call__(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        empty = np.array([row for row, left in enumerate(self._left) if not left], np.int64)
        if len(empty):
            asked = observation.select(empty)
            output = self.engine.act(asked, False) if self.sample else self.engine.decide(asked, "greedy")
            self._versions[empty] = output.version
            for row, chunk, each in zip(empty, output.actions, self._log_probs(output), strict=True):
                self._left[row] = list(zip(chunk, each, strict=True))
        actions, log_probs = zip(*(left.pop(0) for left in self._left), strict=True)
        columns: dict[str, NDArray[np.generic]] = {} if None in log_probs else {LOG_PROB: np.array(log_probs)}
        columns |= {POLICY_VERSION: self._versions.copy(), ACTED_BY: np.full(len(actions), POLICY, np.int64)}
        return _output(np.stack(actions), columns)

    def _log_probs(self, output: PolicyOutput) -> NDArray[Any]:
        """Return ``float32[B,C]``; None if log-probs belong to whole-chunk tokens, or nothing was sampled."""
        if not self.sample or TOKEN_MASK in output.forward_inputs:
            return np.full(output.actions.shape[:2], None)
        return output.logprobs.sum(dim=2).float().cpu().numpy()


def _output(executed: NDArray[np.float32], columns: dict[str, NDArray[np.generic]]) -> PolicyOutput:
    known = {name: torch.from_numpy(values) for name, values in columns.items()}
    return PolicyOutput(executed[:, None], torch.zeros(len(executed), 1, 0), None, known)


class Attempts(Recorder):
    """Plays one attempt in every environment, starts another whenever one ends, and keeps the steps.

    An attempt that a fault ended is replaced like any other. If a simulator process is lost between two steps, all
    attempts start over: no step result tells which of them that process ran.

    Args:
        pool: started pool, without auto-reset.
        assign: returns the seeds and tasks of new attempts in some environments.
        acted: names of the columns that record how actions were chosen, besides log-probs.

    Attributes:
        seeds, task_ids: ``int64[B]`` and ``int32[B]``, of the current attempts.
    """

    def __init__(
        self,
        pool: EnvPool,
        actor: Demonstrator,
        assign: Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.int32]]],
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
        self._instructions: list[str] = []
        self._steps: list[list[dict[str, NDArray[np.generic]]]] = [[] for _ in self._every]
        self._is_over: Callable[[], bool] = lambda: False
        self._play = Play(pool, self._choose, [self, keeper], self._schedule)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Play until ``is_over``, called before every step, returns True.

        Raises:
            EmbodrlError: the simulators fail too often.
        """
        self._is_over = is_over
        take_turns([self._play])

    def _schedule(self, play: Play) -> NDArray[np.bool_] | None:
        ended = self._every if play.last is None else np.flatnonzero(play.last.step.done)
        if len(ended):
            self._begin(ended)
        return None if self._is_over() else np.ones(len(self._every), np.bool_)

    def _begin(self, rows: NDArray[np.int64]) -> Observation:
        restarts = self.pool.faults.restarts
        self.seeds[rows], self.task_ids[rows] = self.assign(rows)
        for row in rows:
            self._steps[row] = []
        self._play.observation = observation = self.pool.reset(self.seeds[rows], self.task_ids[rows], rows)
        # A restarted process has restarted all its episodes, and no step result says so.
        if self.pool.faults.restarts == restarts:
            try:
                self.actor.begin(rows)
                return observation
            except (EnvWorkerDied, EnvTimeout):
                pass  # the next reset restarts it
        return self._begin(self._every)

    def _choose(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        try:
            return self.actor(observation, active, number)
        except (EnvWorkerDied, EnvTimeout):
            return self._choose(self._begin(self._every), active, number)

    def before(self, observation: Observation, output: PolicyOutput) -> PolicyOutput:
        self._instructions = list(observation.instruction)
        known = {name: tensor.numpy() for name, tensor in output.forward_inputs.items()}
        columns = {"images": observation.images, "state": observation.state, EXECUTED: output.actions[:, 0], **known}
        for row, steps in enumerate(self._steps):
            steps.append({name: np.array(values[row]) for name, values in columns.items()})
        return output

    def after(self, chunk: PlayedChunk) -> None:
        for row, steps in enumerate(self._steps):
            steps[-1] |= {
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


def collection_settings(config: Config, policy: RecordedPolicy | None) -> dict[str, object]:
    """Return the settings that episodes depend on, by key; ``policy`` is the actor, null for the experts."""
    settings = settings_read(config, "collect" if policy is None else "record", _FREE)
    acting = {"policy": None} if policy is None else {"policy": policy.name, "policy.weights": policy.fingerprint}
    return {**acting, **settings}


def _older_settings(content: Mapping[str, object]) -> dict[str, object]:
    """Return, by key, the settings recorded by collections that predate the complete record."""
    found = {f"collect.{name}": value for name, value in content.items() if name not in ("env", "tasks", "policy")}
    return found | {
        "env.env_type": content.get("env"),
        "env.tasks": content.get("tasks"),
        "policy": content.get("policy"),
    }


class DemoCollector(Recorder):
    """Has experts or a policy attempt a pool's tasks until enough episodes have succeeded.

    Args:
        config: run configuration; section ``collect``.
        pool: started pool, without auto-reset.
        writer: episode writer; episodes of the interrupted collection that it continues count.
        should_stop: called before every step; if it returns True, ``run`` ends early.

    Attributes:
        kept, tried, solved: ``int64[T]``, episodes of each task that were kept, completed, and successful.
        lost: ``int64[T]``, episodes ended by a fault.

    Raises:
        EmbodrlError: the interrupted collection has other settings.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        writer: DatasetWriter,
        should_stop: Callable[[], bool] = lambda: False,
        policy: RecordedPolicy | None = None,
    ) -> None:
        self.settings = config.collect
        self._env_type = config.env.env_type
        self._policy = None if policy is None else policy.name
        self._identity = collection_settings(config, policy)
        self.tasks = pool.spec.tasks
        self.writer = writer
        self.should_stop = should_stop
        self.attempts = 0
        self.kept = np.zeros(len(self.tasks), np.int64)
        self.tried = np.zeros(len(self.tasks), np.int64)
        self.solved = np.zeros(len(self.tasks), np.int64)
        self.lost = np.zeros(len(self.tasks), np.int64)
        self.wanted = np.array(
            [len(part) for part in np.array_split(np.arange(self.settings.num_episodes), len(self.tasks))]
        )
        if writer.progress is not None:
            self._continue(writer.progress)
        self._play = Attempts(pool, self._make_actor(config, pool, policy), self._assign, self)
        self._tell: Callable[[int, str], None] = lambda done, note: None

    def _continue(self, progress: Fields) -> None:
        record: Mapping[str, object] = progress.fields("identity", {}).content
        now = self._identity
        if not record:
            logger.warning("an earlier version started the collection and recorded only some of its settings")
            record = {"settings": _older_settings(progress.fields("settings").content)}
            now = now | {"env.tasks": list(self.tasks)}
        if changed := changes(record, now):
            raise EmbodrlError(
                f"{self.writer.staging} holds an interrupted collection with other settings: {describe(changed)}",
                f"continue it with its original settings, or remove it: rm -r {self.writer.staging}",
                code="collect-other-settings",
            )
        self.attempts = progress.integer("attempts")
        for name in ("kept", "tried", "solved", "lost"):
            getattr(self, name)[:] = progress.numbers(name, len(self.tasks))

    def _make_actor(self, config: Config, pool: EnvPool, policy: RecordedPolicy | None) -> Demonstrator:
        if policy is None:
            seed = self.settings.seed
            continued = self.writer.progress is not None
            return Experts(self.settings, pool, np.random.default_rng([seed, self.attempts] if continued else seed))
        engine = policy.engine
        engine.generators = engine.make_generators([config.runner.seed, self.attempts])
        return StepwiseActor(engine, pool.spec.num_envs, self.settings.sample)

    def commit(self) -> None:
        """Make the episodes so far durable, so that another process can continue the collection."""
        counts = {name: getattr(self, name).tolist() for name in ("kept", "tried", "solved", "lost")}
        self.writer.commit({"identity": record_of(self._identity), "attempts": self.attempts, **counts})

    @property
    def finished(self) -> bool:
        """Whether every task has enough episodes."""
        return bool((self.kept >= self.wanted).all())

    def run(self, progress: Progress) -> None:
        """Collect until every task has enough episodes or a stop is requested.

        Raises:
            EmbodrlError: the experts or the simulator fail too often.
        """
        self._tell = progress.update
        self._play.run(lambda: self.finished or self.should_stop())

    def _assign(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        missing = (self.wanted - self.kept).astype(np.float64)
        tasks = np.zeros(len(rows), np.int32)
        for place in range(len(rows)):
            tasks[place] = np.argmax(missing)
            missing[tasks[place]] -= 1
        seeds = self.settings.seed + self.attempts + np.arange(len(rows))
        self.attempts += len(rows)
        return seeds, tasks

    def after(self, chunk: PlayedChunk) -> None:
        for row in np.flatnonzero(chunk.ended):
            self._keep(int(row), bool(chunk.step.success[row]))
        np.add.at(self.lost, self._play.task_ids[chunk.lost], 1)
        self._tell(int(self.kept.sum()), f"success {self.solved.sum() / max(self.tried.sum(), 1):.0%}")
        if chunk.step.done.any():
            self._refuse_failing_actors()
            self._refuse_losing_simulators()

    def _keep(self, row: int, success: bool) -> None:
        task = self._play.task_ids[row]
        self.tried[task] += 1
        self.solved[task] += success
        if not (success or self.settings.keep_failures) or self.kept[task] >= self.wanted[task]:
            return
        self.kept[task] += 1
        self.writer.add(self._play.episode(row, success))
        if self.kept.sum() % COMMIT_EPISODES == 0:
            self.commit()

    def _refuse_failing_actors(self) -> None:
        failing = (self.tried > 50) & (self.tried > MAX_ATTEMPTS_PER_EPISODE * self.solved)
        if self.settings.keep_failures or not failing.any():
            return
        names = ", ".join(np.array(self.tasks)[failing])
        if self._policy is not None:
            raise EmbodrlError(
                f"the policy fails more than 9 times in 10 on {names}",
                "set collect.keep_failures=true to record its failures as well",
                code="policy-fails",
            )
        raise EmbodrlError(
            f"the expert fails more than 9 times in 10 on {names}",
            "lower collect.noise_std, or raise env.max_episode_steps",
            code="expert-fails",
        )

    def _refuse_losing_simulators(self) -> None:
        losing = (self.lost > 50) & (self.lost > (MAX_ATTEMPTS_PER_EPISODE - 1) * self.tried)
        if losing.any():
            names = ", ".join(np.array(self.tasks)[losing])
            raise EnvError(
                f"the simulator loses more than 9 episodes in 10 of {names} to faults",
                "the warnings above list them; see the logs of the simulator processes",
                code="too-many-faults",
            )

    def close(self, meta: dict[str, object]) -> None:
        """Complete the dataset, with the actor's success rate over all completed episodes."""
        who = "expert" if self._policy is None else "policy"
        known: dict[str, object] = {"robot_type": self._env_type, "collect": self.settings.model_dump()}
        known |= {f"{who}_success_rate": self.success_rate(), **meta}
        known |= {} if self._policy is None else {"policy": self._policy}
        self.writer.close(known | {"stopped_early": not self.finished})

    def success_rate(self) -> dict[str, float | None]:
        """Return the fraction of solved episodes by task; None where no episode was completed."""
        counts = zip(self.tasks, self.solved.tolist(), self.tried.tolist(), strict=True)
        return {task: solved / tried if tried else None for task, solved, tried in counts}
