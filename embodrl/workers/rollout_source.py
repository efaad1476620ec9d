"""The choice of where batches come from."""

from __future__ import annotations

from collections.abc import Callable

from embodrl.config.schema import Config
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.copies import frozen_copy
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.workers.async_collector import AsyncCollector, make_runners
from embodrl.workers.collector import WHOLE, Collector, Share, SyncCollector
from embodrl.workers.workflow_runner import WorkflowCollector


def make_collector(
    config: Config,
    pool: EnvPool,
    engine: RolloutEngine,
    should_stop: Callable[[], bool],
    keep_frames: bool,
) -> Collector:
    """Return what ``runner.max_staleness`` and ``rollout.workflow`` ask for.

    Args:
        config: the run.
        pool: started.
        engine: acts with the weights that train.
        should_stop: asked now and then; True interrupts a rollout.
        keep_frames: keep what the first camera sees.
    """
    if config.runner.max_staleness == 0:
        return rollout_worker(config, pool, engine, should_stop, keep_frames)
    trained = [parameter for group in engine.policy.trainable_groups().values() for parameter in group]
    apart = make_rollout_engine(config, frozen_copy(engine.policy, trained), engine.num_threads)
    players = make_runners(config, pool, apart, keep_frames)
    return AsyncCollector(config, pool.spec.num_envs, len(pool.spec.tasks), players, apart, should_stop)


def rollout_worker(
    config: Config,
    pool: EnvPool,
    engine: RolloutEngine,
    should_stop: Callable[[], bool],
    keep_frames: bool,
    share: Share = WHOLE,
) -> SyncCollector:
    """Return what plays in a synchronous run; see SyncCollector."""
    worker = SyncCollector if config.rollout.workflow is None else WorkflowCollector
    return worker(config, pool, engine, should_stop, keep_frames, share)
