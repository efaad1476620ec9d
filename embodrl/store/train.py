"""`embodrl store train`: imitate the episodes that collectors write into a store, and publish the weights there.

Imitates the collectors' own successful episodes (filtered behavior cloning; Oh et al., 2018, arXiv:1806.05635 for the
idea of learning from one's own good experience): no log-probs are needed, so any model family can learn from any
collector, however old its weights were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from embodrl.config import LoadedConfig
from embodrl.config.identity import describe, settings_read
from embodrl.config.schema import Config
from embodrl.config.yaml_text import to_yaml
from embodrl.data.imitation import check_demos
from embodrl.errors import StoreError, UsageError
from embodrl.learners.imitation_policy import check_range
from embodrl.models.base import VLAPolicy
from embodrl.reporting.progress import Progress
from embodrl.specs import ENGINES
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager, preflight
from embodrl.store.batches import FollowedBatches
from embodrl.store.config import store_settings
from embodrl.store.learner import PublishedWeights, StoreLearner
from embodrl.store.parts import DONE, open_store
from embodrl.store.shards import EpisodeFilter, ShardReader
from embodrl.store.store import Store
from embodrl.store.weights import newest_version
from embodrl.trainer.files import LEAST_FREE_BYTES, POLICY_DIR, PUBLISHED_DIR
from embodrl.trainer.imitation_parts import (
    ImitationView,
    make_hooks,
    prepare_imitation,
    run_and_export,
    start_imitation,
)
from embodrl.trainer.lock import RunLock
from embodrl.trainer.loop import Trainer
from embodrl.trainer.parts import make_trainer
from embodrl.trainer.schedule import Schedule
from embodrl.trainer.session import RunSession, run_directory_of, run_with_restarts
from embodrl.trainer.settings import STATE_KEY, changed_settings, last_settings, load_saved
from embodrl.workers.policy import build_policy

METRICS_FILE = "store_metrics.jsonl"
_LEARNED = (
    *("actor.optim.", "actor.precision", "actor.param_dtype", "env.", "model.", "runner.seed", "sft."),
    *("store.url", "store.window_episodes", "store.successes_only", "store.corrections_only"),
)
"""Settings that the weights depend on."""
_FREE = (
    r"env\.(train|episodes_per_reset)(\..*)?",
    r"sft\.(output_dir|max_steps|micro_batch_size|eval_interval|log_interval|save_interval)",
)
"""Patterns of settings that may change: the length of the training, reporting, and retention."""


def train(loaded: LoadedConfig, say: Callable[[str], None] = print) -> int:
    """Follow the store until ``sft.max_steps``; return the exit code. The same command resumes after a stop or kill.

    Raises:
        EmbodrlError: the settings or the store's content do not fit, or the disk is full.
    """
    loaded = loaded.with_absolute_paths()
    directory = Path(loaded.config.sft.output_dir)
    preflight(directory, LEAST_FREE_BYTES)
    with run_directory_of(directory) as lock:
        checkpoint, problems = CheckpointManager(directory, 1).latest_good()
        if checkpoint is not None:
            refuse_others(loaded.config, checkpoint.state.text(STATE_KEY), directory)
        return _follow(loaded, directory, lock, say, checkpoint, problems)


def refuse_others(config: Config, before: str, directory: Path) -> None:
    """Refuse to resume a training with other settings than it began with; ``before`` are the checkpoint's, as text.

    Raises:
        StoreError: names the settings that differ.
    """
    kept = settings_read(config, "store", _FREE, _LEARNED)
    found = {
        key: values
        for key, values in changed_settings(before, to_yaml(config, None)).items()
        if any(key == one or key.startswith(f"{one}.") for one in kept)
    }
    if found:
        raise StoreError(
            f"the training in {directory} was begun with other settings: {describe(found)}",
            f"resume with the original settings, change them explicitly with `embodrl resume {directory} KEY=VALUE`, or"
            " choose another sft.output_dir",
            code="store-other-settings",
        )


def _follow(
    loaded: LoadedConfig,
    directory: Path,
    lock: RunLock,
    say: Callable[[str], None],
    checkpoint: Checkpoint | None,
    problems: Sequence[object],
) -> int:
    """Train in a locked directory, from its newest good checkpoint, if any."""
    config = loaded.config
    backend = config.actor.training_backend
    if not ENGINES.entry(backend).every_update:
        message = f"`embodrl store train` does not support actor={backend}"
        raise UsageError(message, "use actor=native or actor=fsdp", code="store-backend")
    store = open_store(config)
    if checkpoint is None and (problems or newest_version(store) is not None):
        hint = "start the trainer in the output directory of that run, or with another store"
        raise StoreError(
            f"{store} has weights of a run whose checkpoints are not in {directory}", hint, code="store-has-weights"
        )

    def attempt(session: RunSession) -> int:
        return work(session, store, say)

    return run_with_restarts(loaded, directory, lock, attempt, checkpoint, last_settings(directory))


def resume(directory: Path, overrides: list[str], trust: bool = False) -> int:
    """Resume a run of `embodrl store train`; return the exit code.

    With ``trust``, the run's settings may run code though another user started it.
    """
    with run_directory_of(directory) as lock:
        checkpoint, problems = CheckpointManager(directory, 1).latest_good()
        loaded, _ = load_saved(directory, overrides, "store", checkpoint, True, trust)
        return _follow(loaded.with_absolute_paths(), directory, lock, print, checkpoint, problems)


def work(session: RunSession, store: Store, say: Callable[[str], None]) -> int:
    """Build the components, train, and export the policy."""
    config = session.config
    directory = session.directory
    settings = session.config.sft
    prepare_imitation(session)
    console = config.runner.logger.console
    with ExitStack() as closing, Progress("train", settings.max_steps, "steps", console) as progress:
        trainer, learner = _bring_up(session, store, progress, closing)
        if trainer.iteration < settings.max_steps:
            store.remove(DONE)
        say(f"following {store}, from step {trainer.iteration}, with {learner.followed.num_episodes} episodes")
        code = run_and_export(trainer, progress)
        if trainer.is_finished:
            learner.weights.finish(trainer.iteration, lambda: bool(session.stop), store_settings(config).poll_s)
        done = trainer.iteration
        episodes = learner.followed.num_episodes
        progress.message(f"{done} steps with {episodes} episodes; saved {directory / POLICY_DIR}")
    return code


def _bring_up(
    session: RunSession, store: Store, progress: Progress, closing: ExitStack
) -> tuple[Trainer, StoreLearner]:
    """Return the trainer, the start of this attempt of the run, and the learner."""
    config = session.config
    directory = session.directory
    policy = build_policy(session.weights_from)
    engine = start_imitation(session, config, policy, closing, published=1)
    reader = _reader(config, store, directory)
    batches = FollowedBatches(reader, config, policy.action_horizon, lambda demos: _check(demos, policy, config))
    learner = StoreLearner(
        config,
        policy,
        engine,
        batches,
        PublishedWeights(store, directory / PUBLISHED_DIR, policy),
        make_hooks(session, policy, progress),
    )
    publish_interval = store_settings(config).publish_interval
    # Without a checkpoint, a killed trainer could not resume from its own weights.
    schedule = Schedule(config.sft.max_steps, config.sft.eval_interval, publish_interval, saves_first=True)
    trainer = make_trainer(session, learner, schedule, ImitationView(progress), closing, METRICS_FILE)
    progress.start_at(trainer.iteration)
    return trainer, learner


def _reader(config: Config, store: Store, directory: Path) -> ShardReader:
    cameras = config.env.cameras
    settings = store_settings(config)
    return ShardReader(
        store,
        directory / "shards",
        [camera.name for camera in cameras],
        (cameras[0].height, cameras[0].width),
        settings.window_episodes,
        EpisodeFilter(settings.successes_only, settings.corrections_only),
    )


def _check(demos: Any, policy: VLAPolicy, config: Config) -> None:
    named = config.model_copy(
        update={"sft": config.sft.model_copy(update={"data_dir": str(store_settings(config).url)})}
    )
    check_demos(demos, named)
    assert np.isfinite(demos.actions).all(), "already checked by the reader"
    check_range(policy, demos, named.sft)
