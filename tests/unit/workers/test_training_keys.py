"""No key of the optimizer, the training environments or the rewards is accepted and then ignored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from test_algorithm_keys import Change, HalfExpert, recorded_batch, settings_of
from test_rewards import judged_batch
from test_rollout import config_of, worker_of
from torch import Tensor
from toy_policy import ToyPolicy
from updates import update

from embodrl.algorithms.advantages import compute_advantages
from embodrl.config import load_config
from embodrl.config.check import schema_keys
from embodrl.config.schema import ActorConfig, AlgorithmConfig, EnvTrainConfig, OptimConfig, RewardConfig
from embodrl.errors import RewardError
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.workers.episode import Episode
from embodrl.workers.reward import RewardWorker

OPTIM = {
    "lr": Change(3e-3),
    "value_lr": Change(3e-2),
    "betas": Change((0.5, 0.95)),
    "eps": Change(1e-2),
    "weight_decay": Change(0.5),
    "clip_grad": Change(1e-3),
    "lr_scheduler": Change("cosine"),
    "lr_warmup_iterations": Change(2),
    "schedule_iterations": Change(30),
    "min_lr_ratio": Change(0.9),
    "critic_warmup_iterations": Change(1),
    "master_weights": Change(False, {"master_weights": "auto"}),
    "fn": Change("torch.optim:SGD"),
    "arguments": Change({"momentum": 0.9}, {"fn": "torch.optim:SGD"}),
}
ENVIRONMENTS = {
    "total_num_envs": Change(4),
    "max_steps_per_rollout_epoch": Change(20),
    "auto_reset": Change(True),
    "ignore_terminations": Change(True),
    "use_fixed_reset_state_ids": Change(True),
    "seed": Change(1),
    "failed_seed_fraction": Change(1.0),
    "failed_seed_memory": Change(1, {"failed_seed_fraction": 1.0}),
}
TESTED_ELSEWHERE = ("model", "judge", "start_from_demos", "curriculum", "task_curriculum")
FLAKY = {"fn": "test_training_keys:fails_twice"}
REWARDS = {
    "fn": Change("test_training_keys:always_one"),
    "timeout_s": Change(0.01, {"fn": "test_training_keys:slow", "retries": 0}),
    "retries": Change(0, FLAKY),
    "max_concurrency": Change(1, {"fn": "test_training_keys:those_at_once"}),
    "on_error": Change("raise", FLAKY | {"retries": 0}),
}
calls: dict[int, int] = {}
alive: list[Episode] = []  # so that no two episodes have the same id
RUNNING, MOST = -1, -2  # keys of ``calls``, beside the ids of episodes


def trained(changes: dict[str, Any]) -> Tensor:
    """Return all weights after three updates of a run of four."""
    algorithm = AlgorithmConfig.model_validate({"sampling": {"temperature": 1.0}})
    quick = {"critic_warmup_iterations": 0, "lr_warmup_iterations": 0, "lr": 1e-2}
    optim = OptimConfig.model_validate(quick | changes)
    half = "master_weights" in changes  # which is about weights in half precision
    precision = "bf16" if half else "fp32"
    config = ActorConfig(global_batch_size=10, micro_batch_size=5, precision=precision, optim=optim)
    policy = ToyPolicy().to(torch.bfloat16 if half else torch.float32)
    engine = NativeTrainEngine(policy, EngineOptions(config, 4), "cpu")
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        batch = recorded_batch()
        update(engine, batch, compute_advantages(batch, algorithm), algorithm, generator)
    return torch.cat([tensor.flatten() for _, tensor in engine.weights()])


def gathered(changes: dict[str, Any]) -> Tensor:
    """Return what was earned in two rollouts."""
    settings = {"total_num_envs": 8, "auto_reset": False, "max_steps_per_rollout_epoch": 40} | changes
    arguments = [f"env.train.{key}={str(value).lower()}" for key, value in settings.items()]
    config = config_of("env.max_episode_steps=40", *arguments)
    policy = HalfExpert()
    policy.SOLVES = policy.SOLVES[: config.env.train.total_num_envs]
    worker, policy.pool = worker_of(config, policy)
    return torch.cat([worker.gather(iteration)[0].rewards.flatten() for iteration in range(2)])


def always_one(episode: Episode) -> float:
    return 1.0


async def slow(episode: Episode) -> float:
    await asyncio.sleep(0.2 if episode.success else 0)
    return 1.0


def fails_twice(episode: Episode) -> float:
    key = id(episode)
    alive.append(episode)
    calls[key] = calls.get(key, 0) + 1
    if episode.success and calls[key] <= 2:
        raise RuntimeError("no network")
    return 1.0


async def those_at_once(episode: Episode) -> float:
    """Whether another call has ever run beside one; each waits for that for a while."""
    calls[RUNNING] = calls.get(RUNNING, 0) + 1
    calls[MOST] = max(calls.get(MOST, 0), calls[RUNNING])
    try:
        for _ in range(50):
            if calls[MOST] > 1:
                break
            await asyncio.sleep(0.01)
        return float(calls[MOST] > 1)
    finally:
        calls[RUNNING] -= 1


def judged(changes: dict[str, Any]) -> Tensor:
    """Return the rewards of a rollout and what of it is valid; one -1 if the run stops."""
    calls.clear()
    alive.clear()
    config = load_config(["env=toy"]).config
    rewards = RewardConfig.model_validate(settings_of(changes))
    batch = judged_batch(0)
    try:
        RewardWorker(config.model_copy(update={"reward": rewards}), ("reach-red",)).apply(batch)
    except RewardError:
        return torch.tensor([-1.0])
    return torch.cat([batch.rewards.flatten(), batch.valid.flatten().float()])


KINDS = {
    "actor.optim": (OPTIM, trained, OptimConfig),
    "env.train": (ENVIRONMENTS, gathered, EnvTrainConfig),
    "reward": (REWARDS, judged, RewardConfig),
}


@pytest.mark.parametrize("section", KINDS)
def test_every_key_has_a_case(section: str) -> None:
    changes, _, schema = KINDS[section]
    found = {key for key in schema_keys(schema) if key.partition(".")[0] not in TESTED_ELSEWHERE}
    assert found == set(changes)


@pytest.mark.parametrize(("section", "key"), [(section, key) for section, kind in KINDS.items() for key in kind[0]])
def test_changing_a_key_changes_what_comes_out(section: str, key: str) -> None:
    changes, outcome, _ = KINDS[section]
    change = changes[key]
    before, again = outcome(change.beside), outcome(change.beside)
    assert torch.equal(before, again), "the comparison itself is exact"
    after = outcome(change.beside | {key: change.to})
    assert before.shape != after.shape or not torch.equal(before, after)
    assert after.isfinite().all()
