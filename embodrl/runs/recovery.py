"""A run whose training processes died or hung goes on from its newest checkpoint, as `embodrl resume` would."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from embodrl.config.schema import Config
from embodrl.errors import EmbodrlError, WorkerDied
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.processes.restarts import RestartBudget
from embodrl.runs.files import how_to_go_on
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager

logger = logging.getLogger(__name__)
R = TypeVar("R")


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


def with_restarts(
    execute: Callable[[Checkpoint | None, bool], R], config: Config, run_dir: Path, checkpoint: Checkpoint | None
) -> R:
    """Return what a run returns, which begins again as often as ``actor.max_restarts`` allows.

    Args:
        execute: runs from a checkpoint, or from the start; is told whether that is a restart.
        config: the run.
        run_dir: its directory.
        checkpoint: where it begins first.

    Raises:
        EmbodrlError: the run failed otherwise, or too often.
    """
    budget = RestartBudget(config.actor.max_restarts, config.cluster.restart_window_s)
    restarted = False
    while True:
        try:
            return execute(checkpoint, restarted)
        except TrainersLostError as lost:
            if not budget.take():
                if restarted:
                    lost.error.add(f"given up after {budget} of the training processes")
                lost.error.add_hint(how_to_go_on(run_dir))
                raise lost.error from lost.error.__cause__
            message = lost.error.message
        gc.collect()  # what the frames of the error have held: a policy, say
        checkpoint, _ = CheckpointManager(run_dir, 1).latest_good()
        where = "from the start (there is no checkpoint)" if checkpoint is None else f"from {checkpoint.path}"
        logger.warning("restart %s of the training processes, %s: %s", budget.used, where, message)
        restarted = True
