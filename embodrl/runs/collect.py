"""`embodrl collect`: demonstrations by scripted experts, perturbed so that they show recovery, or by a policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.data.dataset_writer import DatasetWriter
from embodrl.data.demos import REWARDS, DemoEpisode, Outcomes
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.raw import RawWriter
from embodrl.deployment import ProcessPlace
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError, EnvError, EnvTimeout, EnvWorkerDied
from embodrl.fields import Fields
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.learners.replay import reward_settings
from embodrl.models.base import VLAPolicy
from embodrl.reporting.progress import Progress
from embodrl.trainer.stop import StopSignal
from embodrl.types import TOKEN_MASK, EnvSpec, Observation, PolicyOutput
from embodrl.workers.env import check_simulator, make_pool
from embodrl.workers.policy import build_policy, check_memory, configure_torch, num_threads

MAX_ATTEMPTS_PER_EPISODE = 10
COMMIT_EPISODES = 50
"""After so many episodes what was collected is committed, so that a kill costs no more."""


class StepwiseActor:
    """A policy one action at a time: it is asked again where its chunk is used up, or an episode begins.

    Args:
        engine: the policy.
        num_envs: B.
        sample: draw actions, as rollouts do, instead of taking the most probable ones.

    Attributes:
        versions: for each environment, number of updates behind the weights that chose its last action.
    """

    def __init__(self, engine: RolloutEngine, num_envs: int, sample: bool) -> None:
        self.engine = engine
        self.sample = sample
        self.versions = [0] * num_envs
        self._left: list[list[tuple[NDArray[np.float32], np.float32 | None]]] = [[] for _ in range(num_envs)]

    def begin(self, rows: NDArray[np.int64]) -> None:
        """Forget the chunks of environments whose episodes begin."""
        for row in rows:
            self._left[row] = []

    def act(self, observation: Observation) -> tuple[NDArray[np.float32], list[np.float32 | None]]:
        """Return the next actions ``float32[B,A]``, and their log-probs where the policy tells them, in nats."""
        empty = np.array([row for row, left in enumerate(self._left) if not left], np.int64)
        if len(empty):
            asked = observation.select(empty)
            output = self.engine.act(asked, False) if self.sample else self.engine.decide(asked, "greedy")
            each = self._log_probs(output)
            for number, row in enumerate(empty):
                known = [None] * len(output.actions[number]) if each is None else list(each[number])
                self._left[row] = list(zip(output.actions[number], known, strict=True))
                self.versions[row] = output.version
        actions, log_probs = zip(*(left.pop(0) for left in self._left), strict=True)
        return np.stack(actions), list(log_probs)

    def _log_probs(self, output: PolicyOutput) -> NDArray[np.float32] | None:
        """Return ``float32[B,C]``; None of tokens that stand for a whole chunk, and where nothing was drawn."""
        drawn = self.sample and TOKEN_MASK not in output.forward_inputs
        return output.logprobs.sum(dim=2).float().cpu().numpy() if drawn else None


class DemoCollector:
    """Runs experts, or a policy, in all environments of a pool until enough episodes have succeeded.

    Args:
        config: the run; section ``collect``.
        pool: started, without auto-reset.
        writer: takes the episodes; an interrupted collection that it continues counts.
        should_stop: asked before every step; if it answers True, ``run`` ends early.
        policy: acts instead of the experts.

    Attributes:
        kept, tried, solved: ``int64[T]``, episodes of each task that were kept, completed, and successful.
        lost: ``int64[T]``, episodes that a fault has ended.

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
        self.rewards = reward_settings(config)
        # A collection continues with the number of episodes changed only.
        settings = self.settings.model_dump(mode="json", exclude={"num_episodes", "output_dir"})
        self._settings = {"env": config.env.env_type, "tasks": list(pool.spec.tasks), **settings}
        self._settings |= {} if policy is None else {"policy": policy.name}
        self.pool = pool
        self.tasks = pool.spec.tasks
        self.writer = writer
        self.should_stop = should_stop
        self.rng = np.random.default_rng(self.settings.seed)
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
        num_envs = pool.spec.num_envs
        self.policy = None
        if policy is not None:
            engine = policy.engine
            engine.generators = engine.make_generators([config.runner.seed, self.attempts])
            self.policy = StepwiseActor(engine, num_envs, self.settings.sample)
        self.frames: list[list[tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]]] = [
            [] for _ in range(num_envs)
        ]
        self.outcomes: list[list[tuple[NDArray[np.float32], np.float32, np.bool_, np.float32 | None]]] = [
            [] for _ in range(num_envs)
        ]
        self.seeds = np.zeros(num_envs, np.int64)
        self.task_ids = np.zeros(num_envs, np.int32)
        self.noise_std = np.zeros(num_envs, np.float32)
        self.speed = np.ones(num_envs, np.float32)

    def _continue(self, progress: Fields) -> None:
        earlier = progress.fields("settings").content
        if changed := [name for name, value in self._settings.items() if earlier.get(name) != value]:
            raise EmbodrlError(
                f"{self.writer.staging} holds an interrupted collection with other settings: {', '.join(changed)}",
                f"continue it with its own settings, or remove it: rm -r {self.writer.staging}",
                code="collect-other-settings",
            )
        self.attempts = progress.integer("attempts")
        for name in ("kept", "tried", "solved", "lost"):
            getattr(self, name)[:] = progress.numbers(name, len(self.tasks))
        self.rng = np.random.default_rng([self.settings.seed, self.attempts])

    def commit(self) -> None:
        """Make the episodes so far survive the end of this process, for another one to continue."""
        counts = {name: getattr(self, name).tolist() for name in ("kept", "tried", "solved", "lost")}
        self.writer.commit({"settings": self._settings, "attempts": self.attempts, **counts})

    def begin(self, rows: NDArray[np.int64]) -> Observation:
        """Start new attempts in ``rows``, of the tasks that lack most."""
        missing = (self.wanted - self.kept).astype(np.float64)
        for row in rows:
            task = int(np.argmax(missing))
            missing[task] -= 1
            self.task_ids[row] = task
            self.seeds[row] = self.settings.seed + self.attempts
            self.attempts += 1
            noisy = self.rng.random() < self.settings.noise_fraction
            self.noise_std[row] = self.settings.noise_std if noisy else 0.0
            if self.settings.min_speed < 1:
                self.speed[row] = self.rng.uniform(self.settings.min_speed, self.settings.max_speed)
            self.frames[row] = []
            self.outcomes[row] = []
        restarts = self.pool.faults.restarts
        observation = self.pool.reset(self.seeds[rows], self.task_ids[rows], rows)
        if self.pool.faults.restarts != restarts:
            # A restarted process has begun all its episodes again, and no result of a step says so.
            return self.restart()
        if self.policy is not None:
            self.policy.begin(rows)
            return observation
        try:
            self.pool.expert_reset(rows)
        except (EnvWorkerDied, EnvTimeout):
            return self.restart()
        return observation

    def restart(self) -> Observation:
        """Start all attempts over: a process was lost, and the experts of the next one know nothing of them."""
        return self.begin(np.arange(self.pool.spec.num_envs))

    @property
    def finished(self) -> bool:
        """Every task has its share."""
        return bool((self.kept >= self.wanted).all())

    def run(self, progress: Progress) -> None:
        """Collect until every task has its share, or until asked to stop.

        Raises:
            EmbodrlError: the experts fail too often, or the simulator does.
        """
        observation = self.begin(np.arange(self.pool.spec.num_envs))
        while not (self.finished or self.should_stop()):
            try:
                shown, executed, log_probs = self._act(observation)
            except (EnvWorkerDied, EnvTimeout):
                observation = self.restart()
                continue
            for row, frames in enumerate(self.frames):
                frames.append((observation.images[row].copy(), observation.state[row].copy(), shown[row]))
            step = self.pool.step(executed[:, None])
            for row, kept in enumerate(self.outcomes):
                kept.append((executed[row], step.reward[row, 0], step.terminated[row, 0], log_probs[row]))
            observation = step.observation
            ended = np.flatnonzero(step.done)
            whole = step.valid[ended].any(axis=1)  # the others were lost to a fault
            for row in ended[whole]:
                self._keep(int(row), bool(step.success[row]), observation.instruction[row])
            np.add.at(self.lost, self.task_ids[ended[~whole]], 1)
            progress.update(int(self.kept.sum()), f"success {self.solved.sum() / max(self.tried.sum(), 1):.0%}")
            if len(ended):
                self._refuse_failing_experts()
                self._refuse_losing_simulators()
                observation = self.begin(ended)

    def _act(
        self, observation: Observation
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], Sequence[np.float32 | None]]:
        """Return what is shown ``float32[B,A]``, what is executed ``float32[B,A]``, and the log-probs of that.

        Raises:
            EnvWorkerDied, EnvTimeout: the experts are lost.
        """
        if self.policy is not None:
            actions, log_probs = self.policy.act(observation)
            return actions, actions, log_probs
        expert = self.pool.expert_actions()
        expert[:, :-1] *= self.speed[:, None]  # the gripper opens and closes as ever
        noise = self.rng.standard_normal(expert.shape).astype(np.float32) * self.noise_std[:, None]
        noise[:, -1] = 0  # a random gripper would drop the object
        return expert, np.clip(expert + noise, -1, 1).astype(np.float32), [None] * len(expert)

    def _keep(self, row: int, success: bool, instruction: str) -> None:
        task = int(self.task_ids[row])
        self.tried[task] += 1
        self.solved[task] += success
        if not (success or self.settings.keep_failures) or self.kept[task] >= self.wanted[task]:
            return
        self.kept[task] += 1
        images, state, actions = (np.stack(part) for part in zip(*self.frames[row], strict=True))
        executed, rewards, terminated, drawn = zip(*self.outcomes[row], strict=True)
        log_probs = None if None in drawn else np.array(drawn, np.float32)
        outcomes = Outcomes(np.stack(executed), np.stack(rewards), np.stack(terminated), log_probs)
        seed = int(self.seeds[row])
        self.writer.add(DemoEpisode(images, state, actions, instruction, self.tasks[task], seed, success, outcomes))
        if self.kept.sum() % COMMIT_EPISODES == 0:
            self.commit()

    def _refuse_failing_experts(self) -> None:
        if self.settings.keep_failures:
            return
        failing = (self.tried > 50) & (self.tried > MAX_ATTEMPTS_PER_EPISODE * self.solved)
        if failing.any():
            names = [task for task, fails in zip(self.tasks, failing, strict=True) if fails]
            if self.policy is not None:
                raise EmbodrlError(
                    f"the policy fails more than 9 times in 10 on {', '.join(names)}",
                    "set collect.keep_failures=true to record its failures as well",
                    code="policy-fails",
                )
            raise EmbodrlError(
                f"the expert fails more than 9 times in 10 on {', '.join(names)}",
                "lower collect.noise_std, or raise env.max_episode_steps",
                code="expert-fails",
            )

    def _refuse_losing_simulators(self) -> None:
        losing = (self.lost > 50) & (self.lost > (MAX_ATTEMPTS_PER_EPISODE - 1) * self.tried)
        if losing.any():
            names = [task for task, loses in zip(self.tasks, losing, strict=True) if loses]
            raise EnvError(
                f"the simulator loses more than 9 episodes in 10 of {', '.join(names)} to faults",
                "the warnings above name them; see the logs of the simulator processes",
                code="too-many-faults",
            )

    def close(self) -> None:
        """Complete the dataset, with the success rate of who acted over all episodes that were completed."""
        meta: dict[str, object] = {"robot_type": self._settings["env"], "collect": self.settings.model_dump()}
        who = "expert" if self.policy is None else "policy"
        meta |= {f"{who}_success_rate": self.success_rate(), REWARDS: self.rewards}
        meta |= {} if self.policy is None else {"policy": self._settings["policy"]}
        self.writer.close(meta | {"stopped_early": not self.finished})

    def success_rate(self) -> dict[str, float | None]:
        """Return the fraction of episodes that were solved, by task; None where none was completed."""
        counts = zip(self.tasks, self.solved.tolist(), self.tried.tolist(), strict=True)
        return {task: solved / tried if tried else None for task, solved, tried in counts}


