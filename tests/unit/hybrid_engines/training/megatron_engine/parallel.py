"""Engines of megatron-core for a process of a group, and what is in them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tiny_training import train, training_config
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from embodrl.config.schema import Config
from embodrl.hybrid_engines.base import EngineState, TrainEngine
from embodrl.hybrid_engines.training.megatron.core import start
from embodrl.hybrid_engines.training.megatron.engine import MegatronTrainEngine
from embodrl.hybrid_engines.training.megatron.policy import ParallelOpenVLAPolicy
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.sharding import DP, TP
from embodrl.models.openvla.policy import OpenVLAPolicy
from embodrl.workers.policy import build_policy

ALGORITHM = {"update_epoch": 2, "entropy_bonus": 0.01, "kl": {"coef": 0.1}}


def config_of(**actor: Any) -> Config:
    """Return a run with a reference policy."""
    return training_config(actor=actor, algorithm=ALGORITHM)


def whole_policy(config: Config) -> OpenVLAPolicy:
    """Return the policy in one piece, of the same weights every time."""
    policy = build_policy(config)
    assert isinstance(policy, OpenVLAPolicy)
    return policy


def megatron_engine(config: Config, size: int, distributed_optimizer: bool = False) -> MegatronTrainEngine:
    """Return this process's engine, in groups of ``size`` that share layers."""
    start(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=(DP, TP))
    return MegatronTrainEngine(
        whole_policy(config),
        config.model,
        EngineOptions.of(config),
        mesh,
        distributed_optimizer=distributed_optimizer,
    )


def native_engine(config: Config) -> NativeTrainEngine:
    """Return the engine in one process."""
    policy = whole_policy(config)
    return NativeTrainEngine(policy, EngineOptions(config.actor, config.runner.max_iterations, True), "cpu")


def parallel_policy(engine: MegatronTrainEngine) -> ParallelOpenVLAPolicy:
    policy = engine.policy
    assert isinstance(policy, ParallelOpenVLAPolicy)
    return policy


def updates(engine: TrainEngine, config: Config, seeds: range) -> list[dict[str, float]]:
    """Return the metrics of an update for each seed, of rollouts by the engine's weights."""
    acting, metrics = whole_policy(config), []
    for seed in seeds:
        acting.load_state_dict(dict(engine.weights()))
        metrics += train(engine, "openvla", acting, config, range(seed, seed + 1))
    return metrics


def copied(engine: TrainEngine) -> EngineState:
    """Return a copy of the state."""
    state = engine.state_dict()
    tensors = {section: {name: t.clone() for name, t in parts.items()} for section, parts in state.tensors.items()}
    return EngineState(tensors, dict(state.state))


def different_copies(engine: MegatronTrainEngine) -> list[str]:
    """Return the parameters that should be the same in all processes of the tensor group and are not."""
    group = engine.state.tensor_mesh.get_group()
    differ: list[str] = []
    for name, parameter in engine.policy.named_parameters():
        if engine.state.pieces[name][0].dim is None:
            parts: list[Tensor] = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(parts, parameter.detach(), group=group)
            differ += [name] if any(not torch.equal(part, parts[0]) for part in parts) else []
    return differ
