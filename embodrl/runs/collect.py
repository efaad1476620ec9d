"""`embodrl collect`: demonstrations by scripted experts, perturbed to show recovery, or by a policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.data.dataset_writer import DatasetWriter
from embodrl.data.demos import REWARDS
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.raw import RawWriter
from embodrl.deployment import Deployment
from embodrl.learners.replay import reward_settings
from embodrl.reporting.progress import Progress
from embodrl.trainer.files import drop_missing_warm_start
from embodrl.trainer.stop import StopSignal
from embodrl.workers.collecting import RemoteAttempts
from embodrl.workers.collection import DemoCollector
from embodrl.workers.demonstrations import NumberedAttempts
from embodrl.workers.env import check_simulator, make_single_pool, places_here
from embodrl.workers.parts import make_acting
from embodrl.workers.policy import RecordedPolicy


def frame_rate(config: Config, control_hz: float) -> int:
    """Return the frame rate of a dataset in Hz: one frame per action, at the simulator's control rate by default."""
    return config.collect.fps or round(control_hz)


@dataclass(frozen=True)
class CollectResult:
    """Result of a collection.

    Attributes:
        output_dir: dataset directory, for ``sft.data_dir``.
        num_episodes: demonstrations kept.
        num_frames: frames in them.
        success_rate: success rate of the expert or policy by task, over all completed episodes; None without any.
        exit_code: 0, or 128 + N if stopped by signal N.
    """

    output_dir: Path
    num_episodes: int
    num_frames: int
    success_rate: dict[str, float | None]
    exit_code: int


@dataclass(frozen=True)
class _Source:
    """Where attempts are played: in this process, or in the rollout processes.

    Attributes:
        tasks: names of the tasks.
        control_hz: control rate of the simulators.
        run: plays until the collection is finished, or the function returns True.
    """

    tasks: Sequence[str]
    control_hz: float
    run: Callable[[DemoCollector, Callable[[], bool]], None]


def _in_processes(config: Config, deployment: Deployment, policy: RecordedPolicy | None, closing: ExitStack) -> _Source:
    directory = Path(config.collect.output_dir).absolute()
    logs = directory.with_name(f".{directory.name}.logs")
    built = config if policy is None else drop_missing_warm_start(config)
    remote = RemoteAttempts(built, deployment, None if policy is None else policy.policy, logs, closing)
    return _Source(remote.tasks, remote.control_hz, remote.run)


def _here(config: Config, deployment: Deployment, policy: RecordedPolicy | None, closing: ExitStack) -> _Source:
    pool = make_single_pool(config, config.env.train.total_num_envs, places_here(deployment))
    closing.callback(pool.close)
    pool.start()
    engine = None if policy is None else make_acting(config, policy.policy)

    def run(collector: DemoCollector, should_stop: Callable[[], bool]) -> None:
        attempts = NumberedAttempts(config, pool, engine, collector.take, collector.add)
        attempts.run(lambda: collector.finished or should_stop())

    return _Source(pool.spec.tasks, pool.spec.control_hz, run)


def collect(
    config: Config,
    deployment: Deployment,
    policy: RecordedPolicy | None = None,
    resumable: bool = False,
) -> CollectResult:
    """Collect demonstrations as set in ``config.collect``, continuing an interrupted collection in the directory.

    SIGINT and SIGTERM end it early: the dataset is completed with the episodes so far, unless it is ``resumable``.

    Args:
        config: configuration with the sections ``collect`` and ``env``.
        deployment: its placement.
        policy: policy that acts instead of the experts.
        resumable: keep an interrupted collection for the next call, instead of completing a smaller dataset.

    Raises:
        EmbodrlError: a requirement is missing (before anything has started), or the experts or simulators fail.
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
        stop = closing.enter_context(StopSignal())
        progress = closing.enter_context(Progress("collect", settings.num_episodes, "episodes", console))
        make = _in_processes if deployment.rolls_out_in_processes else _here
        source = make(config, deployment, policy, closing)
        stop.arm()
        if lerobot is not None:
            lerobot.fps = frame_rate(config, source.control_hz)
        collector = DemoCollector(config, source.tasks, writer, policy)
        collector.tell = progress.update
        if earlier := int(collector.kept.sum()):
            progress.message(f"continuing an interrupted collection: {earlier} episodes exist")
            progress.start_at(earlier)
        stop.can_save("the same command continues with the episodes kept")
        try:
            source.run(collector, lambda: bool(stop))
        finally:
            # Complete the dataset even after a second signal or an error.
            if collector.kept.any():
                with stop.saving():
                    if resumable and not collector.finished:
                        collector.commit()
                    else:
                        collector.close({REWARDS: reward_settings(config)})
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
