"""The parts of a run that learns from a dataset alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from embodrl.config.schema import Config
from embodrl.data.replay import ReplayBuffer, ReplayStores
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.learners.offline.backend import OfflineBackend
from embodrl.learners.offline.iql import IqlCritics
from embodrl.learners.offline.learner import OfflineUpdater
from embodrl.learners.offline.load import load_offline
from embodrl.learners.offline.td3_bc import Td3BcUpdater
from embodrl.learners.replay import demo_buffer
from embodrl.learners.rollout import Parts
from embodrl.models.base import VLAPolicy
from embodrl.models.common.observation_net import ObservationSpec
from embodrl.trainer.parts import OnStep, also_lost, make_policy, start_engine
from embodrl.trainer.session import RunSession
from embodrl.workers.reward import RewardWorker


def build(
    session: RunSession, device: torch.device, stopped: Callable[[], bool], closing: ExitStack, on_step: OnStep = None
) -> Parts:
    """Like ``embodrl.trainer.parts.build``; simulators start with the first evaluation."""
    config = session.config
    policy = make_policy(session, device)
    data, seen = load_offline(config, policy)
    engine, rollouts = _start(session, policy, stopped, closing)
    critics = None if seen is None else make_critics(config, policy, seen)
    updater = OfflineUpdater(config, policy, engine, data, critics, on_step)
    rewards = RewardWorker(config, config.env.tasks)
    return Parts(policy, engine, rollouts, rewards, from_records=updater, recorded=data)


def build_td3_bc(
    session: RunSession, device: torch.device, stopped: Callable[[], bool], closing: ExitStack, on_step: OnStep = None
) -> Parts:
    """Like ``build``, for TD3+BC, which reads the dataset as transitions."""
    config = session.config
    policy = make_policy(session, device)
    data = demo_buffer(config, policy)
    engine, rollouts = _start(session, policy, stopped, closing)
    updater = Td3BcUpdater(config, engine, data, on_step)
    rewards = RewardWorker(config, config.env.tasks)
    stores = ReplayStores(ReplayBuffer(1, 0), data)
    return Parts(policy, engine, rollouts, rewards, from_records=updater, replay=stores)


def _start(
    session: RunSession, policy: VLAPolicy, stopped: Callable[[], bool], closing: ExitStack
) -> tuple[TrainEngine, OfflineBackend]:
    """Start the engine, and what evaluates its policy."""
    config, deployment = session.config, session.deployment
    engine = start_engine(session, session.weights_from, policy, closing)
    acting = make_rollout_engine(config, policy, deployment.threads_of(deployment.of("rollout")[0]))
    log_dir = session.directory / "logs"
    rollouts = OfflineBackend(config, acting, deployment.of("env"), log_dir, also_lost(engine, stopped))
    closing.callback(rollouts.close)
    return engine, rollouts


def make_critics(config: Config, policy: VLAPolicy, seen: ObservationSpec) -> IqlCritics:
    """Return an offline run's critics of these observations."""
    chunk = policy.num_action_chunks * policy.action_dim
    algorithm = config.algorithm
    return IqlCritics(seen, chunk, algorithm.off_policy, config.actor.optim, policy.device, config.runner.seed)
