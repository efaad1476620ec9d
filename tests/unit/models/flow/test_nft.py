"""Negative-aware fine-tuning, written out in loops, and where its gradient points."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from torch import Tensor

from embodrl.algorithms.losses import count_elements
from embodrl.algorithms.nft import nft_loss

ROWS, SAMPLES, CHUNK, DIM = 5, 3, 2, 4


def random_inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(ROWS, SAMPLES, CHUNK, DIM, generator=generator)
    errors = old + 0.3 * torch.randn(old.shape, generator=generator)
    valid = torch.tensor([[True, True], [True, False], [False, True], [True, True], [True, True]])
    return {
        "errors": errors,
        "old_errors": old,
        "logprobs": -errors.square().mean(1),
        "old_logprobs": -old.square().mean(1),
        "advantages": 1.5 * torch.randn(ROWS, 1, generator=generator),
        "valid": valid,
        "weights": 0.5 + torch.rand(ROWS, generator=generator),
    }


def loss_of(inputs: dict[str, Any], objective: str, level: str, **changes: Any) -> Any:
    settings = {"objective": objective, "beta": 0.7, "max_advantage": 2.0, "logprob_type": level}
    return nft_loss(**(inputs | settings | changes))


@pytest.mark.parametrize("objective", ["weighted", "contrastive"])
@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
def test_objective_written_out(objective: str, level: str) -> None:
    inputs = random_inputs()
    e, old = (inputs[name].double().numpy() for name in ("errors", "old_errors"))
    total, count = 0.0, 0
    for row in range(ROWS):
        y = max(-1.0, min(1.0, float(inputs["advantages"][row, 0]) / 2.0))
        actions = [c for c in range(CHUNK) if inputs["valid"][row, c]]
        groups = {
            "token_level": [[(c, d)] for c in actions for d in range(DIM)],
            "action_level": [[(c, d) for d in range(DIM)] for c in actions],
            "chunk_level": [[(c, d) for c in actions for d in range(DIM)]],
        }[level]
        for group in groups:
            energies = []
            for sign in (1, -1):
                mirrored = [
                    np.mean((old[row, :, c, d] + sign * 0.7 * (e[row, :, c, d] - old[row, :, c, d])) ** 2)
                    for c, d in group
                ]
                energies.append(sum(mirrored))
            near, far = energies
            term = math.log1p(math.exp(y * (near - far) / 2))
            if objective == "weighted":
                term = (1 + y) / 2 * near + (1 - y) / 2 * far
            total += float(inputs["weights"][row]) * term
            count += 1
    assert float(loss_of(inputs, objective, level).loss) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("objective", ["weighted", "contrastive"])
def test_the_first_step_is_that_of_a_policy_gradient(objective: str) -> None:
    """At the policy that acted, up to a factor, the gradient is that of ``-y log p`` with ``log p = -e^2 / 2``."""
    inputs = random_inputs() | {"weights": None}
    errors = inputs["old_errors"].clone().requires_grad_()
    loss_of(inputs | {"errors": errors}, objective, "chunk_level").loss.backward()
    y = (inputs["advantages"] / 2.0).clamp(-1, 1)[:, :, None, None]
    factor = 0.7 * {"weighted": 2.0, "contrastive": 1.0}[objective]
    wanted = factor * y * inputs["old_errors"] / SAMPLES * inputs["valid"][:, None, :, None] / ROWS
    torch.testing.assert_close(errors.grad, wanted)


def test_micro_batches_add_up_and_masked_errors_do_not_count() -> None:
    inputs = random_inputs()
    inputs["errors"][1, :, 1] = math.nan
    counts = count_elements(inputs["valid"], action_dim=DIM, logprob_type="action_level")
    whole = loss_of(inputs, "contrastive", "action_level")
    halves = [
        loss_of({name: value[rows] for name, value in inputs.items()}, "contrastive", "action_level", counts=counts)
        for rows in (slice(0, 2), slice(2, ROWS))
    ]
    assert math.isfinite(float(whole.loss))
    torch.testing.assert_close(sum(half.loss for half in halves), whole.loss)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(half.metrics[name] for half in halves), value)


def test_advantages_of_actions_need_energies_of_actions() -> None:
    inputs = random_inputs() | {"advantages": torch.zeros(ROWS, CHUNK)}
    with raises_code("loss-shapes"):
        loss_of(inputs, "contrastive", "chunk_level")
