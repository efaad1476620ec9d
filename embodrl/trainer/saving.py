"""The checkpoints of a run: state of the trainer, the engine and the learner for a resuming process."""

from __future__ import annotations

import logging
import zlib
from contextlib import ExitStack
from pathlib import Path

from embodrl.data.rng import capture_rng, restore_rng
from embodrl.errors import CheckpointError, OutputError
from embodrl.fields import Fields
from embodrl.hybrid_engines.base import EngineState, counters_of
from embodrl.learners.base import Learner
from embodrl.reporting.metrics_file import METRICS_FILE, Row
from embodrl.reporting.sinks import MetricsLogger
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager
from embodrl.trainer.async_evaluation import unfinished_evaluation
from embodrl.trainer.files import METRICS_BLOB, saved_metrics
from embodrl.trainer.session import RunSession
from embodrl.trainer.settings import STATE_DIM, STATE_KEY
from embodrl.workers.actor import saves_shards

logger = logging.getLogger(__name__)


class Saver:
    """Writes and reads checkpoints."""

    def __init__(self, session: RunSession, learner: Learner) -> None:
        self.settings = ""
        self.newest: Path | None = None
        self.manager = CheckpointManager(session.directory, session.config.runner.keep_last_n)
        self._session = session
        self._learner = learner

    def save(self, iteration: int, content: dict[str, object], metrics: bytearray) -> bool:
        """Write a checkpoint; return whether it was written: a full disk costs a logged error, not the run.

        Raises:
            OutputError: the run no longer owns its directory.
        """
        self._session.lock.check()
        engine = self._learner.engine
        controllers = self._session.controllers
        is_sharded = saves_shards(self._session.config, self._session.deployment)
        saved = EngineState({}, engine.counters()) if is_sharded else engine.state_dict()
        where = ""
        try:
            kept = self._learner.state()
            state = {
                **content,
                STATE_KEY: self.settings,
                "engine": saved.state,
                "sharded": is_sharded,
                "rng": capture_rng(),
                STATE_DIM: self._learner.policy.seen_state_dim,
                **kept.content,
            }
            write_shards = engine.save_shards if is_sharded else None
            blobs = {**kept.blobs, METRICS_BLOB: zlib.compress(metrics, 1)}
            if controllers.rank == 0:
                tensors = {**saved.tensors, **kept.tensors}
                where = str(self.manager.save(iteration, tensors, state, blobs, write_shards))
        except OutputError as error:
            logger.error("%s", error)
        if where := controllers.first("saved", where):
            self.newest = Path(where)
        return bool(where)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore engine, learner and random states from a checkpoint.

        Raises:
            CheckpointError: it was made with other settings, or is damaged.
        """
        state = checkpoint.state
        engine = self._learner.engine
        counters = counters_of(state.fields("engine"))
        if state.flag("sharded", False):
            engine.load_shards(checkpoint.path, counters)
        else:
            tensors = {name: checkpoint.tensors(name) for name in engine.shapes().sections}
            engine.load_state_dict(EngineState(tensors, counters))
        try:
            self._learner.load_state(checkpoint)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # entries have unexpected types
            message = f"the state in {checkpoint.path} can't be used: {type(error).__name__} {error}"
            hint = "resume with the version of embodrl that wrote the checkpoint, or from an earlier one"
            raise CheckpointError(message, hint, code="checkpoint-damaged") from error
        restore_rng(dict(state.fields("rng").content))
        self.newest = checkpoint.path


def iteration_of(checkpoint: Checkpoint) -> int:
    """Return the number of complete iterations of a checkpoint."""
    return checkpoint.state.integer("iteration")


def pending_row(state: Fields) -> Row | None:
    """Return the row of a checkpoint's iteration if it is missing in the metrics file, else None."""
    return None if state.content.get("pending") is None else dict(state.fields("pending").content)


def is_complete(checkpoint: Checkpoint, total: int) -> bool:
    """Return whether a checkpoint is the last of so many iterations, with a finished evaluation."""
    is_evaluated = pending_row(checkpoint.state) is None and unfinished_evaluation(checkpoint) is None
    return iteration_of(checkpoint) >= total and is_evaluated


def open_metrics(session: RunSession, closing: ExitStack, file_name: str = METRICS_FILE) -> MetricsLogger:
    """Return the file of rows, cut back to the start of the attempt; an evaluation of that iteration may be pending."""
    checkpoint = session.checkpoint
    config = session.config
    saved = b""
    logged_until = None if session.old_settings is None else -1
    if checkpoint is not None:
        saved = saved_metrics(checkpoint)
        logged_until = iteration_of(checkpoint) - (pending_row(checkpoint.state) is not None)
    logged = (config.runner.logger, logged_until, config.model_dump())
    return closing.enter_context(MetricsLogger(session.directory, *logged, saved=saved, file_name=file_name))
