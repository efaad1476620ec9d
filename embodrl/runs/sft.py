"""`embodrl sft`: imitation of demonstrations, by the same train engines, checkpoints and sinks as `embodrl train`."""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from embodrl.config import LoadedConfig
from embodrl.config.schema import AlgorithmConfig, Config, SftConfig
from embodrl.data.batch import Batch
from embodrl.data.demos import Demos
from embodrl.data.facts import data_directory, read_facts
from embodrl.data.imitation import FrameBatches, check_demos, check_robot, load_configured_demos
from embodrl.data.rng import capture_rng, restore_rng
from embodrl.data.statistics import STATISTICS_FILE, UNNAMED, RobotStatistics, dimension_stats, read_statistics
from embodrl.errors import CheckpointError, EmbodrlError, OutputError, StatisticsMissingError, UsageError
from embodrl.hybrid_engines.base import EngineState, TrainEngine, counters_of
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.models.base import VLAPolicy
from embodrl.models.common.gripper import Convention, to_model
from embodrl.reporting.log import RunLog
from embodrl.reporting.progress import Progress
from embodrl.reporting.sinks import MetricsLogger
from embodrl.runs.build import make_launcher
from embodrl.runs.files import (
    LEAST_FREE_BYTES,
    LOG_FILE,
    METRICS_BLOB,
    POLICY_DIR,
    check_disk_space,
    drop_missing_warm_start,
    export_policy,
    removed_if_empty,
    resume_hint,
    saved_metrics,
)
from embodrl.runs.lock import LOCK_FILE, RunLock, run_lock
from embodrl.runs.provenance import add_provenance, changes_so_far, compute_text
from embodrl.runs.recovery import TrainersLostError, attempts, lost_trainers
from embodrl.runs.settings import STATE_KEY, load_saved, write_settings
from embodrl.runs.stop import StopSignal
from embodrl.specs import ENGINES, ENVS
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager, preflight
from embodrl.storage.integrity import check_checksums
from embodrl.types import Observation
from embodrl.workers.actor import make_train_engine, saves_shards
from embodrl.workers.env import check_simulator, make_pool
from embodrl.workers.evaluator import Evaluator
from embodrl.workers.policy import build_policy, check_policy_decoding, configure_torch, num_threads

logger = logging.getLogger(__name__)

METRICS_FILE = "sft_metrics.jsonl"


