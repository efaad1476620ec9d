"""The training loop of all learners: iterations, evaluations, rows, checkpoints, signals and errors.

An iteration of training from rollouts is the pipeline that the algorithm implies (``pipelines/builtin.py``); with the
default one, ``step`` of ``learners/rollout.py`` performs in turn:

1. sync weights: the rollout gets the weights of the last update,
2. play: the rollout node steps all environments,
3. reward: episodes are judged by ``reward.fn`` or ``reward.model``, if set,
4. advantage: returns and advantages of every chunk,
5. learn: epochs of minibatches, an optimizer step each,
6. log: the metrics of all steps form a row of metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from embodrl.learners.base import Learner
from embodrl.processes.trace import record
from embodrl.reporting.metrics_file import Row
from embodrl.storage.checkpoint import Checkpoint
from embodrl.trainer.evaluations import Evaluations
from embodrl.trainer.files import hint_from, unsaved_run_message
from embodrl.trainer.journal import Journal
from embodrl.trainer.saving import Saver, iteration_of, pending_row
from embodrl.trainer.schedule import Schedule
from embodrl.trainer.session import PlacementChangedError, RunSession, lost_trainers
from embodrl.trainer.stop import named_exit
from embodrl.trainer.training_share import Balancer

logger = logging.getLogger(__name__)


class Trainer:
    """Runs the iterations of a run.

    ``pending`` is the unwritten row of an iteration that lacks its evaluation; ``is_saved``: the last complete
    iteration has a checkpoint; ``moved``: the run is saved, and continues on another placement.
    """

    def __init__(
        self,
        session: RunSession,
        learner: Learner,
        schedule: Schedule,
        journal: Journal,
        evaluations: Evaluations,
        saver: Saver,
    ) -> None:
        self.session = session
        self.stop = session.stop
        self.learner = learner
        self.schedule = schedule
        self.journal = journal
        self.evaluations = evaluations
        self.saver = saver
        self.iteration = 0
        self.pending: Row | None = learner.first_row() if schedule.evaluates_first else None
        self.is_saved = False
        self.moved: PlacementChangedError | None = None
        moves = session.config.cluster.rebalance and session.config.moves_devices
        self._balancer = Balancer(session.loaded) if moves else None

    @property
    def is_finished(self) -> bool:
        """Whether all iterations are done, logged and evaluated, or the task is solved early."""
        is_done = self.evaluations.is_solved or self.iteration >= self.schedule.total
        return is_done and self.pending is None and self.evaluations.in_progress is None

    def run(self, settings: str) -> int:
        """Train until the last iteration or a signal; return the exit code, 1 if the result could not be saved.

        Raises:
            EmbodrlError: an iteration failed, or an evaluation was a regression; the last complete state is saved.
        """
        self.saver.settings = settings
        self.stop.can_save(hint_from(self.session.run_directory, self.saver.newest))
        self.learner.begin()
        self.evaluations.begin()
        with self._saved_on_error():
            try:
                self._catch_up()
                while not (self.is_finished or self.session.is_to_stop() or self.moved):
                    self.session.lock.check()
                    start = time.perf_counter()
                    self.pending = self.learner.step(self.iteration)
                    self.iteration = int(self.pending["iteration"] or 0)
                    self.is_saved = False
                    record(f"iteration {self.iteration}", start, time.perf_counter())
                    self._complete()
                    self._move_if_faster()
            except (InterruptedError, SystemExit, KeyboardInterrupt) as error:
                # Nothing was learned from the rollout, or from a reward that hangs; an evaluation is still pending.
                if not isinstance(error, InterruptedError) and (self.learner.is_updating or not self.stop.late):
                    raise
                self._undo()
                self.session.is_to_stop()  # a controller that was only interrupted gets the number of the signal
        if not self.is_saved:
            self._save()
        engine = self.learner.engine
        engine.onload()
        if self.is_finished:  # its policy is exported
            engine.fetch()
            if self.is_saved:
                self.learner.finish()
        return (0 if self.is_finished else self.stop.exit_code) if self.is_saved else 1

    def restore(self, checkpoint: Checkpoint, late: Row | None = None) -> None:
        """Continue from a checkpoint; ``late`` is the row of its evaluation in progress, if finished since.

        Raises:
            CheckpointError: the checkpoint was made with other settings.
        """
        self.saver.restore(checkpoint)
        self.iteration = iteration_of(checkpoint)
        self.pending = pending_row(checkpoint.state)
        self.is_saved = late is None
        self.evaluations.restore(checkpoint, late)

    def _catch_up(self) -> None:
        """Complete the first iteration of a process: the evaluation before the first update, or the pending rest."""
        if self.schedule.saves_first and not self.is_saved:
            self._save()
        if self.pending is not None:
            self._complete()
        elif self.iteration == self.schedule.total:
            self._take_late(wait=True)
        if self.evaluations.regressed:
            raise self.evaluations.regressed

    def _complete(self) -> None:
        """Evaluate and save when due, and log the pending row."""
        assert self.pending is not None
        row = dict(self.pending)
        clock = time.perf_counter()
        is_last = self.iteration == self.schedule.total
        is_due = self.schedule.is_evaluated(self.iteration)
        every_decoding = self.schedule.is_first_or_last(self.iteration)
        self._take_late(wait=is_due)
        if is_due:
            row |= self.evaluations.measure(self.iteration, is_last, every_decoding)
        row["time/total_s"] = row.get("time/total_s", 0.0) + time.perf_counter() - clock
        written = self.journal.add(row)
        self.pending = None
        self.is_saved = False
        if is_due:
            self.evaluations.conclude(self.iteration, written, is_last, every_decoding)
        if self.is_finished or self.evaluations.regressed or self.schedule.is_saved(self.iteration):
            self._save_in_turn()
        if self.evaluations.regressed:
            raise self.evaluations.regressed
        if self.is_finished and not is_last:
            text = f"solved: evaluations reach a success rate of {self.session.config.runner.stop_at_success:g}"
            self.journal.view.message(f"{text}; stopping after iteration {self.iteration}")

    def _move_if_faster(self) -> None:
        """Save the run and end its stay here, if a faster placement has been found and there is more to do."""
        found = self._balancer.take(self.journal.rows[-1]) if self._balancer is not None else None
        if found is None or self.is_finished or self.stop:
            return
        if not self.is_saved:
            self._save_in_turn()
        if self.is_saved:
            self.moved = PlacementChangedError(*found)

    def _undo(self) -> None:
        """Undo the iteration in progress; if that is interrupted late, finish it."""
        was_late = self.stop.late
        try:
            self.learner.undo()
        except (SystemExit, KeyboardInterrupt):
            if was_late or not self.stop.late:
                raise
            self.learner.undo()
        rows = self.journal.rows
        if self.pending is not None and rows and rows[-1]["iteration"] == self.pending["iteration"]:
            self.pending = None  # interrupted after its row was written
            self.is_saved = False

    def _take_late(self, wait: bool) -> None:
        if self.evaluations.take(self.iteration, wait):
            self.is_saved = False

    def _save_in_turn(self) -> None:
        self.journal.view.phase("saving")
        self.learner.prepare_save()
        self._save()
        self.learner.release_after_save()

    def _save(self) -> None:
        content: dict[str, object] = {
            "iteration": self.iteration,
            "pending": self.pending,
            "evaluation": self.evaluations.state(),
        }
        with self.stop.saving():
            if not self.saver.save(self.iteration, content, self.journal.metrics.content):
                return
            self.learner.saved(self.iteration)
        self.is_saved = True
        self.stop.can_save(hint_from(self.session.run_directory, self.saver.newest))
        self.journal.view.message(f"saved {self.saver.newest}")

    @contextlib.contextmanager
    def _saved_on_error(self) -> Iterator[None]:
        """Save the last complete iteration if the block raises; name an exit of custom code."""
        try:
            yield
        except BaseException as error:  # user functions may raise anything; re-raised
            if self.stop:  # no time is left, or the process with the state hangs
                if self.iteration and not self.is_saved:
                    logger.error("%s", unsaved_run_message(self.session.directory, self.iteration))
            elif not lost_trainers(self.learner.engine):
                self._save_complete_state()
            if isinstance(error, SystemExit) and not self.stop:
                raise named_exit(error) from error
            raise

    def _save_complete_state(self) -> None:
        """After an error, save the state of the last complete iteration if it still exists; never raises."""
        if self.is_saved or not self.iteration:
            return
        if self.learner.is_updating:
            logger.error("iteration %d failed within its update and cannot be undone: not saved", self.iteration + 1)
            return
        try:
            self.learner.undo()
            self._save()
        except Exception as error:  # noqa: BLE001  (the first error is reported; its damage may be unknown)
            why = str(error) or type(error).__name__
            logger.error("the state after iteration %d could not be saved: %s", self.iteration, why)
