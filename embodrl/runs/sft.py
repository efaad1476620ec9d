"""`embodrl sft`: supervised fine-tuning on demonstrations, to warm-start RL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from embodrl.config import LoadedConfig
from embodrl.data.demos import Demos
from embodrl.data.facts import data_directory, read_facts
from embodrl.data.imitation import FrameBatches, check_demos, check_robot, load_configured_demos
from embodrl.data.statistics import STATISTICS_FILE
from embodrl.errors import CheckpointError, EmbodrlError, OutputError, UsageError
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.learners.imitation import ImitationLearner, engine_config
from embodrl.learners.imitation_policy import check_range, policy_with_statistics, with_model, with_vision
from embodrl.models.base import VLAPolicy
from embodrl.reporting.metrics_file import Row
from embodrl.reporting.progress import Progress
from embodrl.reporting.rows import is_number, other_rates
from embodrl.reporting.sinks import MetricValue
from embodrl.specs import ENGINES
from embodrl.storage.checkpoint import CheckpointManager, preflight
from embodrl.storage.integrity import check_checksums
from embodrl.trainer.async_evaluation import finished_since, unfinished_evaluation
from embodrl.trainer.evaluations import start_async_evaluator
from embodrl.trainer.files import (
    LEAST_FREE_BYTES,
    LOG_FILE,
    POLICY_DIR,
    check_disk_space,
    drop_missing_warm_start,
    export_policy,
    removed_if_empty,
    versions_num_bytes,
)
from embodrl.trainer.journal import Journal
from embodrl.trainer.lock import LOCK_FILE
from embodrl.trainer.loop import Trainer, make_trainer
from embodrl.trainer.parts import make_launcher
from embodrl.trainer.provenance import compute_text
from embodrl.trainer.saving import iteration_of, open_metrics, pending_row
from embodrl.trainer.schedule import Schedule
from embodrl.trainer.session import RunSession, run_directory_of, run_tries
from embodrl.trainer.settings import load_saved
from embodrl.workers.actor import make_train_engine
from embodrl.workers.env import check_simulator, make_pool
from embodrl.workers.evaluator import Evaluator
from embodrl.workers.policy import build_policy, check_policy_decoding, configure_torch, num_threads

logger = logging.getLogger(__name__)

METRICS_FILE = "sft_metrics.jsonl"


def sft(loaded: LoadedConfig) -> int:
    """Train the policy on demonstrations and export it; returns the exit code.

    SIGINT and SIGTERM end it after the current step: a checkpoint and the policy so far are saved.

    Raises:
        OutputError: the output directory can't be written or holds an earlier run, before anything has started.
        EmbodrlError: there are no demonstrations, or the loss is not finite.
    """
    loaded = with_vision(loaded.with_absolute_paths())
    config = loaded.config
    directory = Path(config.sft.output_dir)
    backend = config.actor.training_backend
    if not ENGINES.entry(backend).imitates:
        raise UsageError(
            f"`embodrl sft` does not support actor={backend}", "use actor=native or actor=fsdp", code="sft-backend"
        )
    read_facts(data_directory(config.sft.data_dir))  # raises, before anything is written
    for name in (POLICY_DIR, METRICS_FILE):
        if (directory / name).exists():
            raise OutputError(
                f"{directory / name} already exists",
                f"`embodrl resume {directory}` continues it; otherwise choose another sft.output_dir",
                code="sft-output-exists",
            )
    with _another_directory():
        preflight(directory, LEAST_FREE_BYTES)
    with (
        removed_if_empty(directory, (LOCK_FILE, LOG_FILE, STATISTICS_FILE)),
        run_directory_of(directory) as lock,
    ):
        return run_tries(loaded, directory, lock, work)


@contextmanager
def _another_directory() -> Iterator[None]:
    """Name this command's setting of the output directory in errors of the block."""
    try:
        yield
    except OutputError as error:
        hint = "set sft.output_dir to a writable directory with free space"
        raise OutputError(error.message, hint, code=error.code) from error


def is_sft_run(directory: Path) -> bool:
    """Return whether a run directory was written by `embodrl sft`."""
    return (directory / METRICS_FILE).is_file()