def frame_rate(config: Config, spec: EnvSpec) -> int:
    """Return the frames per second of a dataset: one per action, at the simulator's control rate by default."""
    return config.collect.fps or round(spec.control_hz)


@dataclass(frozen=True)
class RecordedPolicy:
    """A policy that acts in place of experts.

    Attributes:
        name: where it comes from.
        engine: computes its actions.
    """

    name: str
    engine: RolloutEngine


def acting_policy(
    loaded: LoadedConfig, name: str, make_policy: Callable[[Config], VLAPolicy] = build_policy
) -> RecordedPolicy:
    """Build the policy of a configuration that was loaded for ``record``.

    Args:
        loaded: the policy's configuration.
        name: where it comes from.
        make_policy: returns it; by default the one that ``config.model`` names.

    Raises:
        EmbodrlError: the device has less memory than the weights take, or the policy can't be built.
    """
    config = loaded.config
    device = configure_torch(config, loaded.deployment.of("rollout")[0])
    check_memory(config, loaded.deployment, training=False, device=device)
    return RecordedPolicy(name, make_rollout_engine(config, make_policy(config), num_threads(config)))


@dataclass(frozen=True)
class CollectResult:
    """What was collected.

    Attributes:
        output_dir: the dataset, which ``sft.data_dir`` takes.
        num_episodes: demonstrations that were kept.
        num_frames: of these.
        success_rate: of who acted, by task, over all episodes that were completed; None where none was.
        exit_code: 0, or 128 + N stopped by signal N.
    """

    output_dir: Path
    num_episodes: int
    num_frames: int
    success_rate: dict[str, float | None]
    exit_code: int