def learning_rate(settings: SftConfig, step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine to 0."""
    if step < settings.lr_warmup_steps:
        return settings.lr * (step + 1) / settings.lr_warmup_steps
    part = (step - settings.lr_warmup_steps) / max(settings.max_steps - settings.lr_warmup_steps, 1)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(part, 1.0)))


def engine_config(config: Config, device: torch.device) -> Config:
    """Return the configuration that train engines are built with: ``sft``'s rates and batch sizes, no reference.

    Args:
        config: the run.
        device: that trains; on a CPU every core gets one micro-batch.
    """
    settings = config.sft
    cores = num_threads(config) if device.type == "cpu" and config.actor.training_backend == "native" else 1
    micro = settings.micro_batch_size or math.ceil(settings.batch_size / cores)
    optim = config.actor.optim.model_copy(update={"lr": settings.lr, "weight_decay": settings.weight_decay})
    actor = config.actor.model_copy(
        update={"optim": optim, "micro_batch_size": micro, "global_batch_size": settings.batch_size}
    )
    # Those of an off-policy algorithm would bring critics, which imitation has no use for.
    algorithm = AlgorithmConfig()
    on_policy = {"adv_type": algorithm.adv_type, "loss_type": algorithm.loss_type}
    kl = config.algorithm.kl.model_copy(update={"coef": 0.0})
    return config.model_copy(
        update={
            "actor": actor,
            "algorithm": config.algorithm.model_copy(update={"kl": kl, **on_policy}),
            "runner": config.runner.model_copy(update={"max_iterations": settings.max_steps, "max_staleness": 0}),
        }
    )


def sft(loaded: LoadedConfig) -> int:
    """Train the policy on demonstrations and export it; returns the exit code.

    SIGINT and SIGTERM end it after the current step: a checkpoint and the policy so far are saved.

    Raises:
        OutputError: the output directory can't be written or holds an earlier run, before anything has started.
        EmbodrlError: there are no demonstrations, or the loss is not finite.
    """
    loaded = with_vision(loaded.with_absolute_paths())
    config = loaded.config
    directory = Path(config.sft.output_dir)
    backend = config.actor.training_backend
    if not ENGINES.entry(backend).imitates:
        raise UsageError(
            f"`embodrl sft` does not support actor={backend}", "use actor=native or actor=fsdp", code="sft-backend"
        )
    read_facts(data_directory(config.sft.data_dir))  # raises, before anything is written
    for name in (POLICY_DIR, METRICS_FILE):
        if (directory / name).exists():
            raise OutputError(
                f"{directory / name} already exists",
                f"`embodrl resume {directory}` continues it; otherwise choose another sft.output_dir",
                code="sft-output-exists",
            )
    with _another_directory():
        preflight(directory, LEAST_FREE_BYTES)
    with (
        removed_if_empty(directory, (LOCK_FILE, LOG_FILE, STATISTICS_FILE)),
        run_lock(directory) as lock,
        RunLog(directory / LOG_FILE),
    ):
        return _run(loaded, directory, lock, None, None)


@contextmanager
def _another_directory() -> Iterator[None]:
    """Name this command's setting of the output directory in errors of the block."""
    try:
        yield
    except OutputError as error:
        hint = "set sft.output_dir to a writable directory with free space"
        raise OutputError(error.message, hint, code=error.code) from error


def with_model(config: Config, **changes: object) -> Config:
    """Return a configuration with other settings of the section ``model``."""
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def with_vision(loaded: LoadedConfig) -> LoadedConfig:
    """Return a configuration that imitation trains the vision of, unless the user has frozen it.

    One that was loaded without a verb may have it frozen, which follows from a warm start that learns from reward.
    """
    if loaded.config.model.freeze_vision and loaded.origins["model.freeze_vision"].kind == "preset":
        return replace(loaded, config=with_model(loaded.config, freeze_vision=False))
    return loaded


def policy_with_statistics(
    config: Config, demos: Demos, path: Path, tell: Callable[[str], None]
) -> tuple[Config, VLAPolicy]:
    """Build the policy with the statistics that ``sft.stats`` asks for, and return it with its configuration.

    Args:
        config: the run.
        demos: that statistics are computed from.
        path: of the file that they are written to, unless they are the checkpoint's.
        tell: called with a line that says which they are.

    Raises:
        CheckpointError: see the family's builder.
    """
    model, choice = config.model, config.sft.stats
    path.unlink(missing_ok=True)  # of an earlier start that failed
    if choice == "auto" and model.stats_path is not None:
        choice = model.stats_path
    if choice == "auto" and not ENVS.entry(config.env.env_type).simulates and model.model_path is None:
        choice = "auto" if model.warm_start is not None else "data"
    if choice in ("auto", "checkpoint"):
        try:
            return config, build_policy(config)
        except StatisticsMissingError as error:
            if choice == "checkpoint":
                raise
            tell(f"{error.message}: statistics are computed from the demonstrations")
            choice = "data"
    if choice == "data":
        statistics, narrow = demo_statistics(demos, config.sft.data_dir, model.gripper, config.env.include_state)
        if narrow:
            tell(f"q01 and q99 of action dimensions {narrow} are their minimum and maximum: they hardly ever move")
    else:
        statistics = read_statistics(Path(choice).expanduser())
    statistics.write(path)
    tell(f"statistics of {'the demonstrations' if choice == 'data' else choice}, as in {path}")
    config = with_model(config, stats_path=str(path))
    return config, build_policy(config)


def demo_statistics(
    demos: Demos, data_dir: str | Path, gripper: Convention, include_state: bool
) -> tuple[RobotStatistics, list[int]]:
    """Return the statistics of demonstrations, and the action dimensions that hardly move (``dimension_stats``).

    Args:
        demos: of all frames.
        data_dir: where they are from; the robot that it states names the statistics.
        gripper: convention of the policy, which actions are converted to.
        include_state: of the state, too, if there is one.
    """
    action, narrow = dimension_stats(to_model(demos.actions.astype(np.float64), gripper))
    state = dimension_stats(demos.state)[0] if include_state and demos.state.shape[1] else None
    name = read_facts(data_directory(str(data_dir))).robot_type or UNNAMED
    return RobotStatistics(name, action, state, gripper, len(demos.actions), len(demos.instructions)), narrow


def check_range(policy: VLAPolicy, demos: Demos, settings: SftConfig) -> None:
    """Refuse demonstrations of which the policy can't express the actions.

    Raises:
        EmbodrlError: names each dimension with more values out of range than ``sft.max_clipped``, and their share.
    """
    shares = policy.out_of_range(demos.actions, demos.state).mean(axis=0)
    wrong = [f"{share:.0%} of dimension {index}" for index, share in enumerate(shares) if share > settings.max_clipped]
    if wrong:
        low, high = demos.actions.min(), demos.actions.max()
        raise EmbodrlError(
            f"actions in {settings.data_dir} ({low:g} to {high:g}) are out of the policy's range: {', '.join(wrong)}",
            "sft.stats=data normalises them by statistics of the demonstrations; sft.max_clipped=1 trains anyway",
            code="sft-actions-out-of-range",
        )


def is_sft_run(directory: Path) -> bool:
    """Return whether a run directory was written by `embodrl sft`."""
    return (directory / METRICS_FILE).is_file()


def resume(directory: Path, overrides: list[str], trust: bool = False) -> int:
    """Continue fine-tuning from the last intact checkpoint; returns the exit code.

    Args:
        directory: of the run.
        overrides: of the command line.
        trust: its settings may run code though another user started the run.

    Raises:
        CheckpointError: there is no intact checkpoint.
    """
    with run_lock(directory) as lock, RunLog(directory / LOG_FILE):
        checkpoint, problems = CheckpointManager(directory, 1).latest_good()
        loaded, saved = load_saved(directory, overrides, "sft", checkpoint, True, trust)
        loaded = loaded.with_absolute_paths()
        config = loaded.config
        if checkpoint is None:
            raise CheckpointError(
                f"{directory} has no intact checkpoint: {'; '.join(problems) or 'none was written'}",
                "start again in another sft.output_dir; sft.save_interval sets how often checkpoints are written",
                code="sft-no-checkpoint",
            )
        done = checkpoint.state.integer("step")
        if done >= config.sft.max_steps and _is_exported(directory):
            progress = f"{done}/{config.sft.max_steps}"
            logger.warning("run complete (%s steps); to train further, resume with a larger sft.max_steps", progress)
            return 0
        return _run(loaded, directory, lock, checkpoint, saved.text)


def _is_exported(directory: Path) -> bool:
    """Return whether the policy is there and intact; a warning names what is damaged."""
    try:
        return check_checksums(directory / POLICY_DIR)
    except EmbodrlError as error:
        logger.warning("%s; it is exported again", error.message)
        return False


def _run(
    loaded: LoadedConfig, directory: Path, lock: RunLock, checkpoint: Checkpoint | None, old_settings: str | None
) -> int:
    """As ``_execute``; training processes that are lost are restarted."""

    for attempt in attempts(loaded.config, directory, checkpoint, old_settings, lock.check):
        with attempt:
            return _execute(loaded, directory, lock, attempt.checkpoint, attempt.old_settings)
    raise AssertionError("attempts ends by raising")


def _execute(
    loaded: LoadedConfig, directory: Path, lock: RunLock, checkpoint: Checkpoint | None, old_settings: str | None
) -> int:
    """Run, and add to an error how to continue; see ``_train``."""
    with StopSignal(loaded.config.runner.stop_timeout_s) as stop:
        try:
            return _train(loaded, directory, lock, checkpoint, old_settings, stop)
        except EmbodrlError as error:
            if stop:
                error.exit_code = stop.exit_code
            if not isinstance(error, OutputError) and CheckpointManager(directory, 1).steps():
                error.add_hint(resume_hint(directory))
            raise


def _train(
    loaded: LoadedConfig,
    directory: Path,
    lock: RunLock,
    checkpoint: Checkpoint | None,
    old_settings: str | None,
    stop: StopSignal,
) -> int:
    """Build everything in order, train, and export the policy."""
    config, deployment, settings = loaded.config, loaded.deployment, loaded.config.sft
    configure_torch(config, deployment.of("actor")[0])
    if settings.eval_interval:
        check_simulator(config)
    with (
        ExitStack() as closing,
        Progress("sft", settings.max_steps, "steps", config.runner.logger.console) as progress,
    ):
        progress.message(f"run: {directory}, log: {directory / LOG_FILE}")
        progress.message(compute_text(config))
        if config.model.freeze_vision:  # maybe of a run that learnt from reward, whose config.yaml says so
            frozen = loaded.origins["model.freeze_vision"]
            progress.message(f"vision is not trained: model.freeze_vision=true ({frozen})")
        check_robot(config)
        demos = load_configured_demos(config)
        check_demos(demos, config)
        progress.message(f"{len(demos.instructions)} episodes, {len(demos.actions)} frames from {settings.data_dir}")
        weights_from = config if checkpoint is None else drop_missing_warm_start(config)
        statistics = directory / STATISTICS_FILE
        if checkpoint is not None and statistics.is_file():  # as the run began
            weights_from = with_model(weights_from, stats_path=str(statistics))
            policy = build_policy(weights_from)
        else:
            weights_from, policy = policy_with_statistics(weights_from, demos, statistics, progress.message)
        check_range(policy, demos, settings)
        check_policy_decoding(config, policy, config.env.eval.decoding)
        training = engine_config(weights_from, policy.device)
        launcher = make_launcher(training, deployment)
        if launcher is not None:
            closing.callback(launcher.close)
        engine = make_train_engine(training, deployment, policy, directory / "logs", launcher)
        closing.callback(engine.close)
        with _another_directory():
            check_disk_space(directory, config, policy, engine.state_num_bytes(), keep_best=False)
        stop.arm()
        batches = FrameBatches(demos, settings, policy.action_horizon, config.runner.seed, config.env.include_state)
        # One that begins again drops all rows.
        start = None if old_settings is None else -1
        done = start if checkpoint is None else checkpoint.state.integer("step")
        saved = None if checkpoint is None else saved_metrics(checkpoint)
        logged = (config.runner.logger, done, config.model_dump())
        metrics = closing.enter_context(MetricsLogger(directory, *logged, saved=saved, file_name=METRICS_FILE))
        sharded = saves_shards(config, deployment)
        trainer = Trainer(config, directory, policy, engine, batches, metrics, progress, stop, sharded, lock)
        if checkpoint is not None:
            trainer.restore(checkpoint)
            progress.start_at(trainer.step)
            progress.message(f"resuming from {checkpoint.path}")
        for line in add_provenance(directory, config, loaded.to_yaml(), old_settings, trainer.step):
            progress.message(line)
        settings_text = write_settings(directory, loaded.to_yaml(), changes_so_far(directory))
        stop.can_save(f"`embodrl resume {directory}` continues from its last checkpoint")
        try:
            trainer.run(settings_text)
        except EmbodrlError as error:
            if not stop and lost_trainers(engine):
                raise TrainersLostError(error) from error
            raise
        lock.check()
        with stop.saving():
            engine.fetch()
            export_policy(policy, directory / POLICY_DIR, config)
        if trainer.step < settings.max_steps:
            progress.message(
                f"stopped by a signal after {trainer.step} of {settings.max_steps} steps;"
                f" resume with: embodrl resume {directory}"
            )
        progress.message(f"saved {directory / POLICY_DIR}")
    return 0 if trainer.step == settings.max_steps else stop.exit_code


class Batches(Protocol):
    """Where the batches of frames come from, as ``FrameBatches``."""

    def next(self) -> tuple[Observation, Tensor, Tensor]:
        """Return observations, actions ``float32[N,H,A]`` and the mask ``bool[N,H]`` of those that count."""
        ...

    def state(self) -> tuple[dict[str, Any], Tensor]:
        """Return what ``load_state`` takes: JSON, and a tensor."""
        ...

    def load_state(self, rng: dict[str, Any], order: Tensor) -> None:
        """Continue where ``state`` was taken."""
        ...


class Trainer:
    """The imitation loop: a batch of frames, one optimizer step, logs, checkpoints, evaluations.

    Args:
        config: the run.
        directory: of the run.
        policy: of this process; has the engine's weights after ``engine.fetch``.
        engine: trains.
        batches: what is imitated.
        metrics: sinks.
        progress: shown to the user.
        stop: true once a signal has asked the run to end.
        sharded: the training processes write checkpoints, each its part.
        lock: of the directory.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        policy: VLAPolicy,
        engine: TrainEngine,
        batches: Batches,
        metrics: MetricsLogger,
        progress: Progress,
        stop: StopSignal,
        sharded: bool,
        lock: RunLock,
    ) -> None:
        self.config, self.policy, self.engine, self.batches = config, policy, engine, batches
        self.metrics, self.progress, self.stop, self.sharded, self.lock = metrics, progress, stop, sharded, lock
        self.checkpoints = CheckpointManager(directory, config.runner.keep_last_n)
        self.step = 0
        self._saved_step = -1
        self._settings_text = ""
        self._start = self._last_logged = time.monotonic()

    def run(self, settings_text: str) -> None:
        """Train until the last step or a signal, and save a checkpoint.

        Args:
            settings_text: the configuration, for checkpoints.
        """
        self._settings_text = settings_text
        self._start = self._last_logged = time.monotonic()
        settings = self.config.sft
        while self.step < settings.max_steps and not self.stop:
            self.take_step()
            if settings.save_interval and self.step % settings.save_interval == 0:
                with self.stop.saving():
                    self.save()
            if settings.eval_interval and self.step % settings.eval_interval == 0 and not self.stop:
                self._evaluate()
        if self._saved_step != self.step:
            with self.stop.saving():
                self.save()

    def take_step(self) -> None:
        """Take one optimizer step, and log it."""
        settings = self.config.sft
        self.engine.check()
        observation, actions, inside = self.batches.next()
        # Inputs are prepared here, not by the engine: noise and times of flow policies come from one stream.
        inputs = self.policy.sft_inputs(observation, actions) | {"action_mask": inside}
        batch = Batch({name: tensor.cpu() for name, tensor in inputs.items()})
        row = self.engine.imitate(batch, learning_rate(settings, self.step), settings.label_smoothing_bins)
        self.step += 1
        if self._is_due(settings.log_interval) or self.stop:
            now = time.monotonic()
            times = {"time_s": now - self._start, "time/total_s": now - self._last_logged}
            self.metrics.log({"iteration": self.step, "step": self.step, **row, **times})
            self._last_logged = now
        self.progress.update(self.step, " ".join(f"{name} {value:.3f}" for name, value in row.items()))

    def _is_due(self, interval: int) -> bool:
        return self.step % interval == 0 or self.step == self.config.sft.max_steps

    def _evaluate(self) -> None:
        self.engine.fetch()
        if self.config.actor.enable_offload:
            self.engine.offload()
        acting = make_rollout_engine(self.config, self.policy, num_threads(self.config))
        with make_pool(self.config.evaluated, self.config.env.eval.total_num_envs) as pool:
            evaluator = Evaluator(self.config, pool, acting, should_stop=lambda: bool(self.stop))
            try:
                with self.progress.within("evaluation", evaluator.num_plays, "episodes") as progress:
                    evaluator.progress = progress.update
                    result = evaluator.run()
            except InterruptedError:
                return
        self.metrics.log({"iteration": self.step, "step": self.step, **result.metrics()})
        rates = ", ".join(f"{name} {one.success_rate:.1%}" for name, one in result.by_decoding.items())
        self.progress.message(f"step {self.step}: success rate {rates}")

    def save(self) -> None:
        """Write a checkpoint; a full disk costs a logged error, not the run.

        Raises:
            OutputError: the run has lost its directory.
        """
        self.lock.check()
        saved = EngineState({}, self.engine.counters()) if self.sharded else self.engine.state_dict()
        data_rng, order = self.batches.state()
        state: dict[str, object] = {
            "kind": "sft",
            "step": self.step,
            STATE_KEY: self._settings_text,
            "engine": saved.state,
            "sharded": self.sharded,
            "rng": capture_rng(),
            "data_rng": data_rng,
        }
        try:
            write_shards = self.engine.save_shards if self.sharded else None
            tensors = saved.tensors | {"data": {"order": order}}
            blobs = {METRICS_BLOB: zlib.compress(self.metrics.content, 1)}
            self.checkpoints.save(self.step, tensors, state, blobs, write_shards)
        except OutputError as error:
            logger.error("%s", error)
            return
        self._saved_step = self.step

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue where a checkpoint was made.

        Raises:
            CheckpointError: it was made with other settings or demonstrations.
        """
        state = checkpoint.state
        counters = counters_of(state.fields("engine"))
        if state.flag("sharded"):
            self.engine.load_shards(checkpoint.path, counters)
        else:
            tensors = {name: checkpoint.tensors(name) for name in ("policy", "optimizer")}
            self.engine.load_state_dict(EngineState(tensors, counters))
        self.batches.load_state(dict(state.fields("data_rng").content), checkpoint.tensors("data")["order"])
        restore_rng(dict(state.fields("rng").content))
        self.step = self._saved_step = state.integer("step")
