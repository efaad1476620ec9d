"""PF-PPO: the weights of rows by hand, what is drawn from them, and what an update gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from embodrl.algorithms.advantages import Advantages
from embodrl.algorithms.filtration import drawn_rows, filtered, row_weights
from embodrl.config import load_config
from embodrl.config.schema import AlgorithmConfig
from embodrl.config.schema.algorithm import PfPpoConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.pipelines.nodes import train

ROWS = 6


def algorithm(method: Any, power: float = 2.0) -> AlgorithmConfig:
    return AlgorithmConfig(pf_ppo=PfPpoConfig(method=method, power=power))


def rollout(returns: list[float], played: list[bool] | None = None) -> TrajectoryBatch:
    """Two chunks of one action; the first one has the reward, and one that did not happen has another."""
    size = (2, len(returns), 1)
    rewards = torch.full(size, 100.0)
    rewards[0, :, 0] = torch.tensor(returns)
    valid = torch.zeros(size, dtype=torch.bool)
    valid[0, :, 0] = torch.tensor(played or [True] * len(returns))
    flags = torch.zeros(size, dtype=torch.bool)
    number = torch.arange(len(returns)).expand(2, -1)
    return TrajectoryBatch.from_rollout(
        forward_inputs={"row": number.clone()},
        values=torch.zeros(3, len(returns), 1),
        rewards=rewards,
        logprobs=torch.zeros(*size, 1),
        valid=valid,
        terminated=flags,
        truncated=flags.clone(),
        bootstrap_values=torch.zeros(size),
        success=flags[..., 0].clone(),
        task_id=torch.zeros(size[:2], dtype=torch.int64),
        policy_version=torch.zeros(size[:2], dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("method", "power", "expected"),
    [
        ("pow", 2.0, [0.0, 1.0, 4.0, 9.0]),
        ("pow", 1.0, [0.0, 1.0, 2.0, 3.0]),
        ("max_min", 2.0, [0.0, 0.0, 1.0, 1.0]),
        ("max_random", 2.0, [0.1, 0.1, 0.1, 0.4]),
    ],
)
def test_weights_by_hand(method: Any, power: float, expected: list[float]) -> None:
    weights = row_weights(np.array([0.0, 1.0, -2.0, 3.0]), method, power)
    np.testing.assert_allclose(weights, np.array(expected) + 1e-8, rtol=1e-12)


def test_all_rows_are_as_likely_without_rewards() -> None:
    assert len(set(row_weights(np.zeros(4), "pow", 2.0))) == 1
    counts = np.bincount(np.concatenate([drawn_rows(rollout([0.0] * 4), algorithm("pow"), (n,)) for n in range(50)]))
    assert counts.min() > 25


def test_rows_are_drawn_by_the_rewards_of_what_was_played() -> None:
    config = algorithm("pow")
    found = drawn_rows(rollout([0.0, 5.0, 0.0, 0.0]), config, (3, 1))
    assert found.tolist() == [1, 1, 1, 1]
    found = drawn_rows(rollout([0.0, 5.0, 0.0, 1.0], [True, False, True, True]), config, (3, 1))
    assert found.tolist() == [3, 3, 3, 3]
    assert drawn_rows(rollout([1.0, 2.0], [False, False]), config, (3, 1)).tolist() == [0, 1]
    counts = np.bincount(
        np.concatenate([drawn_rows(rollout([1.0, 2.0]), algorithm("pow", 1.0), (n,)) for n in range(600)])
    )
    assert counts[1] / counts.sum() == pytest.approx(2 / 3, abs=0.05)


def test_seed_and_iteration_alone_determine_the_rows() -> None:
    batch, config = rollout([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), algorithm("max_random")
    found = [drawn_rows(batch, config, seed).tolist() for seed in ((0, 1), (0, 1), (0, 2), (1, 1))]
    assert found[0] == found[1] and len({str(rows) for rows in found}) == 3


def test_whole_rows_move_with_their_advantages() -> None:
    batch = rollout([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    numbers = torch.arange(ROWS).float().expand(2, -1)[..., None]
    taken, advantages = filtered(batch, Advantages(numbers, 10 * numbers, batch.valid), algorithm("max_random"), (0, 1))
    rows = drawn_rows(batch, algorithm("max_random"), (0, 1))
    assert taken.batch_size == batch.batch_size and len(set(rows.tolist())) < ROWS
    assert taken.forward_inputs["row"].tolist() == [rows.tolist()] * 2
    assert advantages.advantages[0, :, 0].tolist() == rows.tolist()
    assert torch.equal(advantages.returns, 10 * advantages.advantages)
    assert taken.rewards[0, :, 0].tolist() == (rows + 1).tolist()


@pytest.mark.parametrize("method", [None, "max_min"])
def test_an_update_trains_on_the_drawn_rows(method: Any) -> None:
    settings = ["env=toy", "model=mlp", "runner.seed=4", *([f"algorithm.pf_ppo.method={method}"] if method else [])]
    given: list[Any] = []
    updates = SimpleNamespace(update=lambda *args: given.extend(args) or {})
    context: Any = SimpleNamespace(
        config=load_config(settings).config, iteration=3, updates=updates, imitated=None, shuffle=None
    )
    batch = rollout([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    numbers = torch.arange(ROWS).float().expand(2, -1)[..., None]
    train(context, batch, Advantages(numbers, numbers, batch.valid))
    rows = given[0].forward_inputs["row"][0].tolist()
    assert given[1].advantages[0, :, 0].tolist() == rows
    assert rows == drawn_rows(batch, algorithm(method), (4, 3)).tolist()
    assert (set(rows) <= {0, ROWS - 1}) == (method is not None)
