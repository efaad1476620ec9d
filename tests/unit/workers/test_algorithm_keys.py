"""No key of the algorithm is accepted and then ignored: changing it changes weights, a rollout or its rewards."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rewards import judged_batch
from test_rollout import KnownPolicy, config_of, worker_of
from torch import Tensor
from toy_policy import ToyPolicy, toy_rollout
from updates import proximal, reference_logprobs, update

from embodrl.algorithms.advantages import compute_advantages
from embodrl.algorithms.decoupled import set_proximal
from embodrl.config import load_config
from embodrl.config.check import schema_keys
from embodrl.config.schema import ActorConfig, AlgorithmConfig, OptimConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.workers.dynamic_sampling import sample_mixed_groups
from embodrl.workers.reward import RewardWorker


@dataclass
class Change:
    """A key, the value it is changed to, and what else must be set for it to matter."""

    to: Any
    beside: dict[str, Any] = field(default_factory=dict)


KL, SRPO = {"kl.coef": 0.5}, {"srpo.enabled": True}
MIXED = {"filter.enabled": True, "group_size": 2}
DECOUPLED = {"decoupled.enabled": True}
TRAINING = {
    "adv_type": Change("reinforce_pp"),
    "loss_type": Change("actor"),
    "reward_type": Change("action_level", {"adv_type": "reinforce_pp", "loss_type": "actor"}),
    "logprob_type": Change("chunk_level"),
    "length_normalized_ratio": Change(True, {"logprob_type": "chunk_level"}),
    "entropy_type": Change("action_level", {"entropy_bonus": 0.1}),
    "gamma": Change(0.5),
    "gae_lambda": Change(0.5),
    "critic_lambda": Change(0.2),
    "lambda_length_alpha": Change(0.7),
    "positive_coef": Change(0.5),
    "normalize_advantages": Change(False),
    "normalization_scope": Change("group"),
    "min_group_std": Change(10.0, {"normalization_scope": "group"}),
    "bootstrap_type": Change("none"),
    "surrogate": Change("log_ratio"),
    "clip_ratio_low": Change(0.1),
    "clip_ratio_high": Change(0.1),
    "clip_ratio_dual": Change(1.5),
    "drift_coef": Change(0.5),
    "kl.coef": Change(0.5),
    "kl.estimator": Change("k2", KL),
    "kl.placement": Change("reward", KL),
    "value_clip": Change(None),
    "value_loss_coef": Change(0.1),
    "huber_delta": Change(0.1),
    "entropy_bonus": Change(0.1),
    "loss_agg": Change("episode_mean"),
    "update_epoch": Change(3),
    "target_kl": Change(1e-9),
    "chunk_fraction": Change(0.5),
    "decoupled.enabled": Change(True),
    "decoupled.prox": Change("loglinear", DECOUPLED),
    "decoupled.cap": Change(1.2, DECOUPLED),
    "decoupled.min_weight": Change(0.99, DECOUPLED),
    "decoupled.on_exceed": Change("clamp", DECOUPLED | {"decoupled.cap": 1.2}),
    "decoupled.level": Change("chunk", DECOUPLED),
    "rejection.metric": Change("ratio", DECOUPLED | {"rejection.upper": 1.01}),
    "rejection.level": Change("chunk", DECOUPLED | {"rejection.metric": "ratio", "rejection.upper": 1.01}),
    "rejection.lower": Change(0.99, DECOUPLED | {"rejection.metric": "ratio"}),
    "rejection.upper": Change(1.01, DECOUPLED | {"rejection.metric": "ratio"}),
    "recompute_logprobs": Change(True),
    "engine_weight_cap": Change(1.2, {"recompute_logprobs": True}),
    "sampling.temperature": Change(0.7),
    "sampling.top_k": Change(3),
}
ROLLING_OUT = {
    "group_size": Change(2),
    "rollout_epoch": Change(2),
    "bootstrap_type": Change("truncation"),
    "filter.enabled": Change(True, {"group_size": 2}),
    "filter.min_rate": Change(0.4, MIXED | {"group_size": 4}),
    "filter.max_rate": Change(0.6, MIXED | {"group_size": 4}),
    "filter.max_resamples": Change(0, MIXED),
}
REWARDING = {
    "srpo.enabled": Change(True),
    "srpo.encoder": Change("test_algorithm_keys:mean_colour", SRPO),
    "srpo.encoder_path": Change("{tmp}/b", SRPO | {"srpo.encoder": "vjepa2", "srpo.encoder_path": "{tmp}/a"}),
    "srpo.num_frames": Change(2, SRPO),
    "srpo.failure_scale": Change(0.3, SRPO),
    "srpo.steepness": Change(1.0, SRPO),
    "srpo.cluster_eps": Change(50.0, SRPO | {"srpo.cluster_min_samples": 1}),
    "srpo.cluster_min_samples": Change(1, SRPO),
    "srpo.memory": Change(0, SRPO),
}


def test_every_key_has_a_case() -> None:
    keys = schema_keys(AlgorithmConfig)
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    # Tests of their engines, branching (test_branch.py), teachers (test_teacher.py), critics (test_own_critic.py),
    # PF-PPO (test_filtration.py), single tasks (test_by_task.py) and routers (test_objective.py).
    elsewhere = ("teacher", "critic.", "off_policy.", "offline.", "bc_coef", "dagger.", "nft.", "rlt.", "branch.")
    elsewhere += ("pf_ppo.", "by_task.", "router_aux_loss_coef")
    leaves = {key for key in leaves if not key.startswith(elsewhere)}
    assert leaves == {*TRAINING, *ROLLING_OUT, *REWARDING}


def settings_of(changes: dict[str, Any]) -> dict[str, Any]:
    """Return nested settings of dotted ones."""
    result: dict[str, Any] = {}
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (result.setdefault(section, {}) if section else result)[name] = value
    return result


def recorded_batch() -> TrajectoryBatch:
    """A rollout by a policy that is not quite the present one, with a truncation and groups of two."""
    batch = toy_rollout(ToyPolicy())
    generator = torch.Generator().manual_seed(7)
    batch.logprobs += 0.5 * torch.randn(batch.logprobs.shape, generator=generator)
    batch.truncated[2, 2, -1] = True
    batch.bootstrap_values[2, 2] = 5.0
    groups = torch.tensor([0, 0, 1, 1]).expand(5, 4)
    return batch.replace(group_id=groups, success=torch.tensor([True, True, False, False]).repeat(5, 1))


def trained(changes: dict[str, Any]) -> Tensor:
    """Return all weights after two updates."""
    algorithm = AlgorithmConfig.model_validate(settings_of({"sampling.temperature": 1.0} | changes))
    optim = OptimConfig(critic_warmup_iterations=0, lr_warmup_iterations=0, lr=1e-2)
    config = ActorConfig(global_batch_size=10, micro_batch_size=5, precision="fp32", optim=optim)
    engine = NativeTrainEngine(ToyPolicy(), EngineOptions(config, 10, algorithm.kl.coef > 0), "cpu")
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        batch = recorded_batch()
        if engine.state.reference is not None:
            batch.ref_logprobs = reference_logprobs(engine, batch, algorithm)
        all_of_them = algorithm.recompute_logprobs is True
        if algorithm.decoupled.needs_proximal or all_of_them:  # of version 0, and in the second update stale
            set_proximal(batch, *proximal(engine, batch, algorithm, all_of_them))
        update(engine, batch, compute_advantages(batch, algorithm), algorithm, generator)
    return torch.cat([tensor.flatten() for _, tensor in engine.weights()])


class HalfExpert(KnownPolicy):
    """The experts' actions in some environments; the others stand still."""

    pool: Any = None
    SOLVES = (1, 1, 1, 0, 0, 0, 1, 0)

    def act(self, observation: Any, compute_values: bool, generators: Any = None) -> Any:
        output = super().act(observation, compute_values)
        (simulator,) = self.pool.envs
        expert = simulator.expert_actions()[:, None]
        chosen = expert * torch.tensor(self.SOLVES).view(-1, 1, 1).numpy() * 0.5
        output.actions[:] = chosen[simulator.going]
        return output


