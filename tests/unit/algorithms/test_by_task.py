"""Advantages of the tasks of a run by estimators of their own, against hand-computed numbers and runs of one task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expect import raises_code
from test_groups import GROUP_SIZE, batch_of, random_rollout
from torch import Tensor

from embodrl.algorithms.advantages import Advantages, compute_advantages, estimate
from embodrl.algorithms.by_task import advantages_by_task
from embodrl.config.schema import AlgorithmConfig, KlConfig, TaskAlgorithmConfig
from embodrl.data.trajectory import TrajectoryBatch

TASKS = ("red", "green")


def settings(by_task: list[dict[str, Any]], **changes: Any) -> AlgorithmConfig:
    own = tuple(TaskAlgorithmConfig(**each) for each in by_task)
    return AlgorithmConfig(by_task=own, loss_type="actor", group_size=2, **changes)


def batch_with(rewards: Tensor, task: Tensor, ended: Tensor) -> TrajectoryBatch:
    """Return a batch of one action to a chunk, from ``[T,B]`` each; groups are pairs of environments."""
    steps, envs = rewards.shape
    zeros = torch.zeros(steps, envs, 1, dtype=torch.bool)
    return TrajectoryBatch.from_rollout(
        forward_inputs={},
        logprobs=torch.zeros(steps, envs, 1, 1),
        values=torch.zeros(steps + 1, envs, 1),
        bootstrap_values=torch.zeros(steps, envs, 1),
        policy_version=torch.zeros(steps, envs, dtype=torch.int64),
        task_id=task,
        group_id=(torch.arange(envs) // 2).expand(steps, envs),
        rewards=rewards.unsqueeze(-1),
        valid=~zeros,
        terminated=ended.unsqueeze(-1),
        truncated=zeros,
    )


def test_each_task_has_its_estimator_and_weight() -> None:
    ended = torch.ones(1, 4, dtype=torch.bool)
    batch = batch_with(torch.tensor([[1.0, 10.0, 3.0, 20.0]]), torch.tensor([[0, 1, 0, 1]]), ended)
    batch.group_id = batch.task_id
    own = [{"task": "green", "adv_type": "rloo", "weight": 0.5}]
    found, metrics = advantages_by_task(batch, settings(own, adv_type="grpo", normalize_advantages=False), TASKS)
    # GRPO: R - mean = -1, 1; RLOO: R - the other = -10, 10, times the weight.
    assert found.advantages.flatten().tolist() == [-1, -5, 1, 5]
    assert found.returns.flatten().tolist() == [1, 10, 3, 20] and bool(found.valid.all())
    assert metrics == {
        "advantage/red/chunks": 2,
        "advantage/red/mean_return": 2,
        "advantage/red/std": 1,
        "advantage/green/chunks": 2,
        "advantage/green/mean_return": 15,
        "advantage/green/std": 5,
    }
    normal, _ = advantages_by_task(batch, settings(own, adv_type="grpo"), TASKS)
    assert normal.advantages.flatten().tolist() == [-1, -0.5, 1, 0.5], "each task is normalised by itself"


def test_an_environment_may_play_one_task_after_the_other() -> None:
    task = torch.tensor([[0, 1], [0, 1], [1, 1], [1, 1]])
    ended = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]], dtype=torch.bool)
    rewards = torch.tensor([[1.0, 0], [2, 0], [4, 0], [8, 4]])
    batch = batch_with(rewards, task, ended)
    own = [{"task": "red", "gamma": 0.5}]
    changes = {"adv_type": "reinforce_pp", "normalize_advantages": False, "gamma": 1.0}
    found, metrics = advantages_by_task(batch, settings(own, **changes), TASKS)
    assert found.advantages[..., 0].T.tolist() == [[2, 2, 12, 8], [4, 4, 4, 4]]
    assert [metrics[f"advantage/{name}/chunks"] for name in TASKS] == [2, 6]


def two_tasks(seed: int) -> TrajectoryBatch:
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of(random_rollout(seed, num_groups=4))
    assert batch.group_id is not None
    batch.task_id = batch.group_id % 2
    batch.values = torch.randn(len(batch.rewards) + 1, len(batch), 1, generator=generator)
    batch.logprobs = torch.randn(batch.logprobs.shape, generator=generator)
    batch.ref_logprobs = torch.zeros_like(batch.logprobs)
    return batch


@pytest.mark.parametrize(
    ("adv_type", "own"),
    [
        ("gae", {"gamma": 0.5, "gae_lambda": 0.3}),
        ("grpo", {"adv_type": "rloo"}),
        ("reinforce_pp", {"adv_type": "grpo", "gamma": 0.8}),
    ],
)
@pytest.mark.parametrize("scope", ["batch", "group"])
def test_a_task_has_the_advantages_of_a_run_without_others(adv_type: str, own: dict[str, Any], scope: str) -> None:
    batch = two_tasks(3)
    kl = KlConfig(coef=0.1, placement="reward")
    general = AlgorithmConfig(adv_type=adv_type, normalization_scope=scope, kl=kl)  # pyright: ignore[reportArgumentType]
    config = general.model_copy(update={"by_task": (TaskAlgorithmConfig(task="green", **own),)})
    found, _ = advantages_by_task(batch, config, TASKS)
    for number, alone in enumerate((general, general.model_copy(update=own))):
        rows = (batch.task_id[0] == number).nonzero().squeeze(-1)
        assert len(rows) == 2 * GROUP_SIZE
        expected = compute_advantages(batch[rows], alone)
        for name, column in vars(expected).items():
            assert torch.equal(getattr(found, name)[:, rows], column), name


def test_the_kl_in_the_rewards_is_a_tasks_own() -> None:
    batch = two_tasks(6)
    kl = KlConfig(coef=0.1, placement="reward")
    general = AlgorithmConfig(adv_type="grpo", kl=kl)
    config = general.model_copy(update={"by_task": (TaskAlgorithmConfig(task="green", kl_weight=0.5),)})
    found, _ = advantages_by_task(batch, config, TASKS)
    for number, coef in enumerate((0.1, 0.05)):
        rows = (batch.task_id[0] == number).nonzero().squeeze(-1)
        alone = general.model_copy(update={"kl": kl.model_copy(update={"coef": coef})})
        assert torch.allclose(found.advantages[:, rows], compute_advantages(batch[rows], alone).advantages, atol=1e-5)


def test_without_the_setting_nothing_changes() -> None:
    batch = two_tasks(4)
    found, metrics = advantages_by_task(batch, AlgorithmConfig(), TASKS)
    expected = compute_advantages(batch, AlgorithmConfig())
    assert metrics == {} and all(torch.equal(getattr(found, name), each) for name, each in vars(expected).items())


def test_tasks_that_are_not_played_have_no_numbers() -> None:
    batch = two_tasks(5)
    batch.task_id = torch.zeros_like(batch.task_id)
    config = settings([{"task": "green", "weight": 2.0}], adv_type="grpo")
    found, metrics = advantages_by_task(batch, config, TASKS)
    assert torch.equal(found.advantages, estimate(batch, config).advantages)
    assert metrics["advantage/green/chunks"] == 0 and metrics["advantage/green/std"] is None
    empty, _ = advantages_by_task(batch[:0], config, TASKS)
    assert empty.advantages.shape == (len(batch.rewards), 0, 1)
    batch.task_id[0, 0] = 2
    with raises_code("task-unknown"):
        advantages_by_task(batch, config, TASKS)


def by_action(rewards: Tensor, valid: Tensor) -> Advantages:
    return Advantages(rewards, rewards, valid)


def test_estimators_agree_on_the_number_of_values() -> None:
    config = settings([{"task": "green", "adv_type": "test_by_task:by_action"}], adv_type="grpo")
    with raises_code("advantage-result"):
        advantages_by_task(two_tasks(6), config, TASKS)
