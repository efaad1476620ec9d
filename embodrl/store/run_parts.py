"""The parts of a run whose experience comes from a store: episodes for replay buffers, rollouts for other losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from embodrl.config.schema import Config
from embodrl.data.demos import Demos
from embodrl.data.imitation import check_demos
from embodrl.errors import StoreError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.learners.off_policy import OffPolicyUpdater
from embodrl.learners.replay import check_rewards, make_stores, with_data
from embodrl.learners.rollout import Parts
from embodrl.specs import LOSSES
from embodrl.store.learner import PublishedWeights
from embodrl.store.parts import open_store
from embodrl.store.rollout_shards import put_run
from embodrl.store.rollouts import StoreBackend, StoreCollector
from embodrl.store.shards import TransitionReader
from embodrl.store.shared_rollouts import SharedRollouts
from embodrl.store.store import Store
from embodrl.store.weights import newest_version
from embodrl.trainer.files import PUBLISHED_DIR
from embodrl.trainer.parts import OnStep, also_lost, learning, make_policy, start_engine
from embodrl.trainer.session import RunSession
from embodrl.trainer.settings import approved
from embodrl.workers.reward import RewardWorker


def build(
    session: RunSession, device: torch.device, stopped: Callable[[], bool], closing: ExitStack, on_step: OnStep = None
) -> Parts:
    """Like ``embodrl.trainer.parts.build``; collectors gather, and take their weights from the store.

    Raises:
        StoreError: the store can't be reached, or has weights of another run.
    """
    config, deployment = session.config, session.deployment
    store = open_store(config)
    if session.checkpoint is None and newest_version(store) is not None:
        hint = "resume that run (`embodrl resume DIR`), or choose another store"
        raise StoreError(f"{store} has weights of another run", hint, code="store-has-weights")
    policy = make_policy(session, device)
    engine = start_engine(session, session.weights_from, policy, closing)
    acting = make_rollout_engine(config, policy, deployment.threads_of(deployment.of("rollout")[0]))
    should_stop = also_lost(engine, stopped)
    weights = PublishedWeights(store, session.directory / PUBLISHED_DIR, policy)
    put_run(store, approved(session.loaded.to_yaml()))

    rewards = RewardWorker(config, config.env.tasks)
    closing.callback(rewards.close)

    def collector(config: Config, engine: RolloutEngine) -> StoreCollector | SharedRollouts:
        if LOSSES.entry(config.algorithm.loss_type).off_policy:
            reader, check = _episodes(session, store)
            return StoreCollector(config, engine, reader, weights, check, should_stop)
        return SharedRollouts(config, engine, session.directory / "shards", weights, rewards, should_stop)

    log_dir = session.directory / "logs"
    rollouts = StoreBackend(config, acting, deployment.of("env"), log_dir, should_stop, collector, weights=weights)
    closing.callback(rollouts.close)
    if not LOSSES.entry(config.algorithm.loss_type).off_policy:
        return Parts(policy, engine, rollouts, rewards, **learning(config, policy, engine, None, on_step))
    stores = make_stores(config, policy)
    updater = OffPolicyUpdater(config, engine, stores, on_step)
    return Parts(policy, engine, rollouts, rewards, from_records=updater, replay=stores)


def _episodes(session: RunSession, store: Store) -> tuple[TransitionReader, Callable[[Demos], None]]:
    """Return a reader of the store's episodes, and a function that raises if some do not fit the run."""
    config = session.config
    cameras = config.env.cameras
    reader = TransitionReader(
        store,
        session.directory / "shards",
        [camera.name for camera in cameras],
        (cameras[0].height, cameras[0].width),
        lambda shard: check_rewards(shard, config),
    )
    named = with_data(config, str(config.store_url))
    return reader, lambda demos: check_demos(demos, named)
