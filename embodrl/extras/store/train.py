"""`embodrl store train`: imitate the episodes that collectors write into a store, and publish the weights there.

The collectors' own solved episodes are imitated (filtered behavior cloning; Oh et al., 2018, arXiv:1806.05635 for the
idea of learning from one's own good experience): no log-probs are needed, so any model family can learn from any
collector, however old its weights were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.data.imitation import FrameBatches, check_demos
from embodrl.errors import StoreError, UsageError
from embodrl.extras.store.config import store_settings
from embodrl.extras.store.parts import DONE, open_store
from embodrl.extras.store.shards import EPISODES, ShardReader, newest_of_each
from embodrl.extras.store.store import Retry, Store
from embodrl.extras.store.weights import newest_version, upload_versions
from embodrl.fields import Fields
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.weight_sync.buckets import trained_names
from embodrl.hybrid_engines.weight_sync.disk import DiskSender
from embodrl.models.base import VLAPolicy
from embodrl.reporting.log import RunLog
from embodrl.reporting.progress import Progress
from embodrl.reporting.sinks import MetricsLogger
from embodrl.runs.files import (
    LEAST_FREE_BYTES,
    LOG_FILE,
    POLICY_DIR,
    PUBLISHED_DIR,
    check_disk_space,
    drop_missing_warm_start,
    export_policy,
    saved_metrics,
)
from embodrl.runs.lock import RunLock, run_lock
from embodrl.runs.provenance import changes_so_far
from embodrl.runs.settings import write_settings
from embodrl.runs.sft import Trainer, check_range, engine_config
from embodrl.runs.stop import StopSignal
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager, preflight
from embodrl.types import Observation
from embodrl.workers.actor import make_train_engine
from embodrl.workers.policy import build_policy, configure_torch

logger = logging.getLogger(__name__)

METRICS_FILE = "store_metrics.jsonl"
_LOOK_S = 0.2


class FollowedBatches:
    """Batches of frames of the episodes in a store, which become more; as ``FrameBatches``.

    Args:
        reader: of the store.
        config: the run.
        horizon: actions that the policy learns per frame.
        check: called with the first episodes; raises if they do not fit the policy.
    """

    def __init__(self, reader: ShardReader, config: Config, horizon: int, check: Callable[[Any], None]) -> None:
        self._reader, self._config, self._horizon, self._check = reader, config, horizon, check
        self._batches: FrameBatches | None = None
        self._rng = dict[str, Any]()

    @property
    def num_episodes(self) -> int:
        """Episodes that were read, each of which counts once."""
        return len(self._reader.ids)

    @property
    def is_ready(self) -> bool:
        """There is something to learn from."""
        return self._batches is not None

    def poll(self) -> None:
        """Read new shards.

        Raises:
            StoreError: the store can't be reached, or a shard is damaged.
        """
        if self._reader.poll():
            self._renew()

    def _renew(self) -> None:
        demos, config = self._reader.demos, self._config
        if demos is None:
            return
        if self._batches is None:
            self._check(demos)
        else:
            self._rng = self._batches.state()[0]
        seed, include_state = config.runner.seed, config.env.include_state
        only = store_settings(config).corrections_only
        batches = FrameBatches(demos, config.sft, self._horizon, seed, include_state, only)
        self._batches = batches if len(batches.frames) else None  # there may be no corrections yet
        if self._rng and self._batches is not None:
            self._batches.load_state(self._rng, torch.zeros(0, dtype=torch.int64))

    def next(self) -> tuple[Observation, Tensor, Tensor]:
        """Return the next batch; see ``FrameBatches.next``."""
        assert self._batches is not None, "asked only when it is ready"
        return self._batches.next()

    def state(self) -> tuple[dict[str, Any], Tensor]:
        """Return which shards were read and the state of the order."""
        rng, order = (self._rng, torch.zeros(0, dtype=torch.int64))
        if self._batches is not None:
            rng, order = self._batches.state()
        return {"rng": rng, "store": self._reader.state()}, order

    def load_state(self, rng: dict[str, Any], order: Tensor) -> None:
        """Read the shards of the window once more, and continue."""
        saved = Fields(rng, "the checkpoint's data_rng", StoreError)
        self._reader.restore(saved.fields("store"))
        self._rng = dict(saved.fields("rng").content)
        self._renew()
        if self._batches is not None and self._rng:
            self._batches.load_state(self._rng, order)

    def finished(self) -> list[str]:
        """Return the shards that are not needed any more."""
        return self._reader.finished


class StoreTrainer(Trainer):
    """Trains while the store has episodes for it, publishes its weights, and waits in between.

    Args:
        store: with the episodes; gets the weights.
        batches: of the episodes.
        others: arguments of ``Trainer``.
    """

    def __init__(self, store: Store, batches: FollowedBatches, directory: Path, *others: Any) -> None:
        config, policy, engine, *rest = others
        super().__init__(config, directory, policy, engine, batches, *rest)
        self.store, self.settings, self.followed = store, store_settings(config), batches
        self._sender = DiskSender(directory / PUBLISHED_DIR, trained_names(policy))
        self._directory = directory / PUBLISHED_DIR
        self._retry = Retry(logger.warning)
        self._next_look = 0.0
        self._is_behind = False

    def run(self, settings_text: str) -> None:
        """Train until the last step or a signal; each checkpoint is saved before its weights are published."""
        self._settings_text = settings_text
        if self._saved_step == self.step:
            self._publish()
        else:  # a new run: without a checkpoint, a trainer that is killed could not follow its own weights
            self._save_and_publish()
        while self.step < self.config.sft.max_steps and self._wait():
            self.take_step()
            if self.step % self.settings.publish_interval == 0:
                self._save_and_publish()
        if self._saved_step != self.step:
            self._save_and_publish()

    def _save_and_publish(self) -> None:
        with self.stop.saving():
            self.save()
            if self._saved_step == self.step:  # else the disk is full, which was reported
                self._publish()
                if self.settings.remove_used:
                    self._retry(self._remove_used)

    def _wait(self) -> bool:
        """Wait until the episodes so far allow another step; False after a signal."""
        while not self.stop:
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + self.settings.poll_s
                self._look()
            allowed = self.settings.steps_per_episode * self.followed.num_episodes
            if self.followed.is_ready and self.step < allowed:
                return True
            self.engine.check()
            time.sleep(_LOOK_S)
        return False

    def _look(self) -> None:
        self._retry(self.followed.poll)
        if self._is_behind:
            self._upload()

    def _publish(self) -> None:
        """Publish the weights, unless a process before this one has published as many updates."""
        if self._sender.version is None or self.step > self._sender.version:
            self._sender.send(self.engine.weights(), self.step)
        self._upload()

    def _upload(self) -> None:
        def upload() -> bool:
            upload_versions(self.store, self._directory)
            return True

        self._is_behind = not self._retry(upload, default=False)

    def _remove_used(self) -> None:
        names = self.store.names(EPISODES)
        for name in set(names).intersection(self.followed.finished()).difference(newest_of_each(names)):
            self.store.remove(name)

    def finish(self) -> None:
        """Tell collectors and evaluators that there will be no further weights; tried until it succeeds."""

        def mark() -> bool:
            upload_versions(self.store, self._directory)
            self.store.put_note(DONE, {"version": self.step})
            return True

        while not self._retry(mark, default=False) and not self.stop:
            time.sleep(self.settings.poll_s)


def train(loaded: LoadedConfig, say: Callable[[str], None] = print) -> int:
    """Follow the store until ``sft.max_steps``; return the exit code. The same command continues after a stop or kill.

    Raises:
        EmbodrlError: the settings or what the store holds do not fit, or the disk is full.
    """
    loaded = loaded.with_absolute_paths()
    config = loaded.config
    if config.actor.training_backend != "native" or loaded.deployment.trains_in_processes:
        message = "`embodrl store train` trains in its own process, with actor=native"
        raise UsageError(message, "set actor=native, and leave out actor.own_process", code="store-backend")
    store = open_store(config)
    directory = Path(config.sft.output_dir)
    preflight(directory, LEAST_FREE_BYTES)
    with run_lock(directory) as lock, RunLog(directory / LOG_FILE), StopSignal(config.runner.stop_timeout_s) as stop:
        checkpoint, problems = CheckpointManager(directory, 1).latest_good()
        if checkpoint is None and (problems or newest_version(store) is not None):
            hint = "start the trainer in the output directory of that run, or with another store"
            raise StoreError(
                f"{store} has weights of a run whose checkpoints are not in {directory}", hint, code="store-has-weights"
            )
        return _train(loaded, store, directory, lock, stop, checkpoint, say)


def _train(
    loaded: LoadedConfig,
    store: Store,
    directory: Path,
    lock: RunLock,
    stop: StopSignal,
    checkpoint: Checkpoint | None,
    say: Callable[[str], None],
) -> int:
    """Build everything in order, train, and export the policy."""
    config, deployment, settings = loaded.config, loaded.deployment, loaded.config.sft
    configure_torch(config, deployment.of("actor")[0])
    with (
        ExitStack() as closing,
        Progress("train", settings.max_steps, "steps", config.runner.logger.console) as progress,
    ):
        policy = build_policy(config if checkpoint is None else drop_missing_warm_start(config))
        engine = make_train_engine(engine_config(config, policy.device), deployment, policy, directory / "logs", None)
        closing.callback(engine.close)
        check_disk_space(directory, config, policy, engine.state_num_bytes(), keep_best=False)
        stop.arm()
        batches = FollowedBatches(
            _reader(config, store, directory),
            config,
            policy.action_horizon,
            lambda demos: _check(demos, policy, config),
        )
        done = 0 if checkpoint is None else checkpoint.state.integer("step")
        saved = None if checkpoint is None else saved_metrics(checkpoint)
        logged = (config.runner.logger, done, config.model_dump())
        metrics = closing.enter_context(MetricsLogger(directory, *logged, saved=saved, file_name=METRICS_FILE))
        others = (config, policy, engine, metrics, progress, stop, False, lock)
        trainer = StoreTrainer(store, batches, directory, *others)
        if checkpoint is not None:
            trainer.restore(checkpoint)
            progress.start_at(trainer.step)
        if trainer.step < settings.max_steps:
            store.remove(DONE)
        say(f"following {store}, from step {trainer.step}, with {batches.num_episodes} episodes")
        stop.can_save("the same command continues from its last checkpoint")
        trainer.run(write_settings(directory, loaded.to_yaml(), changes_so_far(directory)))
        return _finish(trainer, policy, engine, config, directory, stop, progress, batches)


def _finish(
    trainer: StoreTrainer,
    policy: VLAPolicy,
    engine: TrainEngine,
    config: Config,
    directory: Path,
    stop: StopSignal,
    progress: Progress,
    batches: FollowedBatches,
) -> int:
    with stop.saving():
        engine.fetch()
        export_policy(policy, directory / POLICY_DIR, config)
    if trainer.step == config.sft.max_steps:
        trainer.finish()
    progress.message(f"{trainer.step} steps with {batches.num_episodes} episodes; saved {directory / POLICY_DIR}")
    return 0 if trainer.step == config.sft.max_steps else stop.exit_code


def _reader(config: Config, store: Store, directory: Path) -> ShardReader:
    cameras, settings = config.env.cameras, store_settings(config)
    return ShardReader(
        store,
        directory / "shards",
        [camera.name for camera in cameras],
        (cameras[0].height, cameras[0].width),
        settings.window_episodes,
        settings.successes_only,
        settings.corrections_only,
    )


def _check(demos: Any, policy: VLAPolicy, config: Config) -> None:
    named = config.model_copy(
        update={"sft": config.sft.model_copy(update={"data_dir": str(store_settings(config).url)})}
    )
    check_demos(demos, named)
    assert np.isfinite(demos.actions).all(), "the reader has checked them"
    check_range(policy, demos, named.sft)
