"""Evaluation in parallel with training (``runner.eval_async``), in a process with its own simulators and policy."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from embodrl.config.schema import Config
from embodrl.deployment import Deployment
from embodrl.errors import OutputError, WeightSyncError, WorkerDied
from embodrl.fields import read_regular_file
from embodrl.hybrid_engines.weight_sync.buckets import Named, trained_names
from embodrl.hybrid_engines.weight_sync.disk import DiskSender
from embodrl.hybrid_engines.weight_sync.follower import WeightSource
from embodrl.models.base import VLAPolicy
from embodrl.processes.liveness import Limits
from embodrl.processes.restarts import RestartBudget
from embodrl.reporting.metrics_file import MAX_BYTES, METRICS_FILE, Row, parse_row
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.launchers.process import ProcessLauncher
from embodrl.scheduler.worker import Worker, dispatch
from embodrl.storage.checkpoint import Checkpoint
from embodrl.trainer.files import BEST_POLICY_DIR, EVAL_WEIGHTS_DIR, export_policy
from embodrl.workers.collector import Share, share_config
from embodrl.workers.evaluator import evaluation_result, join_results, run_decodings
from embodrl.workers.parts import make_share
from embodrl.workers.rollout_backend import evaluator_class

logger = logging.getLogger(__name__)

LOOK_S = 0.1
_START_TIMEOUT_S = 3600.0


class EvaluationAnswer(TypedDict):
    """The process's answer: metrics, whether it exported the policy as the best so far, and the export error."""

    metrics: dict[str, float]
    is_best: bool
    problem: str


class EvaluationProcess(Worker):
    """Evaluates versions of the policy exactly as the run itself would between two iterations.

    It has the environments of one rollout process and plays the shares of all processes in turn, so that the policy
    sees the same batches. Weights come from the run directory; logs and the best policy go there.
    """

    def __init__(self, config: Config, deployment: Deployment, run_dir: str) -> None:
        self._run_dir = Path(run_dir)
        self._share = Share(0, len(deployment.of("rollout")))
        self._whole = config
        logs = self._run_dir / "logs" / "evaluation"
        places = deployment.of("eval_env")
        self._pool, self._engine = make_share(config, deployment, self._share, logs, places, training=False)
        self._evaluator = evaluator_class(config)(share_config(config, self._share), self._pool, self._engine)
        self._source = WeightSource(self._engine)

    def close(self) -> None:
        """Stop the simulators."""
        self._pool.close()

    @dispatch()
    def evaluate(
        self, iteration: int, version: int, video_dir: str | None, best: float | None, every_decoding: bool
    ) -> EvaluationAnswer:
        """Evaluate the newest weights, and export them if they beat ``best``; None exports nothing.

        Raises:
            WeightSyncError: the weights are damaged, or not of ``version``.
        """
        directory = self._run_dir / EVAL_WEIGHTS_DIR
        self._source.take(directory)
        if self._engine.version != version:
            raise WeightSyncError(
                f"{directory} has version {self._engine.version} of the weights, and {version} is to be evaluated",
                "make sure that nothing else writes there, and `embodrl resume` the run",
                code="evaluation-weights",
            )
        episodes = np.arange(self._evaluator.config.env.eval.num_episodes)
        where = None if video_dir is None else Path(video_dir)
        shares = np.array_split(episodes, self._share.count)
        decodings = run_decodings(self._evaluator.config, self._engine, every_decoding)
        played = [self._evaluator.run_episodes(share, where, decodings=decodings) for share in shares]
        results = join_results(played, sum)
        result = evaluation_result(self._evaluator.config, results)
        is_best = best is not None and result.success_rate > best
        return {
            "metrics": result.metrics(),
            "is_best": is_best,
            "problem": self._export(iteration, result.success_rate) if is_best else "",
        }

    def _export(self, iteration: int, success_rate: float) -> str:
        """Export the policy as the best one; return the error message if that failed."""
        facts = {"iteration": iteration, "success_rate": success_rate}
        try:
            export_policy(self._engine.policy, self._run_dir / BEST_POLICY_DIR, self._whole, **facts)
        except OutputError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class PendingEvaluation:
    """An evaluation in progress; ``best`` is the best success rate before, None if none is kept."""

    iteration: int
    version: int
    video_dir: str | None
    best: float | None
    every_decoding: bool


