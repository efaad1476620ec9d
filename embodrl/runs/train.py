"""`embodrl train` and `embodrl resume`: bring up the parts of a run, and walk through it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from embodrl.config import LoadedConfig
from embodrl.errors import CheckpointError, ConfigError, ConfigProblem, EmbodrlError, OutputError
from embodrl.processes.cores import bound_to
from embodrl.reporting.console import Console
from embodrl.reporting.log import RunLog
from embodrl.reporting.metrics_file import METRICS_FILE, read_metrics
from embodrl.reporting.sinks import MetricsLogger
from embodrl.runs.beside import EvalBeside, finished_since, unfinished_evaluation
from embodrl.runs.build import build, check_machine
from embodrl.runs.files import (
    LEAST_FREE_BYTES,
    LOG_FILE,
    check_disk_space,
    drop_missing_warm_start,
    has_results,
    resume_hint,
    run_directory,
    saved_metrics,
    sent_num_bytes,
)
from embodrl.runs.load import graph_of
from embodrl.runs.lock import RunLock, run_lock
from embodrl.runs.loop import Runner, pending_row
from embodrl.runs.provenance import add_provenance, changes_so_far, compute_text
from embodrl.runs.recovery import TrainersLostError, attempts, lost_trainers
from embodrl.runs.result import TrainResult, already_complete, conclude
from embodrl.runs.settings import (
    STATE_KEY,
    is_run,
    load_saved,
    not_a_run,
    refuse_impossible,
    write_settings,
)
from embodrl.runs.stop import StopSignal
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager, preflight
from embodrl.workers.policy import configure_torch, num_generators, num_threads

logger = logging.getLogger(__name__)


def train(loaded: LoadedConfig) -> TrainResult:
    """`embodrl train`: train in a new run directory.

    Raises:
        EmbodrlError: something the run needs is missing (before anything has started), or the run failed.
    """
    loaded = loaded.with_absolute_paths()
    config = loaded.config
    run_dir = run_directory(config)
    check_machine(config, loaded.deployment)
    with run_lock(run_dir) as lock:
        path = run_dir / METRICS_FILE
        if (path.is_file() and path.stat().st_size) or any(run_dir.glob("checkpoints/step_*")):
            raise OutputError(
                f"{run_dir} holds an earlier run",
                f"`embodrl resume {run_dir}` continues it; or choose another runner.output_dir",
                code="run-exists",
            )
        preflight(run_dir, LEAST_FREE_BYTES)
        with RunLog(run_dir / LOG_FILE):
            for attempt in attempts(config, run_dir, None, None, lock.check):
                with attempt:
                    return _execute(loaded, run_dir, lock, attempt.checkpoint, attempt.old_settings)
    raise AssertionError("attempts ends by raising")


def resume(directory: Path, overrides: list[str], trust: bool = False) -> int:
    """`embodrl resume`: continue a run from its last good checkpoint, or from the start if it has none.

    Args:
        directory: of the run.
        overrides: of the command line.
        trust: its settings may run code though another user started the run.

    Returns:
        the exit code.

    Raises:
        CheckpointError: this is not a run, all its checkpoints are damaged, or its settings are lost.
        ConfigError: its settings were edited, or are invalid.
    """
    if not is_run(directory):
        raise not_a_run(directory)
    with run_lock(directory) as lock:
        preflight(directory, LEAST_FREE_BYTES)
        with RunLog(directory / LOG_FILE):
            return _resume(directory, lock, overrides, trust).exit_code


def _resume(directory: Path, lock: RunLock, overrides: list[str], trust: bool) -> TrainResult:
    checkpoint, problems = CheckpointManager(directory, 1).latest_good()
    loaded, saved = load_saved(directory, overrides, "train", checkpoint, True, trust)
    for note in loaded.notes:
        if note.code == "schedule-kept":  # the others were shown when the run began
            logger.warning("%s %s; %s", note.key, note.message, note.hint)
    loaded = loaded.with_absolute_paths()
    config = loaded.config
    check_machine(config, loaded.deployment)
    if checkpoint is None:
        if problems:
            raise CheckpointError(
                f"no checkpoint of {directory} is intact: {'; '.join(problems)}",
                "start a new run, or delete its checkpoints/ to restart this one",
                code="checkpoint-missing",
            )
        logger.warning("%s has no checkpoint: it starts over", directory)
        return _continue(loaded, directory, lock, None, saved.text)
    state = checkpoint.state
    generators = num_generators(config, loaded.deployment)
    refuse_impossible(config, state.text(STATE_KEY, None), state.fields("rollout"), generators)
    done, pending = checkpoint.state.integer("iteration"), pending_row(checkpoint.state)
    if done > config.runner.max_iterations:
        message = f"is {config.runner.max_iterations}, and the run has done {done}"
        raise ConfigError(
            [ConfigProblem("runner.max_iterations", message, hint="raise it", code="iterations-already-done")]
        )
    is_done = pending is None and unfinished_evaluation(checkpoint) is None
    if done == config.runner.max_iterations and is_done and has_results(directory):
        return already_complete(config, directory, checkpoint, done, overrides)
    return _continue(loaded, directory, lock, checkpoint, saved.text)


def _continue(
    loaded: LoadedConfig, run_dir: Path, lock: RunLock, checkpoint: Checkpoint | None, old_settings: str
) -> TrainResult:
    """As ``_execute``; training processes that are lost are restarted."""
    for attempt in attempts(loaded.config, run_dir, checkpoint, old_settings, lock.check):
        with attempt:
            return _execute(loaded, run_dir, lock, attempt.checkpoint, attempt.old_settings)
    raise AssertionError("attempts ends by raising")


def _last_logged(checkpoint: Checkpoint) -> int:
    """Return the last iteration whose metrics are kept: an evaluation may still be pending."""
    return checkpoint.state.integer("iteration") - (pending_row(checkpoint.state) is not None)


def _execute(
    loaded: LoadedConfig, run_dir: Path, lock: RunLock, checkpoint: Checkpoint | None, old_settings: str | None
) -> TrainResult:
    """Bring up the parts of a run, walk through it, and write the report.

    Args:
        loaded: the run.
        run_dir: its directory.
        lock: of the directory.
        checkpoint: where to continue.
        old_settings: those of the process before; None for a new run.

    Raises:
        TrainersLostError: the training processes have died or hung.
        EmbodrlError: anything else has failed.
    """
    logged_until = None if old_settings is None else -1 if checkpoint is None else _last_logged(checkpoint)
    runner: Runner | None = None
    config, deployment = loaded.config, loaded.deployment
    device = configure_torch(config, deployment.main_place)
    if deployment.main_place is None:  # it keeps a policy for checkpoints, publishing and export alone
        device = torch.device("cpu")
    logger.info("device %s, %d threads", device, num_threads(config))
    console = Console(config.runner.logger.console, config.runner.max_iterations, run_dir.name)
    cpus = deployment.main_place.cpus if deployment.main_place is not None else ()
    with StopSignal(config.runner.stop_timeout_s) as stop, bound_to(cpus), console:
        console.message(f"run: {run_dir}, log: {run_dir / LOG_FILE}")
        console.message(compute_text(config))

        def stopped() -> bool:
            console.advance()
            return bool(stop)

        try:
            with ExitStack() as closing:  # in reverse order, and all of them, whatever fails
                console.phase("starting simulators")
                weights_from = config if checkpoint is None else drop_missing_warm_start(config)
                parts = build(config, weights_from, deployment, run_dir, device, stopped, closing)
                parts.engine.on_step = console.step
                stop.arm()
                saved = None if checkpoint is None else saved_metrics(checkpoint)
                late = None if checkpoint is None else finished_since(run_dir, checkpoint)
                metrics = MetricsLogger(run_dir, config.runner.logger, logged_until, config.model_dump(), saved=saved)
                closing.callback(metrics.close)
                console.restore(read_metrics(metrics.path))
                graph = graph_of(loaded)
                beside = None
                if config.runner.eval_async:
                    beside = EvalBeside(config, deployment, run_dir, parts.policy)
                    closing.callback(beside.close)
                runner = Runner(config, graph, deployment, run_dir, parts, metrics, console, stop, lock, beside)
                num_bytes, best = parts.engine.state_num_bytes(), config.runner.keep_best
                sent = sent_num_bytes(config, deployment, parts.policy)
                check_disk_space(run_dir, config, parts.policy, num_bytes, keep_best=best, sent=sent)
                if checkpoint is not None:
                    console.message(f"resuming from {checkpoint.path}")
                    runner.restore(checkpoint, late)
                # Only now: settings with which it could not be resumed are not kept.
                config_yaml = loaded.to_yaml()
                for line in add_provenance(run_dir, config, config_yaml, old_settings, runner.iteration):
                    console.message(line)
                code = runner.run(write_settings(run_dir, config_yaml, changes_so_far(run_dir)))
        except EmbodrlError as error:
            if stop:
                error.exit_code = stop.exit_code
            elif runner is not None and lost_trainers(runner.engine):
                raise TrainersLostError(error) from error
            if not isinstance(error, (ConfigError, OutputError)):
                error.add_hint(resume_hint(run_dir))
            raise
        lock.check()
        done, finished, saved = runner.iteration, runner.finished, runner.saved
        conclude(config, run_dir, parts.policy, console, done, finished=finished, saved=saved)
    return TrainResult(run_dir, code, parts.policy)
