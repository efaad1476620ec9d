"""`embodrl collect`: demonstrations by scripted experts, perturbed to show recovery, or by a policy."""

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
    """Return the frame rate of a dataset in Hz: one frame per action, at the simulator's control rate by default."""
    return config.collect.fps or round(spec.control_hz)


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


def collect(
    config: Config,
    places: Sequence[ProcessPlace] | None = None,
    policy: RecordedPolicy | None = None,
    resumable: bool = False,
) -> CollectResult:
    """Collect demonstrations as set in ``config.collect``, continuing an interrupted collection in the directory.

    SIGINT and SIGTERM end it early: the dataset is completed with the episodes so far, unless it is ``resumable``.

    Args:
        config: configuration with the sections ``collect`` and ``env``.
        places: cores of the simulators; None binds them to the cores of this machine in turn.
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
        pool = make_single_pool(config, env.train.total_num_envs, places)
        stop = closing.enter_context(StopSignal())
        closing.callback(pool.close)
        progress = closing.enter_context(Progress("collect", settings.num_episodes, "episodes", console))
        pool.start()
        if lerobot is not None:
            lerobot.fps = frame_rate(config, pool.spec)
        collector = DemoCollector(config, pool, writer, lambda: bool(stop), policy)
        if earlier := int(collector.kept.sum()):
            progress.message(f"continuing an interrupted collection: {earlier} episodes exist")
            progress.start_at(earlier)
        stop.can_save("the same command continues with the episodes kept")
        try:
            collector.run(progress)
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