def collect(
    config: Config,
    places: Sequence[ProcessPlace] | None = None,
    policy: RecordedPolicy | None = None,
    resumable: bool = False,
) -> CollectResult:
    """Gather demonstrations as ``config.collect`` says; an interrupted collection into the directory is continued.

    SIGINT and SIGTERM end it early: the dataset is complete with the episodes so far, unless it is ``resumable``.

    Args:
        config: the run; sections ``collect`` and ``env``.
        places: of the simulators; None binds them to the cores of this machine in turn.
        policy: acts instead of the experts.
        resumable: what ends early is kept for the next call to continue, in place of a smaller dataset.

    Raises:
        EmbodrlError: something is missing (before anything has started), or the experts or the simulators fail.
    """
    settings = config.collect
    env = config.env
    console = config.runner.logger.console
    directory = Path(settings.output_dir)
    start_s = time.monotonic()
    lerobot: LeRobotWriter | None = None
    writer: DatasetWriter
    if settings.format == "raw":
        writer = RawWriter(directory, resume=True)
    else:
        names = [camera.name for camera in env.cameras]
        writer = lerobot = LeRobotWriter(directory, names, settings.fps, settings.video_crf, env.env_type, resume=True)
    with ExitStack() as closing:
        closing.enter_context(writer)
        check_simulator(config)
        single = {"max_chunk": 1, "auto_reset": False, "ignore_terminations": False}
        pool = make_pool(config, env.train.total_num_envs, places=places, **single)
        stop = closing.enter_context(StopSignal())
        closing.callback(pool.close)
        progress = closing.enter_context(Progress("collect", settings.num_episodes, "episodes", console))
        pool.start()
        if lerobot is not None:
            lerobot.fps = frame_rate(config, pool.spec)
        collector = DemoCollector(config, pool, writer, lambda: bool(stop), policy)
        if earlier := int(collector.kept.sum()):
            progress.message(f"continuing an interrupted collection: {earlier} episodes are there")
            progress.start_at(earlier)
        stop.can_save("the same command continues with the episodes that were kept")
        try:
            collector.run(progress)
        finally:
            # After a second signal or an error, too, the episodes so far are complete.
            if collector.kept.any():
                with stop.saving():
                    collector.close() if collector.finished or not resumable else collector.commit()
        kept = int(collector.kept.sum())
        if not collector.finished:
            progress.message(f"stopped by a signal: {kept} of {settings.num_episodes} episodes were kept")
        rates = ", ".join(
            f"{task} {'no completed episode' if rate is None else f'{rate:.0%}'}"
            for task, rate in collector.success_rate().items()
        )
        progress.message(
            f"{kept} episodes, {writer.num_frames} frames in {time.monotonic() - start_s:.0f} s"
            f" -> {directory}; {'expert' if policy is None else 'policy'} success: {rates}"
        )
    code = 0 if collector.finished else stop.exit_code
    return CollectResult(directory, kept, writer.num_frames, collector.success_rate(), code)
