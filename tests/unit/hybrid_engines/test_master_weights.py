"""Weights in bf16 learn what float32 ones do: the optimizer has them in float32 (H9 of the audit)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from toy_policy import ToyPolicy

from embodrl.algorithms.losses import LossOutput
from embodrl.config import load_config
from embodrl.config.schema import ActorConfig, OptimConfig
from embodrl.data.batch import Batch
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions

LR = 1e-5
STEPS = 20


def make_engine(dtype: torch.dtype, masters: Literal["auto"] | bool = "auto", seed: int = 0) -> NativeTrainEngine:
    optim = OptimConfig(lr=LR, value_lr=LR, master_weights=masters)
    policy = ToyPolicy(seed=seed).to(torch.bfloat16).to(dtype)  # the same start for all
    return NativeTrainEngine(policy, EngineOptions(ActorConfig(optim=optim), 10), "cpu")


def step(engine: NativeTrainEngine, number: int) -> None:
    """Take a step of gradients of 1 and -1, exact in bf16, that alternate with the number of the parameter."""
    for group in engine.state.optimizer.param_groups:
        group["lr"] = LR

    def loss_fn(rows: Batch) -> LossOutput:
        signs = [1.0 if (index + number // 8) % 2 else -1.0 for index in range(99)]
        terms = [sign * p.float().sum() for sign, p in zip(signs, engine.policy.parameters(), strict=False)]
        return LossOutput(torch.stack(terms).sum(), {})

    loss, _ = engine.forward_backward(Batch({"row": torch.zeros(1)}), loss_fn)
    assert engine.optimizer_step(loss).applied


def trained(dtype: torch.dtype, masters: Literal["auto"] | bool = "auto") -> NativeTrainEngine:
    engine = make_engine(dtype, masters)
    for number in range(STEPS):
        step(engine, number)
    return engine


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().float().flatten() for t in tensors])


def movement(engine: NativeTrainEngine, tensors: list[Tensor]) -> Tensor:
    return flat(tensors) - flat(list(make_engine(torch.float32).policy.parameters()))


def test_updates_of_bf16_weights_are_kept_as_in_float32() -> None:
    exact = trained(torch.float32)
    wanted = movement(exact, list(exact.policy.parameters()))
    copied = trained(torch.bfloat16)
    masters = [copied.state.masters[p] for p in copied.policy.parameters()]
    torch.testing.assert_close(movement(copied, list(masters)), wanted, rtol=0, atol=1e-7)  # float32's rounding
    for parameter, master in copied.state.masters.items():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, master.to(torch.bfloat16))

    plain = trained(torch.bfloat16, masters=False)
    assert not plain.state.masters
    lost = 1 - float(movement(plain, list(plain.policy.parameters())).norm() / wanted.norm())
    assert lost > 0.8  # 0.5 ulp of a weight of 0.3 is 5e-4, a step 1e-5


def test_weights_in_float32_have_no_copies() -> None:
    assert not make_engine(torch.float32).state.masters
    assert all(leaf is p for p, leaf in make_engine(torch.float32).state.leaves.items())


@pytest.mark.parametrize("in_shards", [False, True])
def test_a_resumed_engine_continues_bit_exactly(in_shards: bool, tmp_path: Path) -> None:
    straight, resumed = make_engine(torch.bfloat16), make_engine(torch.bfloat16, seed=1)
    for number in range(5):
        step(straight, number)
    if in_shards:
        straight.save_shards(tmp_path / "state")
        resumed.load_shards(tmp_path / "state", straight.counters())
    else:
        saved = straight.state_dict()
        resumed.load_state_dict(EngineState({s: dict(t) for s, t in saved.tensors.items()}, saved.state))
    for number in range(5, 20):
        step(straight, number)
        step(resumed, number)
    for section, tensors in straight.state_dict().tensors.items():
        other = resumed.state_dict().tensors[section]
        assert tensors.keys() == other.keys() and all(torch.equal(tensors[name], other[name]) for name in tensors)
    assert any(name.startswith("master.") for name in straight.state_dict().tensors["optimizer"])


@pytest.mark.parametrize("in_shards", [False, True])
def test_a_state_with_copies_fits_an_engine_without_and_the_other_way_round(in_shards: bool, tmp_path: Path) -> None:
    for first, then in ((False, "auto"), ("auto", False)):
        one, two = make_engine(torch.bfloat16, first), make_engine(torch.bfloat16, then, seed=1)
        step(one, 0)
        if in_shards:
            one.save_shards(tmp_path / str(first))
            two.load_shards(tmp_path / str(first), one.counters())
        else:
            two.load_state_dict(one.state_dict())
        step(two, 1)
        for parameter, leaf in two.state.leaves.items():
            moments = two.state.optimizer.state[leaf]
            assert moments["exp_avg"].dtype == leaf.dtype and float(moments["step"]) == 2
            assert torch.equal(parameter, leaf.to(parameter.dtype))


def test_offload_takes_the_copies() -> None:
    engine = make_engine(torch.bfloat16)
    step(engine, 0)
    before = flat([*engine.state.masters.values()])
    engine.offload()
    assert all(master.untyped_storage().nbytes() == 0 for master in engine.state.masters.values())
    assert all(p.untyped_storage().nbytes() for p in engine.policy.parameters())  # the rollout's as well
    engine.onload()
    assert torch.equal(flat([*engine.state.masters.values()]), before)


def test_settings() -> None:
    def codes(*arguments: str) -> set[str]:
        return {note.code for note in load_config(["env=toy", "model=openvla", *arguments]).notes}

    lost = "bf16-weights-lose-updates"
    bf16 = "actor.param_dtype=bf16"
    assert lost not in codes(bf16) and lost in codes(bf16, "actor.optim.master_weights=false")
    assert lost not in codes(bf16, "actor.optim.master_weights=false", "model.trainable=lora")
