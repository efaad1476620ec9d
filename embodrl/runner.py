"""The training loop: roll out, estimate advantages, update, and now and then evaluate and save."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from embodrl.algorithms.advantages import compute_advantages
from embodrl.checkpoint import Checkpoint, CheckpointManager, preflight
from embodrl.config import LoadedConfig, load_run
from embodrl.config.schema import Config
from embodrl.data.rng import capture_rng, generator_state, restore_generator, restore_rng
from embodrl.envs.pool import EnvPool
from embodrl.errors import CheckpointError, ConfigError, ConfigProblem, OutputError
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.native import NativeTrainEngine
from embodrl.hybrid_engines.rollout import NativeRolloutEngine
from embodrl.metrics.console import Console
from embodrl.metrics.report import write_report
from embodrl.metrics.sinks import MetricsLogger, read_metrics
from embodrl.models.base import VLAPolicy
from embodrl.workers.env import make_pool
from embodrl.workers.evaluate import Evaluator
from embodrl.workers.policy import build_policy, configure_torch
from embodrl.workers.rollout import RolloutWorker

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
Row = dict[str, Any]


class StopSignal:
    """Remembers SIGINT and SIGTERM, so that the loop can save and leave; the second one leaves at once."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def __bool__(self) -> bool:
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; 0 without a signal."""
        return 128 + self.number if self.number else 0


class Runner:
    """Owns the parts of a run and walks through its iterations.

    Args:
        config: the run.
        run_dir: where everything goes.
        pool: started.
        policy: on its device.
        logger: of metrics.
        console: what the user sees.
        stop: tells that the user wants to leave.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        pool: EnvPool,
        policy: VLAPolicy,
        metrics: MetricsLogger,
        console: Console,
        stop: StopSignal,
    ) -> None:
        self.config, self.run_dir, self.pool = config, run_dir, pool
        self.metrics, self.console, self.stop = metrics, console, stop
        runner = config.runner
        self.engine = NativeTrainEngine(policy, config.actor, runner.max_iterations, policy.device)
        self.rollout_engine = NativeRolloutEngine(policy, config.rollout, config.algorithm.sampling, runner.seed)
        self.rollout = RolloutWorker(config, pool, self.rollout_engine, lambda: bool(stop))
        self.evaluator = Evaluator(config, pool, self.rollout_engine)
        self.checkpoints = CheckpointManager(run_dir, runner.keep_last_n)
        self.shuffle = torch.Generator().manual_seed(runner.seed)
        self.iteration = 0
        self.env_steps = 0
        self.saved_at = -1

    def run(self) -> int:
        """Train until the last iteration or a signal; return the exit code."""
        runner = self.config.runner
        if self.iteration == 0 and runner.eval_at_start:
            self._log({"iteration": 0, "env_steps": 0} | self._evaluate(last=False), time.perf_counter())
        while self.iteration < runner.max_iterations and not self.stop:
            clock = time.perf_counter()
            try:
                row = self._iterate()
            except InterruptedError:
                break
            last = self.iteration == runner.max_iterations
            if last or (runner.eval_interval and self.iteration % runner.eval_interval == 0):
                row |= self._evaluate(last)
            self._log(row, clock)
            if last or self.iteration % runner.save_interval == 0:
                self.console.phase("saving")
                # What follows must not depend on simulator history that a checkpoint would have to carry.
                self.pool.call("rebuild")
                self._save()
        if self.saved_at != self.iteration:
            self._save()
        return self.stop.exit_code

    def _iterate(self) -> Row:
        """Roll out and update once; return the metrics.

        Raises:
            InterruptedError: a signal came during the rollout; the run is as it was before.
        """
        self.console.phase("rollout")
        self.pool.call("mark")
        before = generator_state(self.rollout_engine.generator)
        try:
            batch, rollout_metrics = self.rollout.gather(self.iteration)
        except InterruptedError:
            restore_generator(self.rollout_engine.generator, before)
            self.pool.call("rewind")
            raise
        self.console.phase("update")
        clock = time.perf_counter()
        advantages = compute_advantages(batch, self.config.algorithm)
        train_metrics = self.engine.update(batch, advantages, self.config.algorithm, self.shuffle)
        self.iteration += 1
        self.env_steps += int(batch.valid.sum())
        faults = self.pool.faults
        return {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            **rollout_metrics,
            **train_metrics,
            "env/restarts": faults.restarts,
            "env/quarantined": faults.quarantined,
            "time/train_s": time.perf_counter() - clock,
        }

    def _evaluate(self, last: bool) -> Row:
        self.console.phase("evaluation")
        video = self.config.env.video
        wanted = video.enabled and (last or video.every_eval)
        video_dir = self.run_dir / "videos" / f"iteration_{self.iteration:04d}" if wanted else None
        return self.evaluator.run(video_dir).metrics()

    def _log(self, row: Row, clock: float) -> None:
        row["time/total_s"] = time.perf_counter() - clock
        gathered = row["time/total_s"] - row.get("time/eval_s", 0.0)
        if row.get("time/env_s") is not None:
            row["time/env_steps_per_s"] = float(self.config.env.train.total_num_envs) and (
                (row["env_steps"] - self._steps_logged) / gathered
            )
        self._steps_logged = row["env_steps"]
        self.console.update(self.metrics.log(row))

    _steps_logged = 0

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write a checkpoint; a disk that is full costs a warning, not the run."""
        saved = self.engine.state_dict()
        state = {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "engine": saved.state,
            "rng": capture_rng(),
            "shuffle": generator_state(self.shuffle),
            "rollout": generator_state(self.rollout_engine.generator),
            "faults": vars(self.pool.faults),
        }
        blobs = {f"env_{rank}": blob for rank, blob in enumerate(self.pool.get_state())}
        try:
            path = self.checkpoints.save(self.iteration, saved.tensors, state, blobs)
        except OutputError as error:
            logger.error("%s", error)
            self.console.message(f"WARNING: {error}")
            return
        self.saved_at = self.iteration
        self.console.message(f"saved {path}")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was made.

        Raises:
            CheckpointError: it was made with other settings.
        """
        state = checkpoint.state
        names = ("policy", "optimizer")
        self.engine.load_state_dict(EngineState({n: checkpoint.tensors(n) for n in names}, state["engine"]))
        try:
            self.pool.set_state([checkpoint.blob(f"env_{rank}") for rank in range(len(self.pool.managers))])
        except KeyError as error:
            raise CheckpointError(
                f"{checkpoint.path} was made with another number of simulator processes",
                "resume with the same env.num_processes",
            ) from error
        restore_rng(state["rng"])
        restore_generator(self.shuffle, state["shuffle"])
        restore_generator(self.rollout_engine.generator, state["rollout"])
        vars(self.pool.faults).update(state["faults"])
        self.iteration = self.saved_at = state["iteration"]
        self.env_steps = self._steps_logged = state["env_steps"]


