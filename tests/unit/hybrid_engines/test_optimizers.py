"""Optimizers of the user's: what they are called with, keep, and continue from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises_code
from test_train_engine import make_engine
from torch import nn
from toy_policy import ToyPolicy

from embodrl.config.schema import OptimConfig
from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.optimizers import ADAMW, KeptState, kept_state, make_optimizer
from embodrl.hybrid_engines.training.schedule import LearningRates

MOMENTUM = OptimConfig(fn="torch.optim:SGD", arguments={"momentum": 0.9})


def drops_roles(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight for group in groups for weight in group["params"]])


def engine_of(optim: OptimConfig, dtype: torch.dtype = torch.float32) -> NativeTrainEngine:
    return make_engine(ToyPolicy().to(dtype), optim={"fn": optim.fn, "arguments": optim.arguments})


def step(engine: NativeTrainEngine, rate: float = 0.1) -> None:
    """Take a step with gradients of ones."""
    engine.set_learning_rates(LearningRates(policy=rate, value=rate), train_policy=True)
    for leaf in engine.state.leaves.values():
        leaf.grad = torch.ones_like(leaf)
    engine.optimizer_step(torch.zeros(()))


@pytest.mark.parametrize(
    ("name", "arguments", "kept"),
    [
        ("SGD", {}, KeptState((), ())),
        ("SGD", {"momentum": 0.9}, KeptState((), ("momentum_buffer",))),
        ("RMSprop", {}, KeptState(("step",), ("square_avg",))),
        ("Adagrad", {}, KeptState(("step",), ("sum",))),
    ],
)
def test_what_an_optimizer_keeps_is_found_by_a_step(name: str, arguments: dict[str, Any], kept: KeptState) -> None:
    assert kept_state(OptimConfig(fn=f"torch.optim:{name}", arguments=arguments)) == kept
    assert kept_state(OptimConfig()) == ADAMW


def test_an_optimizer_whose_state_is_not_of_the_weights_shape_is_refused() -> None:
    with raises_code("optimizer-state", EmbodrlError):
        kept_state(OptimConfig(fn="torch.optim:Adafactor"))


@pytest.mark.parametrize("function", ["math:fsum", f"{__name__}:drops_roles"])
def test_what_a_function_returns_is_checked(function: str) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.0, "role": "policy"}]
    made: Any = [1.0] if function.startswith("math") else groups
    with raises_code("optimizer-invalid", EmbodrlError):
        make_optimizer(made, OptimConfig(fn=function))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_a_failing_optimizer_is_named(name: str) -> None:
    with raises_code("optimizer-invalid", EmbodrlError, name):
        kept_state(OptimConfig(fn=f"torch.optim:{name}"))


def test_momentum_by_hand_with_a_rate_per_group() -> None:
    engine = engine_of(MOMENTUM)
    weight = engine.state.policy_parameters[0]
    start = weight.detach().clone()
    norm = sum(leaf.numel() for leaf in engine.state.leaves.values()) ** 0.5
    clipped = min(1.0, engine.config.optim.clip_grad / (norm + 1e-6))
    step(engine)
    step(engine)
    # buffer: g, then 0.9 g + g
    torch.testing.assert_close(weight, start - 0.1 * clipped * (1 + 1.9), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optim", [MOMENTUM, OptimConfig(fn="torch.optim:SGD"), OptimConfig(fn="torch.optim:RMSprop")])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_continues_from_a_saved_state(
    optim: OptimConfig, dtype: torch.dtype, sharded: bool, tmp_path: Path
) -> None:
    engine, other = (engine_of(optim, dtype) for _ in range(2))
    for _ in range(3):
        step(engine, 1e-4)
    if sharded:
        engine.save_shards(tmp_path / "state")
        other.load_shards(tmp_path / "state", engine.counters())
    else:
        other.load_state_dict(copy.deepcopy(engine.state_dict()))
    for each in (engine, other):
        step(each, 0.01)
    for name, tensor in engine.policy.state_dict().items():
        assert torch.equal(tensor, other.policy.state_dict()[name]), name
    masters = zip(engine.state.masters.values(), other.state.masters.values(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in masters)


def test_the_state_of_another_optimizer_is_refused() -> None:
    engine = engine_of(OptimConfig())
    step(engine)
    with raises_code("checkpoint-mismatch", CheckpointError):
        engine_of(MOMENTUM).load_state_dict(engine.state_dict())
