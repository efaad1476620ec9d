"""The choice of where batches come from."""

from __future__ import annotations

from collections.abc import Callable

from embodrl.config.schema import Config
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.base import RolloutEngine
from embodrl.hybrid_engines.copies import frozen_copy
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.workers.async_rollout import AsyncRolloutWorker, make_players
from embodrl.workers.rollout import RolloutSource, RolloutWorker
from embodrl.workers.share import WHOLE, Share
from embodrl.workers.workflow_rollout import WorkflowRollout


def make_rollout_source(
    config: Config,
    pool: EnvPool,
    engine: RolloutEngine,
    should_stop: Callable[[], bool],
    keep_frames: bool,
) -> RolloutSource:
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
    players = make_players(config, pool, apart, keep_frames)
    return AsyncRolloutWorker(config, pool.spec.num_envs, len(pool.spec.tasks), players, apart, should_stop)


def rollout_worker(
    config: Config,
    pool: EnvPool,
    engine: RolloutEngine,
    should_stop: Callable[[], bool],
    keep_frames: bool,
    share: Share = WHOLE,
) -> RolloutWorker:
    """Return what plays in a synchronous run; see RolloutWorker."""
    worker = RolloutWorker if config.rollout.workflow is None else WorkflowRollout
    return worker(config, pool, engine, should_stop, keep_frames, share)
