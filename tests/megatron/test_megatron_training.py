"""Updates by megatron-core against updates in one process, and its checkpoints."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import megatron_workers
import pytest
from tiny_training import largest_difference, train, training_config
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.hybrid_engines.base import EngineState, TrainEngine
from embodrl.models.base import VLAPolicy
from embodrl.scheduler.placement import ProcessPlace
from embodrl.scheduler.worker import Worker
from embodrl.workers import actor
from embodrl.workers.actor import GroupTrainEngine, make_train_engine
from embodrl.workers.policy import build_policy, configure_torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core: make test-megatron"),
]

KL = {"algorithm": {"update_epoch": 2, "entropy_bonus": 0.01, "kl": {"coef": 0.1}}}
EQUAL = 1e-5


def config_of(size: int = 0, **changes: Any) -> Config:
    """Return a run by megatron-core with that tensor parallelism, or natively."""
    settings = {"training_backend": "megatron", "tensor_parallel_size": size} if size else {}
    return training_config(actor=settings | changes.pop("actor", {}), **(KL | changes))


@contextlib.contextmanager
def engine_of(
    config: Config, ranks: int, monkeypatch: pytest.MonkeyPatch, worker: type[Worker] = megatron_workers.Probe
) -> Iterator[tuple[GroupTrainEngine, VLAPolicy]]:
    configure_torch(config)
    policy = build_policy(config)
    monkeypatch.setattr(actor, "ActorWorker", worker)
    engine = GroupTrainEngine(config, policy, places=tuple(ProcessPlace("actor", rank) for rank in range(ranks)))
    try:
        yield engine, policy
    finally:
        engine.close()


def copied(engine: TrainEngine) -> EngineState:
    state = engine.state_dict()
    tensors = {section: {name: t.clone() for name, t in parts.items()} for section, parts in state.tensors.items()}
    return EngineState(tensors, dict(state.state))


@pytest.fixture(scope="module")
def expected() -> tuple[list[dict[str, float]], EngineState]:
    """Metrics and state after three updates in one process, the first of the critic alone."""
    config = config_of()
    configure_torch(config)
    policy = build_policy(config)
    engine = make_train_engine(config, policy)
    return train(engine, "openvla", policy, config, range(3)), copied(engine)


def policy_of(engine: GroupTrainEngine, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the weights that the processes hold."""
    return engine.group.call("gather", "policy", list(names)).result()[0]


def assert_same(
    found: tuple[list[dict[str, float]], EngineState], expected: tuple[list[dict[str, float]], EngineState]
) -> None:
    """Compare; of a gradient that is 0 but for rounding, AdamW takes the sign, so that weights differ by more."""
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=EQUAL, abs=EQUAL)
    assert found[1].state == expected[1].state
    assert found[1].tensors.keys() == expected[1].tensors.keys() == {"policy", "optimizer", "reference"}
    for section in ("optimizer", "reference"):
        assert largest_difference(found[1].tensors[section], expected[1].tensors[section]) < EQUAL
    assert largest_difference(found[1].tensors["policy"], expected[1].tensors["policy"]) < 2e-3


def test_two_processes_that_share_layers_train_as_one(
    expected: tuple[list[dict[str, float]], EngineState], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(2)
    with engine_of(config, 2, monkeypatch) as (engine, policy):
        metrics = train(engine, "openvla", policy, config, range(3))
        assert_same((metrics, copied(engine)), expected)
        assert engine.group.call("copies_differ").result() == [[], []]
        # A native run goes on from its checkpoint, and it from a native one, to the bit.
        saved, native_policy = copied(engine), build_policy(config_of())
        native = make_train_engine(config_of(), native_policy)
        native.load_state_dict(saved)
        assert largest_difference(native.state_dict().tensors["optimizer"], saved.tensors["optimizer"]) == 0
        engine.load_state_dict(expected[1])
        back = copied(engine)
        for section, tensors in expected[1].tensors.items():
            assert largest_difference(back.tensors[section], tensors) == 0
        engine.load_state_dict(saved)
        mine, theirs = (
            train(engine, "openvla", policy, config, range(3, 4)),
            train(native, "openvla", native_policy, config_of(), range(3, 4)),
        )
        assert mine[0] == pytest.approx(theirs[0], rel=EQUAL, abs=EQUAL)


@pytest.mark.parametrize(("size", "ranks"), [(1, 2), (2, 2)], ids=["two shares", "two parts"])
def test_the_distributed_optimizer_trains_as_adamw(
    expected: tuple[list[dict[str, float]], EngineState], monkeypatch: pytest.MonkeyPatch, size: int, ranks: int
) -> None:
    config = config_of(size)
    with engine_of(config, ranks, monkeypatch, megatron_workers.ShimmedProbe) as (engine, policy):
        metrics = train(engine, "openvla", policy, config, range(3))
        found = copied(engine)
        assert_same((metrics, found), expected)
        engine.load_state_dict(expected[1])
        assert largest_difference(copied(engine).tensors["optimizer"], expected[1].tensors["optimizer"]) == 0


def test_checkpoints_of_parts_are_read_by_another_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = megatron_workers.ShimmedPlainProbe
    with engine_of(config_of(2), 2, monkeypatch, worker) as (engine, policy):
        train(engine, "openvla", policy, config_of(2), range(2))
        saved = copied(engine)
        engine.group.call("save", str(tmp_path / "two")).result()
    with engine_of(config_of(1), 1, monkeypatch, worker) as (engine, _):
        engine.group.call("load", str(tmp_path / "two")).result()
        for section, tensors in copied(engine).tensors.items():
            if section != "policy":  # the driver's copy of the weights follows updates alone
                assert largest_difference(tensors, saved.tensors[section]) == 0
        names = list(saved.tensors["policy"])
        assert (
            largest_difference(engine.group.call("gather", "policy", names).result()[0], saved.tensors["policy"]) == 0
        )
        engine.group.call("save", str(tmp_path / "one")).result()
    with engine_of(config_of(2), 2, monkeypatch, worker) as (engine, _):
        engine.group.call("load", str(tmp_path / "one")).result()
        assert largest_difference(copied(engine).tensors["optimizer"], saved.tensors["optimizer"]) == 0
        assert (
            largest_difference(engine.group.call("gather", "policy", names).result()[0], saved.tensors["policy"]) == 0
        )


def test_bfloat16_stays_near(
    expected: tuple[list[dict[str, float]], EngineState], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(2, actor={"precision": "bf16", "gradient_checkpointing": True})
    with engine_of(config, 2, monkeypatch) as (engine, policy):
        [metrics] = train(engine, "openvla", policy, config, range(1))
    for name in ("train/value_loss", "train/entropy"):
        assert metrics[name] == pytest.approx(expected[0][0][name], rel=0.05)