class AsyncEvaluator:
    """Sends policies to the evaluation process, one at a time, and takes the results; restarts the process if lost.

    The weights use ``weight_sync/disk.py``: a resumed run repeats the evaluation ``in_progress``.
    """

    def __init__(self, config: Config, deployment: Deployment, run_dir: Path, policy: VLAPolicy) -> None:
        self.in_progress: PendingEvaluation | None = None
        self._run_dir = run_dir.resolve()
        self._places = deployment.of("eval")
        self._log_dir = run_dir / "logs"
        self._launcher = ProcessLauncher(Limits(config.cluster.heartbeat_timeout_s, config.cluster.stall_timeout_s))
        self._group = WorkerGroup(
            EvaluationProcess,
            "evaluation",
            independent=True,
            config=config,
            deployment=deployment,
            run_dir=str(self._run_dir),
        )
        self._sender = DiskSender(self._run_dir / EVAL_WEIGHTS_DIR, trained_names(policy))
        self._restarts = RestartBudget(config.rollout.max_restarts, config.cluster.restart_window_s)
        self._thread = ThreadPoolExecutor(1, "evaluation")
        self._future: Future[EvaluationAnswer] | None = None
        self._closing = self._has_begun = self._is_lost = False

    def continue_from(
        self, version: int, weights: Callable[[], Iterable[Named]], unfinished: PendingEvaluation | None = None
    ) -> None:
        """Continue a run with weights of ``version`` updates, and its evaluation in progress."""
        self._has_begun = True
        if unfinished is None or unfinished.version == version:
            self._sender.drop_newer(version - 1)
            if unfinished is not None:
                self.begin(unfinished, weights())
            return
        self._sender.drop_newer(unfinished.version)
        if self._sender.version == unfinished.version:
            self._begin(unfinished)
        else:
            path = self._sender.directory
            self._skip(unfinished, f"its weights are not in {path} any more")

    def _skip(self, wanted: PendingEvaluation, reason: object) -> None:
        logger.error("the policy after iteration %d is not evaluated: %s", wanted.iteration, reason)

    def begin(self, wanted: PendingEvaluation, weights: Iterable[Named]) -> None:
        """Begin an evaluation; none is in progress. A full disk costs the evaluation, not the run."""
        try:
            if self._sender.version is None or wanted.version > self._sender.version:
                self._sender.send(weights, wanted.version)
        except WeightSyncError as error:
            self._skip(wanted, error)
            return
        self._begin(wanted)

    def _begin(self, wanted: PendingEvaluation) -> None:
        self.in_progress = wanted
        self._future = self._thread.submit(self._measure, wanted)

    def take(
        self, wanted_now: bool, should_stop: Callable[[], bool]
    ) -> tuple[PendingEvaluation, EvaluationAnswer] | None:
        """Return the finished evaluation, once; None if there is none. ``wanted_now`` waits for it.

        Raises:
            InterruptedError: ``should_stop`` returned True; the evaluation continues.
            WorkerDied: the process died more often than ``rollout.max_restarts``.
            WorkerError: the evaluation failed.
        """
        if self.in_progress is None or self._future is None:
            return None
        while wanted_now and not self._future.done():
            if should_stop():
                raise InterruptedError
            wait([self._future], LOOK_S)
        if not self._future.done():
            return None
        answer = self._future.result()
        done = self.in_progress
        self.in_progress = None
        return done, answer

    def _measure(self, wanted: PendingEvaluation) -> EvaluationAnswer:
        """Evaluate, in the thread that waits for the process."""
        lost: WorkerDied | None = None
        while True:
            if lost is not None:
                self._count_restart(lost)
            try:
                self._bring_up()
                return self._group.call_on(0, "evaluate", *asdict(wanted).values()).result()
            except WorkerDied as error:
                if self._closing:
                    raise
                lost = error

    def _count_restart(self, lost: WorkerDied) -> None:
        if not self._restarts.take():
            raise WorkerDied(
                f"stopped after {self._restarts} of the evaluation process: {lost.message}",
                lost.hint,
                log_tail=lost.log_tail,
                code="evaluation-process-lost",
            ) from lost
        logger.warning("restart %s of the evaluation process: %s", self._restarts.used, lost.message)
        self._is_lost = True

    def _bring_up(self) -> None:
        if not self._group.world_size:
            self._group.launch(self._places, self._launcher, {}, self._log_dir, _START_TIMEOUT_S)
        elif self._is_lost:
            self._group.restart(0, _START_TIMEOUT_S, lambda: self._closing)
        self._is_lost = False

    def close(self) -> None:
        """Stop the process; remove weights that no evaluation needs any more."""
        self._closing = True
        if self._future is not None and not self._future.done():
            self._group.kill()
        self._thread.shutdown()  # a process that was just starting is running now
        self._group.close()
        self._launcher.close()
        if self._has_begun and self.in_progress is None:
            shutil.rmtree(self._sender.directory, ignore_errors=True)


def unfinished_evaluation(checkpoint: Checkpoint) -> PendingEvaluation | None:
    """Return the evaluation that was in progress when a checkpoint was made."""
    if checkpoint.state.content.get("evaluation") is None:
        return None
    saved = checkpoint.state.fields("evaluation")
    best = None if saved.content.get("best") is None else saved.number("best")
    every = saved.flag("every_decoding", True)  # earlier checkpoints lack it
    where = saved.text("video_dir", None)
    return PendingEvaluation(saved.integer("iteration"), saved.integer("version"), where, best, every)


def finished_since(run_dir: Path, checkpoint: Checkpoint, file_name: str = METRICS_FILE) -> Row | None:
    """Return the row of the checkpoint's evaluation in progress, if it finished before the process ended.

    The row lies beyond the checkpoint's end of the metrics file, to which the file is cut back.
    """
    in_progress = unfinished_evaluation(checkpoint)
    path = run_dir / file_name
    if in_progress is None or not path.is_file():
        return None
    rows = [parse_row(line) for line in read_regular_file(path, MAX_BYTES).splitlines(keepends=True)]
    found = [row for row in rows if row is not None and is_late(row) and row["iteration"] == in_progress.iteration]
    return found[-1] if found else None


def late_row(done: PendingEvaluation, answer: EvaluationAnswer, iteration: int) -> Row:
    """Return an evaluation's additions to the row of its iteration, when ``iteration`` is the last one."""
    metrics: Row = dict(answer["metrics"])
    seconds = metrics.pop("time/eval_s")  # alongside the iteration's own figures, not among them
    behind = iteration - done.iteration
    return {
        "iteration": done.iteration,
        **metrics,
        "time/eval_beside_s": seconds,
        "time/eval_behind_iterations": behind,
    }


def is_late(row: Row) -> bool:
    """Return whether a row of metrics.jsonl comes from ``late_row``."""
    return "time/eval_beside_s" in row
