"""`embodrl collect`: demonstrations by scripted experts, in parallel, perturbed so that they show recovery."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.config.schema import Config
from embodrl.data.demos import DemoWriter, Episode, Writer
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError, EnvError, EnvTimeout, EnvWorkerDied
from embodrl.reporting.progress import Progress
from embodrl.runs.stop import StopSignal
from embodrl.types import EnvSpec, Observation

MAX_ATTEMPTS_PER_EPISODE = 10


class Collector:
    """Plays experts in all environments of a pool until enough episodes have succeeded.

    Args:
        config: the run; section ``collect``.
        pool: started, without auto-reset.
        writer: takes the episodes.
        should_stop: asked before every step; if it answers True, ``run`` ends early.

    Attributes:
        kept, tried, solved: ``int64[T]``, episodes of each task that were kept, played to their end, and successful.
        lost: ``int64[T]``, episodes that a fault has ended.
    """

    def __init__(
        self, config: Config, pool: EnvPool, writer: Writer, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.settings = config.collect
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
        num_envs = pool.spec.num_envs
        self.frames: list[list[tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]]] = [
            [] for _ in range(num_envs)
        ]
        self.seeds = np.zeros(num_envs, np.int64)
        self.task_ids = np.zeros(num_envs, np.int32)
        self.noise_std = np.zeros(num_envs, np.float32)

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
            self.frames[row] = []
        restarts = self.pool.faults.restarts
        observation = self.pool.reset(self.seeds[rows], self.task_ids[rows], rows)
        if self.pool.faults.restarts != restarts:
            # A process started anew has begun all its episodes again, which no result of a step will tell.
            return self.begin_anew()
        size = self.pool.spec.num_envs // len(self.pool.managers)
        for rank in range(len(self.pool.managers)):
            mine = rows[(rows >= rank * size) & (rows < (rank + 1) * size)] - rank * size
            if len(mine):
                try:
                    self.pool.call_one(rank, "expert_reset", {"rows": mine.tolist()})
                except (EnvWorkerDied, EnvTimeout):
                    return self.begin_anew()
        return observation

    def begin_anew(self) -> Observation:
        """Give up all attempts under way: a process is lost, and the experts of its next one know nothing of them."""
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
                expert = self.pool.expert_actions()
            except (EnvWorkerDied, EnvTimeout):
                observation = self.begin_anew()
                continue
            for row, frames in enumerate(self.frames):
                frames.append((observation.images[row].copy(), observation.state[row].copy(), expert[row]))
            noise = self.rng.standard_normal(expert.shape).astype(np.float32) * self.noise_std[:, None]
            noise[:, -1] = 0  # a random gripper would drop the object
            executed = np.clip(expert + noise, -1, 1).astype(np.float32)
            step = self.pool.step(executed[:, None])
            observation, ended = step.observation, np.flatnonzero(step.done)
            whole = step.valid[ended].any(axis=1)  # the others were lost to a fault
            for row in ended[whole]:
                self._keep(int(row), bool(step.success[row]), observation.instruction[row])
            np.add.at(self.lost, self.task_ids[ended[~whole]], 1)
            progress.update(int(self.kept.sum()), f"success {self.solved.sum() / max(self.tried.sum(), 1):.0%}")
            if len(ended):
                self._refuse_failing_experts()
                self._refuse_losing_simulators()
                observation = self.begin(ended)

    def _keep(self, row: int, success: bool, instruction: str) -> None:
        task = int(self.task_ids[row])
        self.tried[task] += 1
        self.solved[task] += success
        if not (success or self.settings.keep_failures) or self.kept[task] >= self.wanted[task]:
            return
        self.kept[task] += 1
        images, state, actions = (np.stack(part) for part in zip(*self.frames[row], strict=True))
        self.writer.add(Episode(images, state, actions, instruction, self.tasks[task], int(self.seeds[row]), success))

    def _refuse_failing_experts(self) -> None:
        if self.settings.keep_failures:
            return
        failing = (self.tried > 50) & (self.tried > MAX_ATTEMPTS_PER_EPISODE * self.solved)
        if failing.any():
            names = [task for task, fails in zip(self.tasks, failing, strict=True) if fails]
            raise EmbodrlError(
                f"the expert fails more than 9 times in 10 on {', '.join(names)}",
                "lower collect.noise_std, or raise env.max_episode_steps",
            )

    def _refuse_losing_simulators(self) -> None:
        losing = (self.lost > 50) & (self.lost > (MAX_ATTEMPTS_PER_EPISODE - 1) * self.tried)
        if losing.any():
            names = [task for task, loses in zip(self.tasks, losing, strict=True) if loses]
            raise EnvError(
                f"the simulator loses more than 9 episodes in 10 of {', '.join(names)} to faults",
                "the warnings above say which; look at the logs of its processes",
            )

    def close(self) -> None:
        """Write the index of what was kept, with the success rate of the expert in all that was played."""
        meta: dict[str, object] = {"collect": self.settings.model_dump(), "expert_success_rate": self.success_rate()}
        self.writer.close(meta | {"stopped_early": not self.finished})

    def success_rate(self) -> dict[str, float | None]:
        """Return the part of the episodes that the expert solved, by task; None where none was played to its end."""
        counts = zip(self.tasks, self.solved.tolist(), self.tried.tolist(), strict=True)
        return {task: solved / tried if tried else None for task, solved, tried in counts}


def make_writer(config: Config) -> Writer:
    """Return what writes the format of ``config.collect``; a rate that the simulator decides is still to be set.

    Raises:
        MissingDependencyError: a package that the format needs is not installed.
        EmbodrlError: the directory can't be written, or holds something already.
    """
    settings, env = config.collect, config.env
    if settings.format == "raw":
        return DemoWriter(Path(settings.output_dir))
    names = [camera.name for camera in env.cameras]
    return LeRobotWriter(Path(settings.output_dir), names, settings.fps, settings.video_crf, env.env_type)


def frame_rate(config: Config, spec: EnvSpec) -> int:
    """Return the frames a second of a data set: one frame an action, at the rate of control if nothing else is said."""
    return config.collect.fps or round(spec.control_hz)


@dataclass(frozen=True)
class CollectResult:
    """What was collected.

    Attributes:
        output_dir: the data set, which ``sft.data_dir`` takes.
        num_episodes: demonstrations that were kept.
        num_frames: of these.
        success_rate: of the expert, by task, over all episodes that it completed; None where it completed none.
        exit_code: 0, or 128 + N stopped by signal N.
    """

    output_dir: Path
    num_episodes: int
    num_frames: int
    success_rate: dict[str, float | None]
    exit_code: int


def collect(config: Config) -> CollectResult:
    """Gather demonstrations as ``config.collect`` says.

    SIGINT and SIGTERM end it early: what was kept until then is complete.

    Raises:
        EmbodrlError: something is missing, told before anything has started; or the experts or the simulators fail.
    """
    from embodrl.workers.env import check_simulator, make_pool

    writer = make_writer(config)
    check_simulator(config)
    start_s = time.monotonic()
    pool = make_pool(config, config.env.train.total_num_envs, max_chunk=1, auto_reset=False, ignore_terminations=False)
    console = config.runner.logger.console
    with (
        StopSignal() as stop,
        closing(pool),
        Progress("collect", config.collect.num_episodes, "episodes", console) as progress,
    ):
        pool.start()
        if isinstance(writer, LeRobotWriter):
            writer.fps = frame_rate(config, pool.spec)
        collector = Collector(config, pool, writer, lambda: bool(stop))
        stop.graceful = True
        try:
            collector.run(progress)
        finally:
            # A second signal, too, leaves what is complete. Without an episode there is nothing to be told.
            if collector.kept.any():
                collector.close()
            else:
                writer.abort()
        kept = int(collector.kept.sum())
        if not collector.finished:
            progress.message(f"stopped by a signal: {kept} of {config.collect.num_episodes} episodes were kept")
        rates = ", ".join(
            f"{task} {'no completed episode' if rate is None else f'{rate:.0%}'}"
            for task, rate in collector.success_rate().items()
        )
        progress.message(
            f"{kept} episodes, {writer.num_frames} frames in {time.monotonic() - start_s:.0f} s"
            f" -> {config.collect.output_dir}; expert success: {rates}"
        )
    code = 0 if collector.finished else stop.exit_code
    return CollectResult(Path(config.collect.output_dir), kept, writer.num_frames, collector.success_rate(), code)
