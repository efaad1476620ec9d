"""The composition root of verbs that only act: a policy on its device, and its simulators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.deployment import Deployment, ProcessPlace
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.rollout.native import make_rollout_engine, policy_memory
from embodrl.models.base import Decoding, VLAPolicy
from embodrl.workers.collector import Share, share_config
from embodrl.workers.env import check_environments, check_simulator, make_pool, make_single_pool
from embodrl.workers.policy import (
    RecordedPolicy,
    build_policy,
    check_memory,
    configure_torch,
    in_memory,
    num_threads,
    weights_fingerprint,
)


def prepare_acting(
    config: Config, deployment: Deployment, decoding: Decoding | Literal["all"] = "all", simulates: bool = True
) -> None:
    """Set up torch for acting in this process, and reject what cannot work before anything starts.

    ``decoding`` is the verb's, ``all`` for all of the policy's; ``simulates``: the simulators are started, too.

    Raises:
        EmbodrlError: the device has too little memory for the weights, or the simulator cannot run.
    """
    device = configure_torch(config, deployment.of("rollout")[0])
    check_memory(config, deployment, training=False, device=device, decoding=decoding)
    if simulates:
        check_simulator(config)


def make_acting(config: Config, policy: VLAPolicy | None = None, weights_dir: Path | None = None) -> RolloutEngine:
    """Return the engine of a policy that has this machine to itself; None builds the configured policy.

    ``weights_dir`` is where policy servers (``rollout.backend=remote``) find newer weights.
    """
    acting = build_policy(config) if policy is None else policy
    return make_rollout_engine(config, acting, num_threads(config), weights_dir=weights_dir)


def acting_policy(
    loaded: LoadedConfig, name: str, make_policy: Callable[[Config], VLAPolicy] = build_policy
) -> RecordedPolicy:
    """Build the policy of a collection from its configuration; ``name`` is its path or address.

    It stays in main memory if the rollout processes act with copies of it.

    ``make_policy`` defaults to the factory that ``config.model`` names.

    Raises:
        EmbodrlError: the device has too little memory for the weights, or the policy cannot be built.
    """
    config = loaded.config
    prepare_acting(config, loaded.deployment, simulates=False)
    policy = make_policy(in_memory(config) if loaded.deployment.rolls_out_in_processes else config)
    return RecordedPolicy(name, policy, weights_fingerprint(policy))


def make_share(
    config: Config,
    deployment: Deployment,
    share: Share,
    log_dir: Path | None,
    places: Sequence[ProcessPlace],
    training: bool = True,
) -> tuple[EnvPool, RolloutEngine]:
    """Start the simulators of a process while its policy is built; return the simulators and the engine.

    ``training`` is False for a process that only evaluates.

    Raises:
        EnvError: a simulator could not be started or lacks what the run relies on; the others have been stopped.
    """
    threads = deployment.threads_of(deployment.of("rollout")[share.rank])
    configure_torch(config, threads=threads)
    mine = share_config(config, share)
    pool = make_pool(mine if training else mine.evaluated, mine.env.train.total_num_envs, log_dir, places=places)
    checked = config if training else config.evaluated
    policy = _built_meanwhile(config, pool, lambda: check_environments(checked, pool, training))
    if not training:
        return pool, make_rollout_engine(mine, policy, threads)
    memory = policy_memory(policy) if config.rollout.enable_offload else None
    return pool, make_rollout_engine(mine, policy, threads, (share.rank, share.count), memory)


def make_recording_share(
    config: Config, deployment: Deployment, share: Share, log_dir: Path | None, places: Sequence[ProcessPlace]
) -> tuple[EnvPool, RolloutEngine]:
    """Start simulators for single actions while the policy is built; ``config`` is the share's. See ``make_share``."""
    threads = deployment.threads_of(deployment.of("rollout")[share.rank])
    configure_torch(config, threads=threads)
    pool = make_single_pool(config, config.env.train.total_num_envs, places, log_dir)
    return pool, make_rollout_engine(config, _built_meanwhile(config, pool), threads, (share.rank, share.count))


def _built_meanwhile(config: Config, pool: EnvPool, check: Callable[[], None] = lambda: None) -> VLAPolicy:
    """Start a pool, build the policy meanwhile, and check the pool; return the policy."""
    pool.start_async()
    try:
        policy = build_policy(config)
        pool.wait_started()
        check()
    except BaseException:  # also after a signal, which is re-raised: no simulator may be left running
        pool.close()
        raise
    return policy
