"""The training loop: roll out, estimate advantages, update, and now and then evaluate and save."""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.data.rng import capture_rng, generator_state, restore_generator, restore_rng
from embodrl.deployment import Deployment
from embodrl.errors import CheckpointError, ConfigError, ConfigProblem, EmbodrlError, OutputError, PipelineError
from embodrl.fields import Fields
from embodrl.hybrid_engines.base import EngineState, counters_of
from embodrl.hybrid_engines.weight_sync.disk import WeightPublisher
from embodrl.pipelines.checks import CHANGES
from embodrl.pipelines.context import Context
from embodrl.pipelines.graph import Graph, Node
from embodrl.pipelines.outcomes import Metrics
from embodrl.processes.cores import bound_to
from embodrl.processes.trace import record
from embodrl.reporting.console import Console
from embodrl.reporting.health import HealthMonitor
from embodrl.reporting.log import RunLog
from embodrl.reporting.metrics_file import METRICS_FILE, Row, read_metrics
from embodrl.reporting.sinks import MetricsLogger
from embodrl.reporting.verdict import is_solved, regression
from embodrl.runs.build import Parts, build, check_machine
from embodrl.runs.files import (
    BEST_POLICY_DIR,
    LEAST_FREE_BYTES,
    LOG_FILE,
    METRICS_BLOB,
    PUBLISHED_DIR,
    check_disk_space,
    drop_missing_warm_start,
    export_policy,
    has_results,
    hint_from,
    resume_hint,
    run_directory,
    saved_metrics,
    sent_num_bytes,
    unsaved_run_message,
)
from embodrl.runs.load import graph_of
from embodrl.runs.lock import RunLock, run_lock
from embodrl.runs.provenance import add_provenance, changes_so_far
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
from embodrl.runs.stop import StopSignal, named_exit
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager, preflight
from embodrl.workers.actor import saves_shards
from embodrl.workers.collector import RolloutState
from embodrl.workers.memory_phases import TRAIN_ROLES, MemoryPhases
from embodrl.workers.policy import configure_torch, num_generators, num_threads

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
    ) -> None:
        self.config, self.deployment, self.run_dir = config, deployment, run_dir
        self.policy, self.engine, self.stores = parts.policy, parts.engine, parts.stores
        self.rollouts, self.rewards, self.collector = parts.rollouts, parts.rewards, parts.rollouts.collector
        self.metrics, self.console, self.stop, self.lock = metrics, console, stop, lock
        self.graph, runner = graph, config.runner
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
        self._before: _Before | None = None  # within an iteration, until its update begins
        self._updating = False
        self.rows = read_metrics(metrics.path)
        self.health = HealthMonitor(list(self.rows), self.config.model.warm_start is not None)
        self.best = max((row.get("eval/success_rate") or 0.0 for row in self.rows if row["iteration"]), default=-1.0)

    @property
    def finished(self) -> bool:
        """All iterations are done and logged, or as many as it took to solve the task (``stop_at_success``)."""
        runner = self.config.runner
        solved = is_solved(self.rows, runner.stop_at_success, runner.stop_evaluations)
        return (solved or self.iteration >= runner.max_iterations) and self.pending is None

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
        with self._saved_on_error():
            try:
                if self.pending is not None:
                    self._complete()
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
        if not self.saved:
            return 1
        return 0 if self.finished else self.stop.exit_code

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
            waves = -(-config.env.eval.num_episodes // config.env.train.total_num_envs)
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
        if due:
            row |= self._evaluate(last)
        row["time/total_s"] = row.get("time/total_s", 0.0) + time.perf_counter() - clock
        warnings = self.health.check(row)
        self.rows.append(written := self.metrics.log(row | {f"health/{each.code}": 1.0 for each in warnings}))
        self.pending, self.saved = None, False
        self.console.update(written)
        for warning in warnings:
            logger.warning("%s", warning)
        if runner.keep_best and self.iteration:
            self._keep_best(written.get("eval/success_rate"))
        regressed = regression(self.rows, runner.max_regression) if due else None
        if self.finished or regressed or (self.iteration and self._divides(runner.save_interval)):
            self.console.phase("saving")
            self.collector.reset_history()
            with self.stop.saving():
                self._save()
            self._rest()
        if regressed:
            raise regressed
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
        video = self.config.env.video
        wanted = video.enabled and (last or video.every_eval)
        video_dir = self.run_dir / "videos" / f"iteration_{self.iteration:04d}" if wanted else None
        return self.rollouts.evaluate(video_dir).metrics()

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

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint.

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
        self.pending, self.saved, self._last_saved = _pending(state), True, checkpoint.path


@dataclass(frozen=True)
class _Before:
    """What an iteration changes before its update, beside the rollouts."""

    rng: dict[str, Any]
    shuffle: str
    rewards: dict[str, Tensor]


def _pending(state: Fields) -> Row | None:
    return None if state.content.get("pending") is None else dict(state.fields("pending").content)


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
    done, pending = checkpoint.state.integer("iteration"), _pending(checkpoint.state)
    if done > config.runner.max_iterations:
        message = f"is {config.runner.max_iterations}, and the run has done {done}"
        raise ConfigError(
            [ConfigProblem("runner.max_iterations", message, hint="raise it", code="iterations-already-done")]
        )
    if done == config.runner.max_iterations and pending is None and has_results(directory):
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
    return checkpoint.state.integer("iteration") - (_pending(checkpoint.state) is not None)


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

        def stopped() -> bool:
            console.advance()
            return bool(stop)

        try:
            with ExitStack() as closing:  # in reverse order, and all of them, whatever fails
                console.phase("starting simulators")
                weights_from = config if checkpoint is None else drop_missing_warm_start(config)
                parts = build(config, weights_from, deployment, run_dir, device, stopped, closing)
                stop.arm()
                saved = None if checkpoint is None else saved_metrics(checkpoint)
                metrics = MetricsLogger(run_dir, config.runner.logger, logged_until, config.model_dump(), saved=saved)
                closing.callback(metrics.close)
                console.restore(read_metrics(metrics.path))
                graph = graph_of(loaded)
                runner = Runner(config, graph, deployment, run_dir, parts, metrics, console, stop, lock)
                num_bytes, best = parts.engine.state_num_bytes(), config.runner.keep_best
                sent = sent_num_bytes(config, deployment, parts.policy)
                check_disk_space(run_dir, config, parts.policy, num_bytes, keep_best=best, sent=sent)
                if checkpoint is not None:
                    console.message(f"resuming from {checkpoint.path}")
                    runner.restore(checkpoint)
                # Only now: settings with which it could not be resumed are not kept.
                config_yaml = loaded.to_yaml()
                for line in add_provenance(run_dir, config_yaml, old_settings, runner.iteration):
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