def run_directory(config: Config) -> Path:
    """Return the directory of a new run."""
    runner = config.runner
    if runner.output_dir != "auto":
        return Path(runner.output_dir)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = runner.name
    if name == "auto":
        name = f"{config.env.env_type}-{config.model.model_type}-{config.algorithm.adv_type}-{stamp}"
    return Path("outputs") / name


def train(loaded: LoadedConfig) -> int:
    """`embodrl train`: a new run; returns the exit code.

    Raises:
        EmbodrlError: something the run needs is missing; told before anything has started.
    """
    config = loaded.config
    run_dir = run_directory(config)
    path = run_dir / "metrics.jsonl"
    if path.is_file() and path.stat().st_size:
        raise OutputError(
            f"{run_dir} holds an earlier run",
            f"`embodrl resume {run_dir}` continues it; or choose another runner.output_dir",
        )
    return _execute(config, run_dir, loaded.to_yaml(), None)


def resume(directory: Path, overrides: list[str]) -> int:
    """`embodrl resume`: continue a run from its last good checkpoint; returns the exit code.

    Raises:
        CheckpointError: there is none.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{directory} is not the directory of a run: it has no {CONFIG_FILE}", "look in outputs/")
    loaded = load_run(path, overrides)
    config = loaded.config
    checkpoint, problems = CheckpointManager(directory, config.runner.keep_last_n).latest_good()
    for problem in problems:
        logger.warning("%s", problem)
    if checkpoint is not None and checkpoint.state["iteration"] > config.runner.max_iterations:
        raise ConfigError(
            [
                ConfigProblem(
                    "runner.max_iterations",
                    f"is {config.runner.max_iterations}, and the run has done {checkpoint.state['iteration']}",
                    remedy="raise it",
                )
            ]
        )
    return _execute(config, directory, loaded.to_yaml(), checkpoint, resumed=True)


def _execute(
    config: Config, run_dir: Path, config_yaml: str, checkpoint: Checkpoint | None, resumed: bool = False
) -> int:
    """Bring up the parts of a run, walk through it, and write the report."""
    _check_machine(config)
    # Weights, two moments and a margin, of this and the kept checkpoints; the policy is not built yet.
    preflight(run_dir, 64 * 2**20)
    device = configure_torch(config)
    logger.info("device %s, %d threads", device, torch.get_num_threads())
    iteration = checkpoint.state["iteration"] if checkpoint is not None else -1
    console = Console(config.runner.logger.console, config.runner.max_iterations, run_dir.name)
    pool = make_pool(config, config.env.train.total_num_envs, run_dir / "logs")
    metrics: MetricsLogger | None = None
    with StopSignal() as stop, console:
        try:
            console.phase("starting simulators")
            pool.start_async()
            policy = build_policy(config)
            _write_config(run_dir, config_yaml)
            metrics = MetricsLogger(run_dir, config.runner.logger, iteration if resumed else None, config.model_dump())
            console.restore(read_metrics(metrics.path))
            pool.wait_started()
            runner = Runner(config, run_dir, pool, policy, metrics, console, stop)
            preflight(run_dir, (config.runner.keep_last_n + 1) * runner.engine.state_num_bytes())
            if checkpoint is not None:
                console.message(f"resuming from {checkpoint.path}")
                runner.restore(checkpoint)
            code = runner.run()
        finally:
            pool.close()
            if metrics is not None:
                metrics.close()
        if code == 0:
            policy.save_pretrained(run_dir / "policy")
        console.message(f"report: {write_report(run_dir)}")
        if code:
            console.message(f"stopped by a signal; `embodrl resume {run_dir}` continues")
    return code


def _check_machine(config: Config) -> None:
    if config.env.env_type == "maniskill":
        from embodrl.scheduler.doctor import preflight_rendering

        preflight_rendering()


def _write_config(run_dir: Path, config_yaml: str) -> None:
    partial = run_dir / f".{CONFIG_FILE}.partial"
    try:
        partial.write_text(config_yaml)
        partial.replace(run_dir / CONFIG_FILE)
    except OSError as error:
        raise OutputError(
            f"{run_dir} can't be written: {error}", "set runner.output_dir to a directory of yours"
        ) from error
