"""The evaluations of a run, between iterations or in parallel with training, and their consequences."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

from embodrl.errors import EmbodrlError, OutputError
from embodrl.learners.base import Learner
from embodrl.reporting.metrics_file import Row
from embodrl.reporting.rows import is_number
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager
from embodrl.trainer.async_evaluation import AsyncEvaluator, PendingEvaluation, late_row, unfinished_evaluation
from embodrl.trainer.files import BEST_POLICY_DIR, export_policy
from embodrl.trainer.journal import Journal
from embodrl.trainer.session import RunSession

logger = logging.getLogger(__name__)


class Evaluations:
    """Measures the policy, keeps the best one, and judges the success rates.

    Args:
        checkpoints: checkpoints of the run, of which the best one's is kept.
        async_evaluator: evaluates in parallel with training; None evaluates between iterations.

    Attributes:
        best: success rate of the best policy so far; -1 without one.
        regressed: error of an evaluation with a regression; None without one.
    """

    def __init__(
        self,
        session: RunSession,
        learner: Learner,
        journal: Journal,
        checkpoints: CheckpointManager,
        async_evaluator: AsyncEvaluator | None = None,
    ) -> None:
        self.session = session
        self.learner = learner
        self.journal = journal
        self.checkpoints = checkpoints
        self.async_evaluator = async_evaluator
        self.regressed: EmbodrlError | None = None
        rates = (row.get("eval/success_rate") for row in journal.rows if row["iteration"])
        self.best = max((rate for rate in rates if is_number(rate)), default=-1.0)
        self._unfinished: PendingEvaluation | None = None

    @property
    def in_progress(self) -> PendingEvaluation | None:
        """Evaluation that has begun and whose result has not been taken."""
        return None if self.async_evaluator is None else self.async_evaluator.in_progress

    @property
    def is_solved(self) -> bool:
        """Whether the evaluations are good enough to end the run early."""
        runner = self.session.config.runner
        return self.journal.is_solved(runner.stop_at_success, runner.stop_evaluations)

    def begin(self) -> None:
        """Judge the rows of earlier processes, and continue the evaluation in progress.

        Raises:
            EmbodrlError: the last evaluation was a regression.
        """
        rows = self.journal.rows
        evaluated = [i for i, row in enumerate(rows, start=1) if "eval/success_rate" in row]
        # With parallel evaluations, the rows after the last evaluated one have no result yet.
        until = len(rows) if self.async_evaluator is None else max(evaluated, default=0)
        if regressed := self._regression(until):
            raise regressed
        if self.async_evaluator is not None:
            engine = self.learner.engine
            self.async_evaluator.continue_from(engine.version, engine.weights, self._unfinished)

    def measure(self, iteration: int, is_last: bool, every_decoding: bool) -> Row:
        """Evaluate now, unless evaluations run in parallel; return the metrics.

        Raises:
            InterruptedError: a signal arrived during the evaluation.
        """
        if self.async_evaluator is not None:
            return {}
        return self.learner.evaluate(self._video_dir(iteration, is_last), every_decoding)

    def conclude(self, iteration: int, row: Row, is_last: bool, every_decoding: bool) -> None:
        """Draw the conclusions of an evaluation whose row is written, or begin a parallel one."""
        if self.async_evaluator is not None:
            self._begin_async(iteration, is_last, every_decoding)
            return
        self.regressed = self._regression(len(self.journal.rows))
        if self.session.config.runner.keep_best and iteration:
            self._keep_best(iteration, row.get("eval/success_rate"))

    def take(self, iteration: int, wait: bool) -> bool:
        """Write the finished parallel evaluation; return whether there was one.

        Raises:
            InterruptedError: the run is stopping, and the evaluation is still in progress.
        """
        if self.async_evaluator is None:
            return False
        if wait and self.in_progress is not None:
            self.journal.view.phase(f"evaluation after iteration {self.in_progress.iteration}")
        taken = self.async_evaluator.take(wait, self._is_to_stop)
        if taken is None:
            return False
        done, answer = taken
        self._add_late(late_row(done, answer, iteration))
        if answer["is_best"]:
            self.best = answer["metrics"]["eval/success_rate"]
            self.checkpoints.keep_best(done.iteration)
        if answer["problem"]:
            logger.error("%s", answer["problem"])
        return True

    def state(self) -> dict[str, object] | None:
        """Return the evaluation in progress, for a checkpoint."""
        return None if self.in_progress is None else asdict(self.in_progress)

    def restore(self, checkpoint: Checkpoint, late: Row | None) -> None:
        """Continue from a checkpoint; ``late`` is the row of its evaluation in progress, if finished since."""
        self._unfinished = unfinished_evaluation(checkpoint)
        if late is not None:
            self._unfinished = None
            self._add_late(late)
            rate = late.get("eval/success_rate")
            if late["iteration"] and is_number(rate) and rate > self.best:  # policy_best/ was exported with the row
                self.best = float(rate)
                self.checkpoints.keep_best(late["iteration"])
        elif self._unfinished is not None and self.async_evaluator is None:
            text = "the policy after iteration %d is not evaluated: runner.eval_async is false now"
            logger.warning(text, self._unfinished.iteration)

    def _regression(self, until: int) -> EmbodrlError | None:
        return self.journal.regression(until, self.session.config.runner.max_regression)

    def _is_to_stop(self) -> bool:
        self.learner.engine.check()
        return bool(self.session.stop)

    def _video_dir(self, iteration: int, is_last: bool) -> Path | None:
        video = self.session.config.env.video
        wanted = self.learner.records_videos and video.enabled and (is_last or video.every_eval)
        return self.session.directory / "videos" / f"iteration_{iteration:04d}" if wanted else None

    def _begin_async(self, iteration: int, is_last: bool, every_decoding: bool) -> None:
        """Begin an evaluation unless the previous one ended the run; wait for the last iteration's."""
        assert self.async_evaluator is not None
        if self.is_solved or self.regressed:
            return
        config = self.session.config
        engine = self.learner.engine
        if config.evaluated is config:  # as after an evaluation between iterations
            self.learner.prepare_save()
            self.learner.release_after_save()
        video_dir = self._video_dir(iteration, is_last)
        where = None if video_dir is None else str(video_dir.resolve())
        best = self.best if config.runner.keep_best and iteration else None
        wanted = PendingEvaluation(iteration, engine.version, where, best, every_decoding)
        self.async_evaluator.begin(wanted, engine.weights())
        self.take(iteration, wait=is_last)

    def _add_late(self, row: Row) -> None:
        index = self.journal.add_late(row)
        self.regressed = self.regressed or self._regression(index + 1)

    def _keep_best(self, iteration: int, success_rate: object) -> None:
        """Export the policy if it is the best so far; a full disk costs a logged error, not the run."""
        if not isinstance(success_rate, float) or success_rate <= self.best:
            return
        self.best = success_rate
        self.checkpoints.keep_best(iteration)
        self.learner.engine.onload()
        self.learner.engine.fetch()
        directory = self.session.directory / BEST_POLICY_DIR
        try:
            facts = {"iteration": iteration, "success_rate": success_rate}
            export_policy(self.learner.policy, directory, self.session.config, **facts)
            logger.info("best evaluation so far: exported to %s", directory)
        except OutputError as error:
            logger.error("%s", error)
        self.learner.release_after_save()
