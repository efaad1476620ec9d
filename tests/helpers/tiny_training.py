"""Updates of tiny policies of every family, for engines to be compared on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tiny_families import observation, tiny_sizes
from torch import Tensor
from updates import on_policy

from embodrl.algorithms.advantages import compute_advantages
from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import Deployment, solve
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.models.base import VLAPolicy
from embodrl.types import SamplingParams

NUM_STEPS, NUM_ENVS = 3, 5


def deployment_of(config: Config, actors: int = 1) -> Deployment:
    """Return where a run on the CPU of this machine is, with so many training processes."""
    places = {"actor": f"0:0-{actors - 1}", "rollout,env": "0"}
    cluster = config.cluster.model_copy(update={"component_placement": places, "device": "cpu"})
    return solve(config.model_copy(update={"cluster": cluster})).deployment


def training_config(family: str = "openvla", method: str | None = None, **changes: Any) -> Config:
    """Return a run on the toy environment at the smallest size, in float32; ``changes`` are sections."""
    model: dict[str, Any] = {
        "model_type": family,
        "warm_start": None,
        "num_action_chunks": 2,
        **tiny_sizes(family),
        "value_head": {"hidden_sizes": (16,)},
    }
    if method is not None:
        model["flow"] = {"method": method, "num_steps": 3}
    optim = {"critic_warmup_iterations": 1, "lr_warmup_iterations": 0, "lr": 1e-3, "weight_decay": 0.01}
    actor = {"global_batch_size": 8, "micro_batch_size": 2, "precision": "fp32", "optim": optim}
    sections: dict[str, Any] = {
        "model": model | changes.pop("model", {}),
        "actor": actor | changes.pop("actor", {}),
        "algorithm": {"update_epoch": 2, "entropy_bonus": 0.01} | changes.pop("algorithm", {}),
        "cluster": {"device": "cpu", "num_threads": 1} | changes.pop("cluster", {}),
        "runner": {"max_iterations": 4, **changes.pop("runner", {})},
    }
    return Config.model_validate(sections | changes)


@torch.no_grad()
def tiny_rollout(family: str, policy: VLAPolicy, config: Config, seed: int) -> TrajectoryBatch:
    """Return a rollout of random pictures; some chunks and actions are not valid, so that shares are uneven."""
    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingParams(config.algorithm.sampling.temperature, config.algorithm.sampling.top_k)
    rows = observation(family, NUM_STEPS * NUM_ENVS, seed)
    output = policy.predict_action_batch(rows, "train", sampling, generator)
    assert output.values is not None
    shape = (NUM_STEPS, NUM_ENVS)
    logprobs = output.logprobs.view(*shape, *output.logprobs.shape[1:])
    values = output.values.view(*shape, -1).float()
    valid = torch.ones(*shape, policy.num_action_chunks, dtype=torch.bool)
    valid[1:, 0] = False
    valid[2, 1, 1] = False
    terminated = torch.zeros_like(valid)
    terminated[0, 0, -1] = terminated[2, 1, 0] = True
    return TrajectoryBatch.from_rollout(
        forward_inputs={name: t.view(*shape, *t.shape[1:]) for name, t in output.forward_inputs.items()},
        logprobs=logprobs,
        values=torch.cat([values, values[-1:]]),
        rewards=torch.randn(valid.shape, generator=generator) * valid,
        valid=valid,
        terminated=terminated,
        truncated=torch.zeros_like(valid),
        bootstrap_values=torch.zeros_like(values),
        policy_version=torch.zeros(shape, dtype=torch.int64),
        task_id=torch.zeros(shape, dtype=torch.int64),
    )


def train(
    engine: TrainEngine, family: str, policy: VLAPolicy, config: Config, seeds: range = range(2)
) -> list[dict[str, float]]:
    """Return the metrics of an update for each seed; rollouts are by ``policy``, whose weights are the engine's."""
    found: list[dict[str, float]] = []
    for seed in seeds:
        batch = tiny_rollout(family, policy, config, seed)
        batch["policy_version"].fill_(engine.version)
        if config.algorithm.kl.coef > 0:
            batch.ref_logprobs = on_policy(engine, config).reference_logprobs(batch)
        advantages = compute_advantages(batch, config.algorithm)
        generator = torch.Generator().manual_seed(seed)
        found.append(on_policy(engine, config).update(batch, advantages, generator))
    return found


def largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference between tensors of the same names."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a if a[name].numel())