def resume(directory: Path, overrides: list[str], trust: bool = False) -> int:
    """Continue fine-tuning from the last intact checkpoint; returns the exit code.

    Args:
        directory: of the run.
        overrides: of the command line.
        trust: its settings may run code though another user started the run.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    with run_directory_of(directory) as lock:
        checkpoint, problems = CheckpointManager(directory, 1).latest_good()
        loaded, saved = load_saved(directory, overrides, "sft", checkpoint, True, trust)
        loaded = loaded.with_absolute_paths()
        config = loaded.config
        if checkpoint is None and problems:
            raise CheckpointError(
                f"{directory} has no intact checkpoint: {'; '.join(problems)}",
                "start again in another sft.output_dir; sft.save_interval sets how often checkpoints are written",
                code="sft-no-checkpoint",
            )
        if checkpoint is None:
            logger.warning("%s has no checkpoint: it starts over", directory)
            return run_tries(loaded, directory, lock, work, None, saved.text)
        done = iteration_of(checkpoint)
        is_evaluated = pending_row(checkpoint.state) is None and unfinished_evaluation(checkpoint) is None
        if done >= config.sft.max_steps and is_evaluated and _is_exported(directory):
            progress = f"{done}/{config.sft.max_steps}"
            logger.warning("run complete (%s steps); to train further, resume with a larger sft.max_steps", progress)
            return 0
        return run_tries(loaded, directory, lock, work, checkpoint, saved.text)


def _is_exported(directory: Path) -> bool:
    """Return whether the policy is there and intact; a warning names what is damaged."""
    try:
        return check_checksums(directory / POLICY_DIR)
    except EmbodrlError as error:
        logger.warning("%s; it is exported again", error.message)
        return False


def work(session: RunSession) -> int:
    """Build everything in order, train, and export the policy."""
    config = session.config
    directory = session.directory
    settings = session.config.sft
    configure_torch(config, session.deployment.of("actor")[0])
    if settings.eval_interval:
        check_simulator(config)
    with (
        ExitStack() as closing,
        Progress("sft", settings.max_steps, "steps", config.runner.logger.console) as progress,
    ):
        progress.message(f"run: {directory}, log: {directory / LOG_FILE}")
        progress.message(compute_text(config))
        if config.model.freeze_vision:  # maybe of a run that learnt from reward, whose config.yaml says so
            frozen = session.loaded.origins["model.freeze_vision"]
            progress.message(f"vision is not trained: model.freeze_vision=true ({frozen})")
        check_robot(config)
        demos = load_configured_demos(config)
        check_demos(demos, config)
        progress.message(f"{len(demos.instructions)} episodes, {len(demos.actions)} frames from {settings.data_dir}")
        trainer = _bring_up(session, demos, progress, closing)
        code = trainer.run(session.record(trainer.iteration, progress.message))
        session.lock.check()
        with session.stop.saving():
            trainer.learner.engine.fetch()
            export_policy(trainer.learner.policy, directory / POLICY_DIR, config)
        if not trainer.is_finished:
            progress.message(
                f"stopped by a signal after {trainer.iteration} of {settings.max_steps} steps;"
                f" resume with: embodrl resume {directory}"
            )
        progress.message(f"saved {directory / POLICY_DIR}")
    return code


def _bring_up(session: RunSession, demos: Demos, progress: Progress, closing: ExitStack) -> Trainer:
    """Return the trainer, where the try of the run begins."""
    config = session.config
    deployment = session.deployment
    directory = session.directory
    checkpoint = session.checkpoint
    settings = session.config.sft
    weights_from = config if checkpoint is None else drop_missing_warm_start(config)
    statistics = directory / STATISTICS_FILE
    if checkpoint is not None and statistics.is_file():  # as the run began
        weights_from = with_model(weights_from, stats_path=str(statistics))
        policy = build_policy(weights_from)
    else:
        weights_from, policy = policy_with_statistics(weights_from, demos, statistics, progress.message)
    check_range(policy, demos, settings)
    check_policy_decoding(config, policy, config.env.eval.decoding)
    training = engine_config(weights_from, policy.device)
    launcher = make_launcher(training, deployment)
    if launcher is not None:
        closing.callback(launcher.close)
    engine = session.engine = make_train_engine(training, deployment, policy, directory / "logs", launcher)
    closing.callback(engine.close)
    keeps_best = config.runner.keep_best and bool(settings.eval_interval)
    sent = versions_num_bytes(policy) if config.runner.eval_async and settings.eval_interval else 0
    with _another_directory():
        check_disk_space(directory, config, policy, engine.state_num_bytes(), keep_best=keeps_best, sent=sent)
    session.stop.arm()
    batches = FrameBatches(demos, settings, policy.action_horizon, config.runner.seed, config.env.include_state)
    late = None if checkpoint is None else finished_since(directory, checkpoint, METRICS_FILE)
    journal = Journal(
        open_metrics(session, closing, METRICS_FILE), ImitationView(progress), config.model.warm_start is not None
    )
    beside = start_async_evaluator(session, policy, closing, weights_from) if settings.eval_interval else None

    def on_step(step: int, row: Mapping[str, float]) -> bool:
        progress.update(step, " ".join(f"{name} {value:.3f}" for name, value in row.items()))
        return bool(session.stop)

    pauses = (settings.log_interval, settings.save_interval, settings.eval_interval)
    play = player(session, policy, progress)
    learner = ImitationLearner(config, policy, engine, batches, pauses, play, on_step)
    trainer = make_trainer(session, learner, Schedule.of_imitation(config), journal, beside)
    if checkpoint is not None:
        trainer.restore(checkpoint, late)
        progress.start_at(trainer.iteration)
        progress.message(f"resuming from {checkpoint.path}")
    return trainer


class ImitationView:
    """A progress bar of steps, with lines for evaluations and checkpoints.

    Args:
        progress: the bar.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def phase(self, text: str, chunks: int = 0) -> None:
        """The bar says how far the run is."""

    def update(self, row: Mapping[str, MetricValue]) -> None:
        """Show an evaluation."""
        rate = row.get("eval/success_rate")
        if is_number(rate):
            others = "".join(f", {name} {other:.1%}" for name, other in other_rates(row).items())
            self._progress.message(f"step {row['iteration']}: success rate {rate:.1%}{others}")

    def late(self, row: Mapping[str, MetricValue]) -> None:
        """Show an evaluation that was played while the run trained on."""
        self.update(row)

    def message(self, text: str) -> None:
        """Show a line that stays."""
        self._progress.message(text)


def player(session: RunSession, policy: VLAPolicy, progress: Progress) -> Callable[[Path | None], Row]:
    """Return what evaluates the policy of a run: simulators start for it, and end with it."""
    config = session.config

    def play(video_dir: Path | None) -> Row:
        acting = make_rollout_engine(config, policy, num_threads(config))
        with make_pool(config.evaluated, config.env.eval.total_num_envs) as pool:
            evaluator = Evaluator(config, pool, acting, should_stop=lambda: bool(session.stop))
            with progress.within("evaluation", evaluator.num_plays, "episodes") as shown:
                evaluator.progress = shown.update
                return evaluator.run(video_dir).metrics()

    return play
