"""`embodrl train` and `embodrl resume`: bring up the components of a run, and execute it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from embodrl.config import LoadedConfig
from embodrl.deployment.launched import launched
from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.controllers import joined
from embodrl.preflight.placement import weighed
from embodrl.processes.cores import bound_to
from embodrl.reporting.console import Console
from embodrl.storage.checkpoint import CheckpointManager, open_checkpoint, preflight
from embodrl.trainer.controllers import follow
from embodrl.trainer.files import (
    LEAST_FREE_BYTES,
    LOG_FILE,
    has_results,
    refuse_earlier_run,
    run_directory,
)
from embodrl.trainer.lock import RunLock
from embodrl.trainer.loop import Trainer
from embodrl.trainer.parts import check_machine, device_of, make_trainer, start_learner
from embodrl.trainer.provenance import compute_text
from embodrl.trainer.result import TrainResult, already_complete, conclude
from embodrl.trainer.saving import is_complete, iteration_of
from embodrl.trainer.schedule import Schedule
from embodrl.trainer.session import RunSession, run_directory_of, run_with_restarts
from embodrl.trainer.settings import STATE_KEY, is_run, load_saved, not_a_run, refuse_impossible
from embodrl.workers.policy import num_generators, num_threads, resolve_device

logger = logging.getLogger(__name__)

COMPLETE = "complete"
"""In place of the checkpoint to resume from: nothing is left to do."""


def train(loaded: LoadedConfig) -> TrainResult:
    """Train in a new run directory.

    Raises:
        EmbodrlError: a requirement is missing (before anything has started), or the run failed.
    """
    loaded = weighed(loaded.with_absolute_paths())
    config = loaded.config
    check_machine(config, loaded.deployment)
    with joined(config, resolve_device(config)) as controllers:
        run_dir = Path(controllers.first("run directory", str(run_directory(config))))
        if controllers.rank:
            controllers.first("begin", None)
            return follow(loaded, run_dir, controllers, work)
        with run_directory_of(run_dir) as lock:
            refuse_earlier_run(run_dir)
            preflight(run_dir, LEAST_FREE_BYTES)
            controllers.first("begin", None)
            return run_with_restarts(loaded, run_dir, lock, work, controllers=controllers)


def resume(directory: Path, overrides: list[str], trust: bool = False) -> int:
    """Continue a run from its last intact checkpoint, or from the start if it has none; return the exit code.

    Raises:
        CheckpointError: this is not a run, all its checkpoints are damaged, or its settings are lost.
        ConfigError: its settings were edited, or are invalid.
    """
    if not is_run(directory):
        raise not_a_run(directory)
    place = launched()
    if place is not None and place.rank:
        return _follow(directory, overrides, trust)
    with run_directory_of(directory) as lock:
        preflight(directory, LEAST_FREE_BYTES)
        return _resume(directory, lock, overrides, trust).exit_code


def _follow(directory: Path, overrides: list[str], trust: bool) -> int:
    """Take part in a resumed run as a controller other than the first, which chooses the checkpoint."""
    loaded, _ = load_saved(directory, overrides, "train", None, True, trust)
    loaded = weighed(loaded.with_absolute_paths())
    check_machine(loaded.config, loaded.deployment)
    with joined(loaded.config, resolve_device(loaded.config)) as controllers:
        start = controllers.first("resume", None)
        if start == COMPLETE:
            return 0
        checkpoint = None if start is None else open_checkpoint(Path(start))
        return follow(loaded, directory, controllers, work, checkpoint).exit_code


def _resume(directory: Path, lock: RunLock, overrides: list[str], trust: bool) -> TrainResult:
    checkpoint, problems = CheckpointManager(directory, 1).latest_good()
    loaded, saved = load_saved(directory, overrides, "train", checkpoint, True, trust)
    for note in loaded.notes:
        if note.code == "schedule-kept":  # the other notes were shown when the run began
            logger.warning("%s %s; %s", note.key, note.message, note.hint)
    loaded = weighed(loaded.with_absolute_paths())
    config = loaded.config
    check_machine(config, loaded.deployment)
    # First, so that others do not wait for a controller that refuses the checkpoint.
    with joined(config, resolve_device(config)) as controllers:
        if checkpoint is None:
            if problems:
                raise CheckpointError(
                    f"no checkpoint of {directory} is intact: {'; '.join(problems)}",
                    "start a new run, or delete its checkpoints/ to restart this one",
                    code="checkpoint-missing",
                )
            logger.warning("%s has no checkpoint: it starts over", directory)
            controllers.first("resume", None)
            return run_with_restarts(loaded, directory, lock, work, None, saved.text, controllers)
        state = checkpoint.state
        generators = num_generators(config, loaded.deployment) * config.cluster.controllers
        done = iteration_of(checkpoint)
        refuse_impossible(config, state.text(STATE_KEY), state.fields("rollout"), generators, done)
        is_done = is_complete(checkpoint, config.runner.max_iterations) and has_results(directory)
        controllers.first("resume", COMPLETE if is_done else str(checkpoint.path.resolve()))
        if is_done:
            return already_complete(config, directory, checkpoint, done, overrides)
        return run_with_restarts(loaded, directory, lock, work, checkpoint, saved.text, controllers)


def work(session: RunSession) -> TrainResult:
    """Bring up the components of a run, execute it, and write the report.

    Raises:
        EmbodrlError: a requirement is missing, or the run failed.
    """
    config = session.config
    deployment = session.deployment
    directory = session.directory
    device = device_of(config, deployment)
    logger.info("device %s, %d threads", device, num_threads(config))
    for reason in deployment.reasons:
        logger.info("cluster.placement=%s: %s", config.cluster.placement, reason)
    later = Schedule.of_training(config).evaluations_after
    console = Console(
        config.runner.logger.console, config.runner.max_iterations, directory.name, evaluations_after=later
    )
    cpus = deployment.main_place.cpus if deployment.main_place is not None else ()
    with bound_to(cpus), console:
        console.message(f"run: {directory}, log: {directory / LOG_FILE}")
        console.message(compute_text(config))
        with ExitStack() as closing:  # in reverse order, and all of them, whatever fails
            trainer, settings = _bring_up(session, console, device, closing)
            code = trainer.run(settings)
        if trainer.moved is not None and not session.stop:
            raise trainer.moved
        code = code or session.stop.exit_code  # a signal may come while a run that moves closes
        session.lock.check()
        policy = trainer.learner.policy
        if session.controllers.rank:  # the first one writes the results
            return TrainResult(directory, code, policy)
        conclude(config, directory, policy, console, trainer.iteration, trainer.is_finished, trainer.is_saved)
    return TrainResult(directory, code, policy)


def _bring_up(session: RunSession, console: Console, device: torch.device, closing: ExitStack) -> tuple[Trainer, str]:
    """Return the trainer at the starting point of this attempt, and the settings for its checkpoints."""
    config = session.config

    def stopped() -> bool:
        console.advance()
        return session.hears_stop()

    console.phase("starting simulators")
    learner = start_learner(session, device, stopped, console.phase, closing, console.step)
    schedule = Schedule.of_training(config)
    trainer = make_trainer(session, learner, schedule, console, closing)
    # Only now, so that settings that could not be resumed are not kept.
    return trainer, session.record(trainer.iteration, console.message)
