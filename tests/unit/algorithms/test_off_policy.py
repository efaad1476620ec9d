"""The equations of SAC and RLPD, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from embodrl.algorithms.advantages import no_advantages
from embodrl.algorithms.off_policy import (
    chunk_return,
    critic_loss,
    n_step_return,
    sac,
    soft_target,
    soft_update,
    temperature_loss,
)
from embodrl.errors import EmbodrlError


def close(found: torch.Tensor, wanted: list) -> None:
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_a_chunk_is_worth_the_rewards_of_the_actions_that_were_run() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    per_action, lengths = chunk_return(rewards, valid, 0.5, True)
    close(per_action, [1 + 1 + 1.0, 2.0])
    assert lengths.tolist() == [3, 2]
    per_chunk, lengths = chunk_return(rewards, valid, 0.5, False)
    close(per_chunk, [7.0, 3.0])
    assert lengths.tolist() == [1, 1]


def test_n_steps_stop_at_terminations_and_at_the_last_observation() -> None:
    """gamma 0.5, two discounts a chunk: 1, then 1/4, then 1/16, and the bootstrap after three of them 1/64."""
    rewards = torch.tensor([[1.0, 2.0, 4.0]]).repeat(4, 1)
    lengths = torch.full((4, 3), 2)
    terminated = torch.tensor([[False] * 3, [False, True, False], [False] * 3, [True, False, False]])
    acted = torch.tensor([[True] * 3, [True] * 3, [True, True, False], [True, False, True]])
    found = n_step_return(rewards, lengths, terminated, acted, 0.5)
    close(found.returns, [1 + 0.5 + 0.25, 1.5, 1.5, 1.0])
    close(found.discount, [1 / 64, 0.0, 1 / 16, 0.0])
    assert found.offset.tolist() == [3, 2, 2, 1]


def test_the_target_is_the_least_of_the_subset_less_the_entropy_term() -> None:
    returns, discount = torch.tensor([1.0, 2.0]), torch.tensor([0.9, 0.0])
    next_q, logprobs = torch.tensor([[3.0, 5.0], [2.0, 7.0]]), torch.tensor([-1.0, 4.0])
    close(soft_target(returns, discount, next_q, logprobs, 0.5, True), [1 + 0.9 * (2 + 0.5), 2.0])
    close(soft_target(returns, discount, next_q, logprobs, 0.5, False), [1 + 0.9 * 2, 2.0])
    close(soft_target(returns, discount, next_q, logprobs, 0.5, False, minimum=False), [1 + 0.9 * 2.5, 2.0])


def test_losses() -> None:
    q = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    close(critic_loss(q, torch.tensor([2.0, 2.0])), [1.0, 8.0])
    logprobs = torch.tensor([2.0, -2.0])
    close(sac(logprobs, q, 0.5, minimum=True), [1 - 1.0, -1 - 2.0])
    close(sac(logprobs, q, 0.5, minimum=False), [1 - 2.0, -1 - 4.0])


def test_the_temperature_falls_where_the_entropy_is_above_its_target() -> None:
    log_alpha = torch.tensor(math.log(0.2), requires_grad=True)
    loss = temperature_loss(log_alpha, torch.tensor([-3.0]), target_entropy=1.0)  # an entropy of 3
    close(loss.detach(), [-0.2 * (-3 + 1)])
    loss.sum().backward()
    assert log_alpha.grad is not None and float(log_alpha.grad) == pytest.approx(0.4)  # descent lowers alpha


def test_targets_move_by_tau() -> None:
    target, source = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])
    soft_update([target], [source], 0.25)
    close(target, [1.5, 1.0])


def test_there_are_no_advantages() -> None:
    with pytest.raises(EmbodrlError) as refused:
        no_advantages(torch.zeros(1))
    assert refused.value.code == "advantages-none"


def test_nothing_after_the_end_of_an_episode_counts_not_even_nan() -> None:
    nan, yes, no = math.nan, True, False
    sums, lengths = chunk_return(torch.tensor([[1.0, nan]]), torch.tensor([[yes, no]]), 0.5, per_action=True)
    assert (sums.item(), lengths.item()) == (1.0, 1)
    seen = torch.tensor([[1.0, nan, nan]]), torch.tensor([[1, 1, 1]])
    found = n_step_return(*seen, torch.tensor([[yes, no, no]]), torch.tensor([[yes, yes, no]]), 0.5)
    target = soft_target(found.returns, found.discount, torch.full((2, 1), nan), torch.full((1,), nan), 0.1, True)
    assert (found.discount.item(), target.item()) == (0.0, 1.0)
