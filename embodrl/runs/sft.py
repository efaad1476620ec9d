"""`embodrl sft`: supervised fine-tuning on demonstrations, to warm-start RL."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.data.demos import Demos
from embodrl.data.imitation import (
    DatasetBatches,
    MixedBatches,
    check_mixed_facts,
    hold_out,
    load_checked_demos,
    load_further_demos,
    observed,
    refuse_others,
)
from embodrl.data.pictures import PictureStore
from embodrl.data.statistics import STATISTICS_FILE
from embodrl.errors import CheckpointError, OutputError, UsageError
from embodrl.learners.imitation import HeldOut, ImitationLearner
from embodrl.learners.imitation_policy import check_instructions, check_range, policy_with_statistics, with_vision
from embodrl.reporting.metrics_file import SFT_METRICS_FILE
from embodrl.reporting.progress import Progress
from embodrl.reporting.report import write_report
from embodrl.specs import ENGINES, ENVS
from embodrl.storage.checkpoint import CheckpointManager, preflight
from embodrl.trainer.afterwards import afterwards
from embodrl.trainer.files import LEAST_FREE_BYTES, LOG_FILE, POLICY_DIR, is_exported, offline_lines, removed_if_empty
from embodrl.trainer.imitation_parts import (
    ImitationView,
    make_hooks,
    names_output,
    prepare_imitation,
    run_and_export,
    start_imitation,
)
from embodrl.trainer.lock import LOCK_FILE
from embodrl.trainer.loop import Trainer
from embodrl.trainer.parts import make_trainer
from embodrl.trainer.provenance import compute_text
from embodrl.trainer.saving import is_complete, iteration_of
from embodrl.trainer.schedule import Schedule
from embodrl.trainer.session import RunSession, run_directory_of, run_with_restarts
from embodrl.trainer.settings import load_saved

logger = logging.getLogger(__name__)

METRICS_FILE = SFT_METRICS_FILE


def sft(loaded: LoadedConfig) -> int:
    """Fine-tune the policy on demonstrations and export it; return the exit code.

    SIGINT and SIGTERM end it after the current step, saving a checkpoint and the policy.

    Raises:
        OutputError: the output directory can't be written or holds an earlier run; raised before anything has started.
        EmbodrlError: there are no demonstrations, or the loss is not finite.
    """
    loaded = with_vision(loaded.with_absolute_paths())
    config = loaded.config
    directory = Path(config.sft.output_dir)
    backend = config.actor.training_backend
    if not ENGINES.entry(backend).every_update:
        raise UsageError(
            f"`embodrl sft` does not support actor={backend}", "use actor=native or actor=fsdp", code="sft-backend"
        )
    check_mixed_facts(config)  # raises before anything is written
    for name in (POLICY_DIR, METRICS_FILE):
        if (directory / name).exists():
            raise OutputError(
                f"{directory / name} already exists",
                f"`embodrl resume {directory}` continues it; otherwise choose another sft.output_dir",
                code="sft-output-exists",
            )
    with names_output():
        preflight(directory, LEAST_FREE_BYTES)
    with removed_if_empty(directory, (LOCK_FILE, LOG_FILE, STATISTICS_FILE)), run_directory_of(directory) as lock:
        return run_with_restarts(loaded, directory, lock, work)


def is_sft_run(directory: Path) -> bool:
    """Return whether a run directory was written by `embodrl sft`."""
    return (directory / METRICS_FILE).is_file()


def resume(directory: Path, overrides: list[str], trust: bool = False) -> int:
    """Continue fine-tuning from the last intact checkpoint; return the exit code.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    with run_directory_of(directory) as lock:
        checkpoint, problems = CheckpointManager(directory, 1).latest_good()
        loaded, saved = load_saved(directory, overrides, "sft", checkpoint, True, trust)
        loaded = loaded.with_absolute_paths()
        total = loaded.config.sft.max_steps
        if checkpoint is None:
            if problems:
                raise CheckpointError(
                    f"{directory} has no intact checkpoint: {'; '.join(problems)}",
                    "start again in another sft.output_dir; sft.save_interval sets how often checkpoints are written",
                    code="sft-no-checkpoint",
                )
            logger.warning("%s has no checkpoint: it starts over", directory)
        elif is_complete(checkpoint, total) and is_exported(directory):
            steps = f"{iteration_of(checkpoint)}/{total}"
            logger.warning("run complete (%s steps); to train further, resume with a larger sft.max_steps", steps)
            return 0
        return run_with_restarts(loaded, directory, lock, work, checkpoint, saved.text)


