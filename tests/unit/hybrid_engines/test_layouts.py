"""Weights follow their own gradients, whatever the strides of either: a contract of the optimizers of every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from first_steps import watch
from replay_frames import config_of, updater_of
from tiny_families import build
from tiny_training import tiny_rollout, training_config
from torch import Tensor
from updates import update

from embodrl.algorithms.advantages import compute_advantages
from embodrl.hybrid_engines.training.adamw import fused_adamw
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions

Layout = Callable[[Tensor], Tensor]


def dense(weight: Tensor) -> Tensor:
    return weight


def channels_last(weight: Tensor) -> Tensor:
    return weight.to(memory_format=torch.channels_last)


def transposed(weight: Tensor) -> Tensor:
    return weight.transpose(0, 1).contiguous().transpose(0, 1)


def with_gaps(weight: Tensor) -> Tensor:
    return torch.cat([weight, weight])[::2].copy_(weight)


LAYOUTS = [dense, channels_last, transposed, with_gaps]


@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_moments", [dense, channels_last])
def test_layouts_change_no_step(of_weight: Layout, of_gradient: Layout, of_moments: Layout) -> None:
    random = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(32, 16, 3, 3, generator=random) for _ in range(4))
    plain = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([plain], lr=0.1, weight_decay=0.01, foreach=False, fused=False)
    weight = torch.nn.Parameter(of_weight(start.clone()))
    optimizer = fused_adamw([{"params": [weight], "lr": 0.1, "weight_decay": 0.01}], (0.9, 0.999), 1e-8)
    for gradient in gradients:
        plain.grad, weight.grad = gradient.clone(), of_gradient(gradient.clone())
        reference.step()
        optimizer.step()
        for name in ("exp_avg", "exp_avg_sq"):  # as from a checkpoint
            optimizer.state[weight][name] = of_moments(optimizer.state[weight][name].clone())
    torch.testing.assert_close(weight.detach(), plain.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_native_engine(num_threads: int) -> None:
    config = training_config("gaussian")
    policy = build("gaussian")
    engine = NativeTrainEngine(policy, EngineOptions.of(config), "cpu", num_threads=num_threads)
    engine.state.version = 1  # the critic is warm
    stepped = watch(engine.state.optimizer)
    batch = tiny_rollout("gaussian", policy, config, 0)
    update(
        engine, batch, compute_advantages(batch, config.algorithm), config.algorithm, torch.Generator().manual_seed(7)
    )
    assert any(weight.ndim == 4 for weight in stepped)


def test_off_policy_updates() -> None:
    updater = updater_of(config_of())
    of_policy, of_critics = updater.update.engine.state.optimizer, updater.update.modules.optimizer
    stepped = watch(of_policy, of_critics)
    updater.learn(torch.Generator().manual_seed(7))
    assert set(stepped.values()) == {of_policy, of_critics}
    assert any(weight.ndim == 4 for weight in stepped)
