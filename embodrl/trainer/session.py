"""A process that works on a run: directory, lock, log, stop signal, and attempts after lost training processes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.deployment import Deployment
from embodrl.errors import CheckpointError, ConfigError, EmbodrlError, OutputError, WorkerDied
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.controllers import ALONE, Controllers
from embodrl.processes.restarts import RestartBudget
from embodrl.processes.trace import recordable
from embodrl.reporting.log import RunLog
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager
from embodrl.trainer.files import LOG_FILE, TRACE_DIR, drop_missing_warm_start, resume_hint
from embodrl.trainer.lock import LOCK_FILE, RunLock, run_lock
from embodrl.trainer.provenance import add_provenance, changes_so_far
from embodrl.trainer.settings import last_settings, write_settings
from embodrl.trainer.stop import StopSignal

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TrainersLostError(Exception):
    """The training processes have died or hung: the state since the newest checkpoint is lost."""

    def __init__(self, error: EmbodrlError) -> None:
        super().__init__(error.message)
        self.error = error


class PlacementChangedError(Exception):
    """The run is saved, and continues on another placement: it ends an attempt without a fault."""

    def __init__(self, loaded: LoadedConfig, reason: str) -> None:
        super().__init__(reason)
        self.loaded = loaded


def lost_trainers(engine: TrainEngine) -> bool:
    """Return whether a training process has died or hung."""
    try:
        engine.check()
    except WorkerDied:
        return True
    return False


class RunSession:
    """One attempt of a process at a run.

    Args:
        checkpoint: start of the attempt; None for the start of the run.
        old_settings: settings text of the previous process or attempt; None for a new run.

    Attributes:
        engine: train engine; None until created. If it has lost a process, another attempt follows.
        controllers: main processes of the run, of which this is one.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        directory: Path,
        lock: RunLock,
        stop: StopSignal,
        checkpoint: Checkpoint | None,
        old_settings: str | None,
    ) -> None:
        self.loaded = loaded
        self.directory = directory
        self.lock = lock
        self.stop = stop
        self.checkpoint = checkpoint
        self.old_settings = old_settings
        self.engine: TrainEngine | None = None
        self.controllers = ALONE

    def is_to_stop(self) -> bool:
        """Return whether the run is to stop; all controllers call it at the same point, and get the same answer."""
        if self.controllers.count > 1:
            self.stop.take(max(self.controllers.exchange("stop", self.stop.number)))
        return bool(self.stop)

    def hears_stop(self) -> bool:
        """Return whether this controller or, soon after, any other one has got a signal."""
        if self.stop:
            self.controllers.announce_stop(self.stop.number)
        return bool(self.stop) or self.controllers.hears_stop()

    @property
    def run_directory(self) -> Path:
        """Directory of the run, in which a controller other than the first has its own ``directory``."""
        return self.directory.parents[1] if self.controllers.rank else self.directory

    @property
    def config(self) -> Config:
        """Values of the configuration."""
        return self.loaded.config

    @property
    def deployment(self) -> Deployment:
        """Placement of the run."""
        return self.loaded.deployment

    @cached_property
    def weights_from(self) -> Config:
        """Configuration that the policy is built from: a checkpoint replaces a missing warm start."""
        return self.config if self.checkpoint is None else drop_missing_warm_start(self.config)

    def record(self, iteration: int, say: Callable[[str], None]) -> str:
        """Write the settings and the provenance of this process; return the settings, for checkpoints."""
        text = self.loaded.to_yaml()
        for line in add_provenance(self.directory, self.config, text, self.old_settings, iteration):
            say(line)
        return write_settings(self.directory, text, changes_so_far(self.directory))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add to an error of the block how the run continues; identify a loss of training processes.

        Raises:
            TrainersLostError: the training processes have died or hung.
            EmbodrlError: any other failure.
        """
        try:
            yield
        except EmbodrlError as error:
            if self.stop:
                error.exit_code = self.stop.exit_code
            elif self.engine is not None and lost_trainers(self.engine):
                raise TrainersLostError(error) from error
            if not isinstance(error, (ConfigError, OutputError)):
                error.add_hint(resume_hint(self.run_directory))
            raise


@contextmanager
def run_directory_of(directory: Path) -> Iterator[RunLock]:
    """Lock and log into the directory of a run; a new directory that a rejected start leaves empty is removed."""
    is_new = not directory.exists()
    with run_lock(directory) as lock:
        try:
            with RunLog(directory / LOG_FILE), recordable((directory / TRACE_DIR).absolute()):
                yield lock
        except EmbodrlError:
            if is_new:
                _remove_empty_start(directory)
            raise


def _remove_empty_start(directory: Path) -> None:
    """Remove a directory with nothing but the lock and the main log, whose error the command also prints."""
    log = directory / LOG_FILE
    own = {log, log.parent, directory / LOCK_FILE}
    if not set(directory.rglob("*")) <= own:
        return
    with suppress(OSError):  # report the error that ended the start
        log.unlink(missing_ok=True)
        log.parent.rmdir()
        (directory / LOCK_FILE).unlink(missing_ok=True)
        directory.rmdir()


def run_with_restarts(
    loaded: LoadedConfig,
    directory: Path,
    lock: RunLock,
    work: Callable[[RunSession], T],
    checkpoint: Checkpoint | None = None,
    old_settings: str | None = None,
    controllers: Controllers = ALONE,
) -> T:
    """Work on a run, again from the newest checkpoint if training processes are lost (``actor.max_restarts``), or if
    its placement changes (``cluster.rebalance``).

    Args:
        loaded: loaded configuration.
        directory: run directory.
        lock: lock of the directory.
        work: performs an attempt and returns its result.
        checkpoint: first starting point; None for the start.
        old_settings: the previous process's settings, if the run is resumed.
        controllers: main processes of the run, of which this is one.

    Raises:
        EmbodrlError: the training processes were lost too often, all checkpoints are damaged, or another failure.
    """
    budget = RestartBudget(loaded.config.actor.max_restarts, loaded.config.cluster.restart_window_s)
    is_restarted = False
    session: RunSession | None = None
    left: LoadedConfig | None = None  # the placement that the run has just left
    while True:
        try:
            with StopSignal(loaded.config.runner.stop_timeout_s) as stop:
                session = RunSession(loaded, directory, lock, stop, checkpoint, old_settings)
                session.controllers = controllers
                with session.explained():
                    return work(session)
        except TrainersLostError as lost:
            checkpoint = _next_start(lost.error, directory, lock, budget, is_restarted)
            where = "from the start (there is no checkpoint)" if checkpoint is None else f"from {checkpoint.path}"
            message = f"restart {budget.used} of the training processes, {where}: {lost.error.message}"
            is_restarted = True
        except PlacementChangedError as changed:
            left, loaded = loaded, changed.loaded
            lock.check()
            checkpoint, problems = CheckpointManager(directory, 1).latest_good()
            if problems:
                why = f"the run does not continue elsewhere: its last checkpoint is damaged: {'; '.join(problems)}"
                raise CheckpointError(why, resume_hint(directory), code="checkpoint-damaged") from changed
            message = f"all processes are started again, on another placement: {changed}"
        except EmbodrlError as error:
            if left is None or session is None or session.stop or session.engine is not None:
                raise
            loaded, left = staying(left), None
            message = f"the run stays where it was, as its processes can't be started elsewhere: {error.message}"
        session = None
        gc.collect()  # objects held by the error's frames, e.g. a policy
        torch.cuda.empty_cache()
        logger.warning("%s", message)
        old_settings = last_settings(directory)


def staying(loaded: LoadedConfig) -> LoadedConfig:
    """Return the run on its placement, without ``cluster.rebalance``."""
    cluster = loaded.config.cluster.model_copy(update={"rebalance": 0})
    return replace(loaded, config=loaded.config.model_copy(update={"cluster": cluster}))


def _next_start(
    error: EmbodrlError, directory: Path, lock: RunLock, budget: RestartBudget, is_restarted: bool
) -> Checkpoint | None:
    """Return the checkpoint that the next attempt begins with; None for the start."""
    if not budget.take():
        if is_restarted:
            error.add(f"stopped after {budget} of the training processes")
        error.add_hint(resume_hint(directory))
        raise error from error.__cause__
    lock.check()
    checkpoint, problems = CheckpointManager(directory, 1).latest_good()
    if checkpoint is None and problems:
        error.add(f"the run is not restarted: no checkpoint of {directory} is intact: {'; '.join(problems)}")
        raise error from error.__cause__
    return checkpoint