def work(session: RunSession) -> int:
    """Build all components in order, train, and export the policy."""
    config = session.config
    directory = session.directory
    settings = session.config.sft
    prepare_imitation(session)
    with ExitStack() as closing, Progress("sft", settings.max_steps, "steps", config.runner.logger.console) as progress:
        progress.message(f"run: {directory}, log: {directory / LOG_FILE}")
        progress.message(compute_text(config))
        if config.model.freeze_vision:  # possibly from an RL run, as its config.yaml shows
            frozen = session.loaded.origins["model.freeze_vision"]
            progress.message(f"vision is not trained: model.freeze_vision=true ({frozen})")
        demos, sizes, held_out = load_data(config, directory, progress.message)
        if session.checkpoint is not None:  # before a policy is built and processes are started for the data
            refuse_others(session.checkpoint.state.fields("data_rng").content, demos, settings.data_dir)
        trainer = _bring_up(session, demos, sizes, held_out, progress, closing)
        code = run_and_export(trainer, progress)
        if not trainer.is_finished:
            progress.message(
                f"stopped by a signal after {trainer.iteration} of {settings.max_steps} steps;"
                f" resume with: embodrl resume {directory}"
            )
        progress.message(f"saved {directory / POLICY_DIR}")
        with afterwards("report.html", f"embodrl watch {shlex.quote(str(directory))}"):
            progress.message(f"report: {write_report(directory)}")
        following = next_lines(config, directory) if trainer.is_finished else []
        for line in (*offline_lines(config, directory), *following):
            progress.message(line)
    return code


def load_data(config: Config, directory: Path, tell: Callable[[str], None]) -> tuple[Demos, list[int], Demos | None]:
    """Return the training frames of all datasets, the datasets' numbers of them, and the held-out demonstrations.

    Images above ``sft.memory_gb`` are on the disk of ``directory``. ``tell`` gets a line for each dataset. Raises
    EmbodrlError if a dataset is damaged, differs from the configuration or the first dataset, or does not fit.
    """
    settings = config.sft
    place = PictureStore(settings.memory_gb, directory, tell).place
    every = load_checked_demos(config, place)
    demos, held_out = hold_out(every, settings)
    apart = "" if held_out is None else f", of which {held_out.num_episodes} episodes are held out"
    tell(f"{every.num_episodes} episodes, {len(every.actions)} frames from {settings.data_dir}{apart}")
    further = load_further_demos(config, every, place)
    for source, more in zip(settings.further_data, further, strict=True):
        tell(f"{more.num_episodes} episodes, {len(more.actions)} frames from {source}")
    sizes = [len(one.actions) for one in (demos, *further)]
    if further:
        joined = [observed(one, config) for one in (demos, *further)]
        demos = Demos.concat(joined, partial(place, "all datasets together"))
        if held_out is not None:  # of its own, so that the images of data_dir are not kept twice
            held_out = Demos.concat([held_out], partial(place, "the held-out episodes"))
    return demos, sizes, held_out


def next_lines(config: Config, directory: Path) -> list[str]:
    """Return the commands that usually follow a finished run."""
    run, policy = (shlex.quote(str(path)) for path in (directory, directory / POLICY_DIR))
    if not ENVS.entry(config.env.env_type).simulates:
        data = shlex.quote(config.sft.data_dir)
        apart = " --held-out" if config.sft.val_episodes else ""
        return [f"next: embodrl data check {data} --policy {policy}{apart}", f"      embodrl serve {run}"]
    return [f"next: embodrl eval {run}", f"      embodrl train --config {run} model.warm_start={policy}"]


def _bring_up(
    session: RunSession,
    demos: Demos,
    sizes: Sequence[int],
    held_out: Demos | None,
    progress: Progress,
    closing: ExitStack,
) -> Trainer:
    """Return the trainer at the starting point of this attempt; ``sizes`` are the datasets' numbers of frames."""
    config = session.config
    settings = session.config.sft
    statistics = session.directory / STATISTICS_FILE
    resumed = session.checkpoint is not None
    weights_from, policy = policy_with_statistics(session.weights_from, demos, statistics, progress.message, resumed)
    check_range(policy, demos, settings)
    check_instructions(policy, observed(demos, config))
    engine = start_imitation(session, weights_from, policy, closing)
    given = (settings, policy.action_horizon, config.runner.seed, config.env.include_state)
    batches = DatasetBatches(demos, *given) if len(sizes) == 1 else MixedBatches(demos, sizes, *given)
    pauses = (settings.log_interval, settings.save_interval, settings.eval_interval)
    measured = None if held_out is None else HeldOut(config, policy, engine, observed(held_out, config))
    hooks = make_hooks(session, policy, progress, measured)
    learner = ImitationLearner(config, policy, engine, batches, pauses, hooks)
    schedule = Schedule.of_imitation(config)
    trainer = make_trainer(session, learner, schedule, ImitationView(progress), closing, METRICS_FILE, weights_from)
    progress.start_at(trainer.iteration)
    return trainer
