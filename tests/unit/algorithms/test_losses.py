"""PPO losses against hand-computed numbers and the properties that masks must have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expect import raises_code
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodrl.algorithms.losses import actor_critic_loss, actor_loss, count_elements, reduce_to_level, value_loss
from embodrl.errors import EmbodrlError

LEVELS = ["token_level", "action_level", "chunk_level"]


def settings_of(level: str = "token_level", **changes: Any) -> dict[str, Any]:
    return {"logprob_type": level, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | changes


def random_inputs(seed: int, num: int = 6, chunk: int = 3, dim: int = 2, num_values: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(num, chunk, dim, generator=generator)
    new = old + 0.3 * torch.randn(num, chunk, dim, generator=generator)
    valid = torch.rand(num, chunk, generator=generator) < 0.7
    valid[0] = True
    return {
        "logprobs": new.requires_grad_(),
        "old_logprobs": old,
        "advantages": torch.randn(num, num_values, generator=generator),
        "valid": valid,
    }


def test_reduce_to_level_by_hand() -> None:
    x = torch.tensor([[[1.0, 2.0], [4.0, 8.0]], [[torch.nan, 1.0], [1.0, torch.nan]]])
    valid = torch.tensor([[True, True], [False, False]])
    token, token_mask = reduce_to_level(x, valid, "token_level")
    assert token.tolist() == [[[1, 2], [4, 8]], [[0, 0], [0, 0]]] and token_mask.sum() == 4
    action, action_mask = reduce_to_level(x, valid, "action_level")
    assert action.tolist() == [[[3], [12]], [[0], [0]]] and action_mask.sum() == 2
    chunk, chunk_mask = reduce_to_level(x, valid, "chunk_level")
    assert chunk.flatten().tolist() == [15, 0] and chunk_mask.flatten().tolist() == [True, False]


def test_clipped_surrogate_by_hand() -> None:
    ratios = torch.tensor([1.5, 0.5, 1.5, 1.1])
    advantages = torch.tensor([[1.0], [1.0], [-1.0], [2.0]])
    output = actor_loss(
        logprobs=ratios.log().view(4, 1, 1),
        old_logprobs=torch.zeros(4, 1, 1),
        advantages=advantages,
        valid=torch.ones(4, 1, dtype=torch.bool),
        **settings_of(),
    )
    # min(1.5, 1.28) + min(.5, .8) + min(-1.5, -1.28) + 2.2
    assert float(output.loss) == pytest.approx(-(1.28 + 0.5 - 1.5 + 2.2) / 4)
    assert float(output.metrics["clip_fraction"]) == pytest.approx(3 / 4)
    assert float(output.metrics["ratio_mean"]) == pytest.approx(4.6 / 4)
    kl = sum(float(r) - 1 - math.log(float(r)) for r in ratios) / 4
    assert float(output.metrics["approx_kl"]) == pytest.approx(kl, rel=1e-5)


def test_levels_take_the_ratio_of_the_product() -> None:
    logprobs = torch.tensor([[[0.1, 0.05], [-0.1, 0.15]]])
    valid = torch.tensor([[True, False]])
    inputs = {"logprobs": logprobs, "old_logprobs": torch.zeros(1, 2, 2), "advantages": torch.ones(1, 1)}
    wide = {"clip_ratio_high": 9.0}
    token = actor_loss(**inputs, valid=valid, **settings_of("token_level", **wide))
    action = actor_loss(**inputs, valid=valid, **settings_of("action_level", **wide))
    chunk = actor_loss(**inputs, valid=valid | True, **settings_of("chunk_level", **wide))
    assert float(token.loss) == pytest.approx(-(math.exp(0.1) + math.exp(0.05)) / 2)
    assert float(action.loss) == pytest.approx(-math.exp(0.15))
    assert float(chunk.loss) == pytest.approx(-math.exp(0.2))
    assert float(token.metrics["approx_kl"]) == pytest.approx(float(action.metrics["approx_kl"]))


def test_entropy_bonus_at_its_level() -> None:
    inputs = random_inputs(0, num=2, chunk=2, dim=3)
    inputs["valid"] = torch.tensor([[True, True], [True, False]])
    entropy = torch.arange(12.0).view(2, 2, 3)
    without = actor_loss(**inputs, **settings_of()).loss
    # valid tokens are 0..5 and 6..8, by action 3, 12 and 21, by chunk 15 and 21
    for level, mean in (("token_level", 36 / 9), ("action_level", 36 / 3), ("chunk_level", 36 / 2)):
        output = actor_loss(**inputs, **settings_of(), entropy=entropy, entropy_type=level, entropy_bonus=0.1)
        assert float(output.metrics["entropy"]) == pytest.approx(mean)
        assert float(output.loss.detach()) == pytest.approx(float(without.detach()) - 0.1 * mean, rel=1e-5)


def test_the_likelihood_of_solved_episodes_by_hand() -> None:
    """Two chunks of two actions of one token, the first of a solved episode and with an action that did not happen."""
    logprobs = torch.tensor([[[-1.0], [-9.0]], [[-2.0], [-3.0]]], requires_grad=True)
    valid = torch.tensor([[True, False], [True, True]])
    arguments: dict[str, Any] = {"old_logprobs": logprobs.detach(), "advantages": torch.zeros(2, 1), "valid": valid}
    clips: dict[str, Any] = {"logprob_type": "token_level", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    solved = torch.tensor([True, False])
    output = actor_loss(logprobs=logprobs, solved=solved, positive_coef=0.5, **arguments, **clips)
    assert float(output.metrics["positive_nll"]) == pytest.approx(1.0)
    assert float(output.loss) == pytest.approx(0.5)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    assert gradient.flatten().tolist() == pytest.approx([-0.5, 0.0, 0.0, 0.0])
    # Micro-batches with the counts of both chunks add up.
    counts = count_elements(valid, action_dim=1, logprob_type="token_level", solved=solved)
    parts = [
        actor_loss(
            logprobs=logprobs[rows],
            solved=solved[rows],
            positive_coef=0.5,
            counts=counts,
            **{name: value[rows] for name, value in arguments.items()},
            **clips,
        ).loss
        for rows in ([0], [1])
    ]
    assert float(sum(parts)) == pytest.approx(0.5)
    none = actor_loss(logprobs=logprobs, solved=~solved & False, positive_coef=0.5, **arguments, **clips)
    assert float(none.loss) == 0.0
    with raises_code("success-unknown"):
        actor_loss(logprobs=logprobs, positive_coef=0.5, **arguments, **clips)


def test_value_loss_by_hand() -> None:
    values = torch.tensor([[1.0], [0.1], [7.0]])
    output = value_loss(
        values=values,
        old_values=torch.zeros(3, 1),
        returns=torch.tensor([[1.0], [1.0], [torch.nan]]),
        valid=torch.tensor([[True], [True], [False]]),
        value_clip=0.2,
    )
    # the first moved by 1, so counts as .2: error .64; the second moved by .1: error .81
    assert float(output.loss) == pytest.approx(0.5 * (0.64 + 0.81) / 2)
    assert float(output.metrics["value_clip_fraction"]) == pytest.approx(0.5)
    unclipped = value_loss(
        values=values[:2], old_values=values[:2], returns=torch.ones(2, 1), valid=torch.ones(2, 1) > 0, value_clip=None
    )
    assert float(unclipped.loss) == pytest.approx(0.5 * 0.81 / 2)
    assert float(unclipped.metrics["value_clip_fraction"]) == 0


def test_actor_critic_is_the_sum_of_its_parts() -> None:
    inputs = random_inputs(1, num_values=3)
    critic = {name: torch.randn(6, 3) for name in ("values", "old_values", "returns")}
    both = actor_critic_loss(**inputs, **critic, **settings_of("action_level"), value_clip=0.2, value_loss_coef=0.7)
    actor = actor_loss(**inputs, **settings_of("action_level"))
    value = value_loss(**critic, valid=inputs["valid"], value_clip=0.2)
    torch.testing.assert_close(both.loss, actor.loss + 0.7 * value.loss)
    assert both.metrics.keys() == actor.metrics.keys() | value.metrics.keys()


def test_a_chunk_ratio_with_an_advantage_per_action_is_refused() -> None:
    with raises_code("loss-shapes", EmbodrlError, "reward_type"):
        actor_loss(**random_inputs(0, num_values=3), **settings_of("chunk_level"))


def test_masking_an_action_equals_deleting_it() -> None:
    inputs = random_inputs(2, num=4, chunk=3)
    inputs["valid"] = torch.tensor([[True, False, True]] * 4)
    shorter = {n: t if n == "advantages" else t[:, [0, 2]] for n, t in inputs.items()}
    for level in LEVELS:
        torch.testing.assert_close(
            actor_loss(**inputs, **settings_of(level)).loss, actor_loss(**shorter, **settings_of(level)).loss
        )


@pytest.mark.parametrize("level", LEVELS)
def test_all_masked_gives_zero_and_no_nan(level: str) -> None:
    inputs = random_inputs(0)
    inputs["valid"] = torch.zeros_like(inputs["valid"])
    inputs["advantages"] = torch.full_like(inputs["advantages"], torch.nan)
    values = torch.full((6, 1), torch.nan, requires_grad=True)
    output = actor_critic_loss(
        **inputs,
        **settings_of(level),
        values=values,
        old_values=values.detach(),
        returns=values.detach(),
        value_clip=0.2,
        value_loss_coef=0.5,
    )
    assert float(output.loss.detach()) == 0
    assert all(float(value) == 0 for value in output.metrics.values())
    for gradient in torch.autograd.grad(output.loss, [inputs["logprobs"], values]):
        assert (gradient == 0).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), level=st.sampled_from(LEVELS), cut=st.integers(1, 5), per_action=st.booleans())
def test_parts_with_the_counts_of_the_whole_add_up_to_it(seed: int, level: str, cut: int, per_action: bool) -> None:
    num_values = 3 if per_action and level != "chunk_level" else 1
    inputs = random_inputs(seed, num_values=num_values)
    generator = torch.Generator().manual_seed(seed)
    inputs |= {n: torch.randn(6, num_values, generator=generator) for n in ("values", "old_values", "returns")}
    entropy = torch.rand(6, 3, 2, generator=generator)
    common = settings_of(level, value_clip=0.2, value_loss_coef=0.5, entropy_type="action_level", entropy_bonus=0.01)
    whole = actor_critic_loss(**inputs, entropy=entropy, **common)
    counts = count_elements(
        inputs["valid"], action_dim=2, logprob_type=level, entropy_type="action_level", num_values=num_values
    )
    parts = [
        actor_critic_loss(**{n: t[rows] for n, t in inputs.items()}, entropy=entropy[rows], counts=counts, **common)
        for rows in (slice(0, cut), slice(cut, 6))
    ]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(parts[0].metrics[name] + parts[1].metrics[name], value)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [25.0, 89.0, 200.0, -200.0])
def test_huge_log_ratios_give_finite_losses_and_gradients(level: str, advantage: float, log_ratio: float) -> None:
    logprobs = torch.tensor([log_ratio, 0.1]).view(2, 1, 1).requires_grad_()
    output = actor_loss(
        logprobs=logprobs,
        old_logprobs=torch.zeros(2, 1, 1),
        advantages=torch.full((2, 1), advantage),
        valid=torch.ones(2, 1, dtype=torch.bool),
        clip_ratio_dual=3.0,
        ref_logprobs=torch.zeros(2, 1, 1),
        kl_coef=0.1,
        **settings_of(level),
    )
    output.loss.backward()
    assert output.loss.isfinite() and all(value.isfinite() for value in output.metrics.values())
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
    # The ordinary element still learns: -A r / 2 of the surrogate and the gradient of 0.1 k3 / 2.
    expected = -advantage * math.exp(0.1) / 2 + 0.1 * (1 - math.exp(-0.1)) / 2
    assert float(logprobs.grad[1]) == pytest.approx(expected, rel=1e-5)