def gathered(changes: dict[str, Any]) -> Tensor:
    """Return what was earned, and the values that it is bootstrapped with."""
    config = config_of(
        "env.train.total_num_envs=8",
        "env.train.auto_reset=false",
        "env.max_episode_steps=40",
        "env.train.max_steps_per_rollout_epoch=40",
        "algorithm.filter.max_resamples=1",
        *(f"algorithm.{key}={str(value).lower()}" for key, value in changes.items()),
    )
    policy = HalfExpert()
    worker, policy.pool = worker_of(config, policy)
    batch, _ = worker.gather(0)
    if config.algorithm.filter.enabled:
        batch, _ = sample_mixed_groups(worker, batch, 0)
    return torch.cat([batch.rewards.flatten(), batch.bootstrap_values.flatten()])


def mean_colour(frames: Tensor) -> Tensor:
    """An encoder from outside the package: ``[E,3]``."""
    return frames.float().mean((1, 2, 3))


def judged(changes: dict[str, Any]) -> Tensor:
    """Return the rewards of a rollout with successes, and of one without."""
    algorithm = AlgorithmConfig.model_validate(settings_of(changes))
    config = load_config(["env=toy"]).config.model_copy(update={"algorithm": algorithm})
    worker = RewardWorker(config, ("reach-red",))
    batches = [judged_batch(0), judged_batch(1)]
    assert batches[1].success is not None
    batches[1].success[:] = False
    for batch in batches:
        worker.apply(batch)
    return torch.cat([batch.rewards.flatten() for batch in batches])


def write_encoders(directory: Path) -> None:
    from transformers import VJEPA2Config, VJEPA2Model

    size = {"crop_size": 16, "patch_size": 8, "hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    predictor = {"pred_hidden_size": 12, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        VJEPA2Model(VJEPA2Config(**size, **predictor, num_pooler_layers=1)).save_pretrained(directory / name)


KINDS = {"training": (TRAINING, trained), "rollout": (ROLLING_OUT, gathered), "rewards": (REWARDING, judged)}


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, (changes, _) in KINDS.items() for key in changes], ids=lambda x: x
)
def test_changing_a_key_changes_what_comes_out(kind: str, key: str, tmp_path: Path) -> None:
    changes, outcome = KINDS[kind]
    change = copy.deepcopy(changes[key])
    if key == "srpo.encoder_path":
        write_encoders(tmp_path)
        change.beside["srpo.encoder_path"] = str(tmp_path / "a")
        change.to = str(tmp_path / "b")
    before, again = outcome(change.beside), outcome(change.beside)
    assert torch.equal(before, again), "the comparison itself is exact"
    after = outcome(change.beside | {key: change.to})
    assert before.shape != after.shape or not torch.equal(before, after)
    assert after.isfinite().all()
