"""A run whose training processes died or hung continues from its newest checkpoint, as `embodrl resume` would."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.errors import EmbodrlError, WorkerDied
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.processes.restarts import RestartBudget
from embodrl.runs.files import resume_hint
from embodrl.runs.settings import last_settings
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager

logger = logging.getLogger(__name__)


class TrainersLostError(Exception):
    """The training processes have died or hung: the state since the newest checkpoint is lost.

    Args:
        error: that ended the run.
    """

    def __init__(self, error: EmbodrlError) -> None:
        super().__init__(error.message)
        self.error = error


def lost_trainers(engine: TrainEngine) -> bool:
    """Return whether a training process has died or hung."""
    try:
        engine.check()
    except WorkerDied:
        return True
    return False


class Attempt:
    """A try of a run. As a context it catches the loss of the training processes.

    Attributes:
        checkpoint: where it begins; None for the start.
        old_settings: those of the process or try before; None for a new run.
        lost: the error that it has caught.
    """

    def __init__(self, checkpoint: Checkpoint | None, old_settings: str | None) -> None:
        self.checkpoint, self.old_settings = checkpoint, old_settings
        self.lost: EmbodrlError | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.lost = error.error if isinstance(error, TrainersLostError) else None
        return self.lost is not None


def attempts(
    config: Config,
    run_dir: Path,
    checkpoint: Checkpoint | None,
    old_settings: str | None,
    check_directory: Callable[[], None],
) -> Iterator[Attempt]:
    """Yield the tries of a run, as many as ``actor.max_restarts`` allows: ``for attempt in ...: with attempt: return``.

    A loop and not a callback, so that the frames between a command and its gradients stay few.

    Args:
        config: the run.
        run_dir: its directory.
        checkpoint: where it begins first; None for the start.
        old_settings: those of the process before, if the run is resumed.
        check_directory: raises if the run has lost its directory.

    Raises:
        EmbodrlError: the training processes were lost too often, or all checkpoints are damaged.
    """
    budget = RestartBudget(config.actor.max_restarts, config.cluster.restart_window_s)
    restarted = False
    while True:
        attempt = Attempt(checkpoint, old_settings)
        yield attempt
        error, attempt.lost = attempt.lost, None
        assert error is not None
        if not budget.take():
            if restarted:
                error.add(f"stopped after {budget} of the training processes")
            error.add_hint(resume_hint(run_dir))
            raise error from error.__cause__
        check_directory()
        checkpoint, problems = CheckpointManager(run_dir, 1).latest_good()
        if checkpoint is None and problems:
            error.add(f"the run is not restarted: no checkpoint of {run_dir} is intact: {'; '.join(problems)}")
            raise error from error.__cause__
        message = error.message
        del error
        gc.collect()  # what the frames of the error have held, e.g. a policy
        where = "from the start (there is no checkpoint)" if checkpoint is None else f"from {checkpoint.path}"
        logger.warning("restart %s of the training processes, %s: %s", budget.used, where, message)
        restarted, old_settings = True, last_settings(run_dir)
