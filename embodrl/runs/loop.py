"""The training loop: roll out, estimate advantages, update, and now and then evaluate and save."""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.rng import capture_rng, generator_state, restore_generator, restore_rng
from embodrl.deployment import Deployment
from embodrl.errors import CheckpointError, EmbodrlError, OutputError, PipelineError
from embodrl.fields import Fields
from embodrl.hybrid_engines.base import EngineState, counters_of
from embodrl.hybrid_engines.weight_sync.disk import WeightPublisher
from embodrl.pipelines.checks import CHANGES
from embodrl.pipelines.context import Context
from embodrl.pipelines.graph import Graph, Node
from embodrl.pipelines.outcomes import Metrics
from embodrl.processes.trace import record
from embodrl.reporting.console import Console
from embodrl.reporting.health import HealthMonitor
from embodrl.reporting.metrics_file import Row, read_metrics
from embodrl.reporting.rows import is_number
from embodrl.reporting.sinks import MetricsLogger
from embodrl.reporting.verdict import is_solved, regression
from embodrl.runs.beside import EvalBeside, UnderWay, late_row, unfinished_evaluation
from embodrl.runs.build import Parts
from embodrl.runs.files import (
    BEST_POLICY_DIR,
    METRICS_BLOB,
    PUBLISHED_DIR,
    export_policy,
    hint_from,
    unsaved_run_message,
)
from embodrl.runs.lock import RunLock
from embodrl.runs.recovery import lost_trainers
from embodrl.runs.settings import (
    STATE_KEY,
)
from embodrl.runs.stop import StopSignal, named_exit
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager
from embodrl.workers.actor import saves_shards
from embodrl.workers.collector import RolloutState
from embodrl.workers.memory_phases import TRAIN_ROLES, MemoryPhases

logger = logging.getLogger(__name__)

REPLAY = "replay"
# What others read from every row: null before the first rollout, and where nothing was trained.
ROW_0: Row = {"iteration": 0, "env_steps": 0} | dict.fromkeys(
    ("rollout/success_rate", "time/env_s", "time/policy_s", "time/train_s", "train/policy_loss")
)


