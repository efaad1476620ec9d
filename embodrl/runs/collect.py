"""`embodrl collect`: demonstrations by scripted experts, perturbed so that they show recovery, or by a policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.data.dataset_writer import DatasetWriter
from embodrl.data.demos import REWARDS
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.raw import RawWriter
from embodrl.deployment import ProcessPlace
from embodrl.learners.replay import reward_settings
from embodrl.reporting.progress import Progress
from embodrl.trainer.stop import StopSignal
from embodrl.types import EnvSpec
from embodrl.workers.demonstrations import DemoCollector
from embodrl.workers.env import check_simulator, make_single_pool
from embodrl.workers.policy import RecordedPolicy


def frame_rate(config: Config, spec: EnvSpec) -> int:
    """Return the frames per second of a dataset: one per action, at the simulator's control rate by default."""
    return config.collect.fps or round(spec.control_hz)


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
        pool = make_single_pool(config, env.train.total_num_envs, places)
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