class Runner:
    """Owns the parts of a run and walks through its iterations.

    Args:
        config: the run.
        graph: what an iteration walks.
        deployment: where everything of it is.
        run_dir: where everything goes.
        parts: of the run, started.
        metrics: where they go.
        console: what the user sees.
        stop: tells that the user wants to leave.
        lock: of ``run_dir``.
        beside: evaluates while it trains; None evaluates between two iterations.
    """

    def __init__(
        self,
        config: Config,
        graph: Graph,
        deployment: Deployment,
        run_dir: Path,
        parts: Parts,
        metrics: MetricsLogger,
        console: Console,
        stop: StopSignal,
        lock: RunLock,
        beside: EvalBeside | None = None,
    ) -> None:
        self.config, self.deployment, self.run_dir = config, deployment, run_dir
        self.policy, self.engine, self.stores = parts.policy, parts.engine, parts.stores
        self.rollouts, self.rewards, self.collector = parts.rollouts, parts.rewards, parts.rollouts.collector
        self.metrics, self.console, self.stop, self.lock = metrics, console, stop, lock
        self.graph, runner, self.beside = graph, config.runner, beside
        self.needs_reference = config.algorithm.kl.coef > 0
        self.phases = MemoryPhases(config, parts.rollouts, parts.engine)
        self.checkpoints = CheckpointManager(run_dir, runner.keep_last_n)
        self.publisher: WeightPublisher | None = None
        self.shuffle = torch.Generator().manual_seed(runner.seed)
        self.iteration = 0
        self.env_steps = 0
        # The metrics of an iteration that lacks its evaluation, and is not logged yet.
        self.pending: Row | None = dict(ROW_0) if runner.eval_at_start else None
        self.saved = False
        self._last_saved: Path | None = None
        self._settings = ""
        self._unfinished: UnderWay | None = None
        self._regressed: EmbodrlError | None = None
        self._before: _Before | None = None  # within an iteration, until its update begins
        self._updating = False
        self.rows = read_metrics(metrics.path)
        self.health = HealthMonitor(list(self.rows), self.config.model.warm_start is not None)
        rates = (row.get("eval/success_rate") for row in self.rows if row["iteration"])
        self.best = max((rate for rate in rates if is_number(rate)), default=-1.0)

    @property
    def finished(self) -> bool:
        """All iterations are done, logged and evaluated, or as many as it took to solve the task."""
        done = self._is_solved or self.iteration >= self.config.runner.max_iterations
        return done and self.pending is None and self._evaluating is None

    @property
    def _is_solved(self) -> bool:
        runner = self.config.runner
        return is_solved(self.rows, runner.stop_at_success, runner.stop_evaluations)

    @property
    def _evaluating(self) -> UnderWay | None:
        return None if self.beside is None else self.beside.under_way

    def run(self, settings: str) -> int:
        """Train until the last iteration or a signal; return the exit code, 1 if what was done could not be saved.

        Args:
            settings: of the run, for checkpoints.
        """
        self._settings = settings
        self.stop.can_save(hint_from(self.run_dir, self._last_saved))
        if self.config.rollout.publish_weights:
            self.publisher = WeightPublisher(self.run_dir / PUBLISHED_DIR, self.policy, self.engine.version)
        self._publish()
        if regressed := regression(self._judged_rows, self.config.runner.max_regression):  # as before it was resumed
            raise regressed
        if self.beside is not None:
            self.beside.continue_from(self.engine.version, self.engine.weights, self._unfinished)
        with self._saved_on_error():
            try:
                self._catch_up()
                while not (self.finished or self.stop):
                    self.lock.check()
                    start = time.perf_counter()
                    self.phases.enter("act")
                    self._before = _Before(capture_rng(), generator_state(self.shuffle), self.rewards.state())
                    metrics = self.graph.run(self._context(), on_node=self._before_node)
                    self._count(metrics, start)
                    record(f"iteration {self.iteration}", start, time.perf_counter())
                    self._complete()
            except (InterruptedError, SystemExit, KeyboardInterrupt) as error:
                # Nothing was learned from the rollout, or from a reward that hangs; an evaluation is still pending.
                if not isinstance(error, InterruptedError) and (self._updating or not self.stop.late):
                    raise
                self._undo()
        if not self.saved:
            with self.stop.saving():
                self._save()
        self.engine.onload()
        if self.finished:  # its policy is exported
            self.engine.fetch()
        return (0 if self.finished else self.stop.exit_code) if self.saved else 1

    def _catch_up(self) -> None:
        """Complete the iteration that a run begins with: its evaluation before the first update, or what was left."""
        if self.pending is not None:
            self._complete()
        elif self.iteration == self.config.runner.max_iterations:
            self._take_late(wait=True)
        if self._regressed:
            raise self._regressed

    @contextlib.contextmanager
    def _saved_on_error(self) -> Iterator[None]:
        """Save the last complete iteration if the block raises; name an exit of custom code."""
        try:
            yield
        except BaseException as error:  # a user's function may raise anything; raised again
            if self.stop:  # there was no time, or what holds the state hangs
                if self.iteration and not self.saved:
                    logger.error("%s", unsaved_run_message(self.run_dir, self.iteration))
            elif not lost_trainers(self.engine):
                self._save_complete_state()
            if isinstance(error, SystemExit) and not self.stop:
                raise named_exit(error) from error
            raise

    def _undo(self) -> None:
        """Be as before the iteration under way, whose update has not begun."""
        if self._before is not None:
            restore_rng(self._before.rng)
            restore_generator(self.shuffle, self._before.shuffle)
            if self._before.rewards:
                self.rewards.load_state(self._before.rewards)
            self.collector.undo()
            self._before = None

    def _save_complete_state(self) -> None:
        """Save after an error what the last complete iteration has left, if it is still there; raises nothing."""
        if self.saved or not self.iteration:
            return
        if self._updating:
            logger.error("iteration %d failed within its update, and can't be undone: not saved", self.iteration + 1)
            return
        try:
            self._undo()
            self._save()
        except Exception as error:  # noqa: BLE001  (the first error is reported; what it broke may not be known)
            why = str(error) or type(error).__name__
            logger.error("the state after iteration %d could not be saved: %s", self.iteration, why)

    def _context(self) -> Context:
        engine, rewards = self.engine, self.rewards
        return Context(self.config, self.iteration, engine, self.collector, rewards, self.shuffle, self.stores)

    def _count(self, metrics: Metrics, start: float) -> None:
        """Count an iteration that began at ``start`` (``time.perf_counter``); its metrics are pending.

        Raises:
            PipelineError: no node has reported how many steps were simulated.
        """
        steps = metrics.pop("env_steps", None)
        if steps is None:
            raise PipelineError(
                f"no node of the pipeline '{self.graph.name}' reports how many steps were simulated",
                "return (batch, {'env_steps': STEPS}) from the node that gathers experience",
            )
        env_steps = int(steps)
        self.iteration += 1
        self.env_steps += env_steps
        self._publish()
        self.phases.enter("rest")
        metrics |= self.phases.take_metrics()
        self.saved = False
        faults = self.rollouts.faults
        seconds = time.perf_counter() - start
        self.pending = ROW_0 | {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            **metrics,
            "env/restarts": faults.restarts,
            "env/quarantined": faults.quarantined,
            "rollout/restarts": faults.rollout_restarts,
            "time/total_s": seconds,
            "time/env_steps_per_s": env_steps / seconds,
        }
        self._before, self._updating = None, False

    def _before_node(self, node: Node) -> None:
        """Enter the memory phase of a node; before an update, a stop undoes the iteration, as within its rollout."""
        if self.stop and not self._updating:
            raise InterruptedError
        if node.role in TRAIN_ROLES:
            self.phases.enter("train")
        self._updating = self._updating or node.role in CHANGES
        self._show_phase(node.name, node.role)

    def _show_phase(self, name: str, role: str) -> None:
        """Tell the console how many chunks a phase has, where this process is the one that steps through them."""
        config, chunks = self.config, 0
        local = not self.deployment.rolls_out_in_processes and config.rollout.workflow is None
        if role == "rollout" and local and config.runner.max_staleness == 0:
            steps = config.rollout_chunks
            chunks = config.algorithm.rollout_epoch * steps
        elif role == "evaluation" and local:
            waves = -(-config.env.eval.num_episodes // config.env.train.total_num_envs) * self.rollouts.num_decodings
            chunks = waves * -(-config.evaluated.env.max_episode_steps // config.model.num_action_chunks)
        self.console.phase(name, chunks)

    def _publish(self) -> None:
        if self.publisher is not None:
            self.publisher.publish(self.engine.weights(), self.engine.version)

    def _complete(self) -> None:
        """Evaluate and save, where it is time for it, and log what is pending.

        Raises:
            InterruptedError: a signal came during the evaluation; the metrics are still pending.
        """
        runner = self.config.runner
        assert self.pending is not None
        row, clock = dict(self.pending), time.perf_counter()
        last = self.iteration == runner.max_iterations
        due = runner.eval_at_start if self.iteration == 0 else last or self._divides(runner.eval_interval)
        self._take_late(wait=due)
        if due and self.beside is None:
            row |= self._evaluate(last)
        row["time/total_s"] = row.get("time/total_s", 0.0) + time.perf_counter() - clock
        warnings = self.health.check(row)
        self.rows.append(written := self.metrics.log(row | {f"health/{each.code}": 1.0 for each in warnings}))
        self.pending, self.saved = None, False
        self.console.update(written)
        for warning in warnings:
            logger.warning("%s", warning)
        if due and self.beside is None:
            self._regressed = regression(self.rows, runner.max_regression)
            if runner.keep_best and self.iteration:
                self._keep_best(written.get("eval/success_rate"))
        elif due:
            self._evaluate_beside(last)
        if self.finished or self._regressed or (self.iteration and self._divides(runner.save_interval)):
            self.console.phase("saving")
            self.collector.reset_history()
            with self.stop.saving():
                self._save()
            self._rest()
        if self._regressed:
            raise self._regressed
        if self.finished and not last:
            text = f"solved: evaluations reach a success rate of {runner.stop_at_success:g}"
            self.console.message(f"{text}; stopping after iteration {self.iteration}")

    def _rest(self) -> None:
        """Offload what saving brought back; its figures belong to no iteration."""
        self.phases.enter("rest")
        self.phases.take_metrics()

    def _divides(self, interval: int) -> bool:
        return bool(interval) and self.iteration % interval == 0

    def _evaluate(self, last: bool) -> Row:
        self._show_phase("evaluation", "evaluation")
        self.phases.enter("act")
        return self.rollouts.evaluate(self._video_dir(last)).metrics()

    def _video_dir(self, last: bool) -> Path | None:
        video = self.config.env.video
        wanted = video.enabled and (last or video.every_eval)
        return self.run_dir / "videos" / f"iteration_{self.iteration:04d}" if wanted else None

    # -- evaluation beside training -----------------------------------------------------------------------------------

    def _evaluate_beside(self, last: bool) -> None:
        """Begin an evaluation, unless the one before has ended the run; wait for that of the last iteration."""
        assert self.beside is not None
        if self._is_solved or self._regressed:
            return
        if self.config.evaluated is self.config:  # as an evaluation in turn leaves them
            self.collector.reset_history()
            self._rest()
        video_dir = self._video_dir(last)
        where = None if video_dir is None else str(video_dir.resolve())
        best = self.best if self.config.runner.keep_best and self.iteration else None
        wanted = UnderWay(self.iteration, self.engine.version, where, best)
        self.beside.begin(wanted, self.engine.weights())
        self._take_late(wait=last)

    def _take_late(self, wait: bool) -> None:
        """Log the evaluation that is done, and draw its conclusions.

        Raises:
            InterruptedError: the run is to stop, and the evaluation is still under way.
        """
        if self.beside is None:
            return
        if wait and self._evaluating is not None:
            self.console.phase(f"evaluation after iteration {self._evaluating.iteration}")
        taken = self.beside.take(wait, self._is_to_stop)
        if taken is None:
            return
        done, answer = taken
        self._log_late(late_row(done, answer, self.iteration))
        if answer["is_best"]:
            self.best = answer["metrics"]["eval/success_rate"]
            self.checkpoints.keep_best(done.iteration)
        if answer["problem"]:
            logger.error("%s", answer["problem"])

    @property
    def _judged_rows(self) -> list[Row]:
        """All rows; with evaluations beside training up to the last of these, of which later ones know nothing yet."""
        evaluated = [i for i, row in enumerate(self.rows, start=1) if "eval/success_rate" in row]
        return self.rows if self.beside is None else self.rows[: max(evaluated, default=0)]

    def _is_to_stop(self) -> bool:
        self.engine.check()
        return bool(self.stop)

    def _log_late(self, row: Row) -> None:
        warnings = self.health.check(row)
        written = self.metrics.log_late(row | {f"health/{each.code}": 1.0 for each in warnings})
        index = next(i for i, known in enumerate(self.rows) if known["iteration"] == row["iteration"])
        self.rows[index] |= written
        self.console.late(written)
        self.saved = False
        for warning in warnings:
            logger.warning("%s", warning)
        self._regressed = self._regressed or regression(self.rows[: index + 1], self.config.runner.max_regression)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _keep_best(self, success_rate: float | str | None) -> None:
        """Export the policy if no evaluation was better; a full disk costs a warning, not the run."""
        if not isinstance(success_rate, float) or success_rate <= self.best:
            return
        self.best = success_rate
        self.checkpoints.keep_best(self.iteration)
        self.engine.onload()
        self.engine.fetch()
        try:
            facts = {"iteration": self.iteration, "success_rate": success_rate}
            export_policy(self.policy, self.run_dir / BEST_POLICY_DIR, self.config, **facts)
            logger.info("best evaluation so far: exported to %s", self.run_dir / BEST_POLICY_DIR)
        except OutputError as error:
            logger.error("%s", error)
        self._rest()

    def _save(self) -> None:
        """Write a checkpoint; a disk that is full costs a warning, not the run.

        Raises:
            OutputError: the run directory is not this run's any more.
        """
        self.lock.check()
        sharded = saves_shards(self.config, self.deployment)
        saved = EngineState({}, self.engine.counters()) if sharded else self.engine.state_dict()
        rollouts = self.collector.state()
        state = {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            STATE_KEY: self._settings,
            "pending": self.pending,
            "evaluation": None if self._evaluating is None else asdict(self._evaluating),
            "engine": saved.state,
            "sharded": sharded,
            "rng": capture_rng(),
            "shuffle": generator_state(self.shuffle),
            "rollout": {"state": rollouts.state, "tensors": sorted(rollouts.tensors), "blobs": sorted(rollouts.blobs)},
            "faults": vars(self.rollouts.faults),
            "rewards": bool(self.rewards.state()),
        }
        try:
            kept = {"rewards": self.rewards.state(), REPLAY: self.stores.state() if self.stores else {}}
            tensors = saved.tensors | rollouts.tensors | {name: part for name, part in kept.items() if part}
            write_shards = self.engine.save_shards if sharded else None
            blobs = rollouts.blobs | {METRICS_BLOB: zlib.compress(self.metrics.content, 1)}
            path = self.checkpoints.save(self.iteration, tensors, state, blobs, write_shards)
        except OutputError as error:
            logger.error("%s", error)
            return
        self.saved, self._last_saved = True, path
        self.stop.can_save(hint_from(self.run_dir, path))
        self.console.message(f"saved {path}")

    def restore(self, checkpoint: Checkpoint, late: Row | None = None) -> None:
        """Continue from a checkpoint.

        Args:
            checkpoint: of this run.
            late: row of the evaluation that was under way then, if it has been done since.

        Raises:
            CheckpointError: it was made with other settings.
        """
        state = checkpoint.state
        counters = counters_of(state.fields("engine"))
        if state.flag("sharded", False):
            self.engine.load_shards(checkpoint.path, counters)
        else:
            names = (*self.engine.sections, *(("reference",) if self.needs_reference else ()))
            self.engine.load_state_dict(EngineState({n: checkpoint.tensors(n) for n in names}, counters))
        self.collector.update_weights(self.engine.weights(), self.engine.version)
        rollouts = state.fields("rollout")
        try:
            self.collector.load_state(
                RolloutState(
                    dict(rollouts.fields("state").content),
                    {name: checkpoint.tensors(name) for name in rollouts.texts("tensors")},
                    {name: checkpoint.blob(name) for name in rollouts.texts("blobs")},
                ),
                self.engine.version,
            )
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {error.message}", error.hint, code=error.code) from error
        if state.flag("rewards", False):
            self.rewards.load_state(checkpoint.tensors("rewards"))
        if self.stores is not None:
            self.stores.load_state(checkpoint.tensors(REPLAY))
        restore_rng(dict(state.fields("rng").content))
        restore_generator(self.shuffle, state.text("shuffle"))
        faults = state.fields("faults")
        vars(self.rollouts.faults).update({name: faults.integer(name) for name in faults})
        self.iteration, self.env_steps = state.integer("iteration"), state.integer("env_steps")
        self.pending, self.saved, self._last_saved = pending_row(state), True, checkpoint.path
        self._unfinished = unfinished_evaluation(checkpoint)
        if late is not None:
            self._unfinished = None
            self._log_late(late)
            rate = late.get("eval/success_rate")
            if late["iteration"] and is_number(rate) and rate > self.best:  # policy_best/ was exported with the row
                self.best = float(rate)
                self.checkpoints.keep_best(late["iteration"])
        elif self._unfinished is not None and self.beside is None:
            text = "the policy after iteration %d is not evaluated: runner.eval_async is false now"
            logger.warning(text, self._unfinished.iteration)


@dataclass(frozen=True)
class _Before:
    """What an iteration changes before its update, beside the rollouts."""

    rng: dict[str, Any]
    shuffle: str
    rewards: dict[str, Tensor]


def pending_row(state: Fields) -> Row | None:
    """Return the row of a checkpoint's iteration that is not in metrics.jsonl yet; None if it is."""
    return None if state.content.get("pending") is None else dict(state.fields("pending").content)
