"""Updates by megatron-core against updates in one process, and its checkpoints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import cuda_names
import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from parallel import config_of, copied, different_copies, megatron_engine, native_engine, updates, whole_policy
from tiny_training import deployment_of, largest_difference
from torch.distributed.device_mesh import init_device_mesh

from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training.fsdp import FsdpTrainEngine
from embodrl.hybrid_engines.training.megatron.core import stop
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.sharding import DP, TP
from embodrl.workers.actor import make_train_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core: make test-megatron"),
]

CONFIG = config_of()
EQUAL = 1e-5
Result = tuple[list[dict[str, float]], EngineState]


def train_natively() -> tuple[Result, Result]:
    """Return metrics and state after three updates, the first of the critic alone, and after a fourth."""
    engine = native_engine(CONFIG)
    first = updates(engine, CONFIG, range(3)), copied(engine)
    return first, (updates(engine, CONFIG, range(3, 4)), copied(engine))


@pytest.fixture(scope="module")
def native() -> tuple[Result, Result]:
    return on_ranks(1, train_natively)[0]


def assert_same(found: Result, expected: Result) -> None:
    """Compare; of a gradient that is 0 but for rounding, AdamW takes the sign, so that weights differ by more."""
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=EQUAL, abs=EQUAL)
    assert found[1].state == expected[1].state
    assert found[1].tensors.keys() == expected[1].tensors.keys() == {"policy", "optimizer", "reference"}
    for section in ("optimizer", "reference"):
        assert largest_difference(found[1].tensors[section], expected[1].tensors[section]) < EQUAL
    assert largest_difference(found[1].tensors["policy"], expected[1].tensors["policy"]) < 2e-3


def equal(a: EngineState, b: EngineState) -> bool:
    sections = a.tensors.keys() == b.tensors.keys() and a.state == b.state
    return sections and all(largest_difference(a.tensors[s], b.tensors[s]) == 0 for s in a.tensors)


def train(size: int, distributed: bool, saved: EngineState) -> dict[str, Any]:
    """Train as ``train_natively``, then continue from a native state."""
    if distributed:
        cuda_names.install()
    engine = megatron_engine(CONFIG, size, distributed)
    found: dict[str, Any] = {"first": (updates(engine, CONFIG, range(3)), copied(engine))}
    found["differ"] = different_copies(engine)
    engine.load_state_dict(saved)
    found["same"] = equal(copied(engine), saved)
    found["next"] = (updates(engine, CONFIG, range(3, 4)), copied(engine))
    return found


@pytest.mark.parametrize(
    ("ranks", "size", "distributed"),
    [(2, 2, False), (2, 1, False), (4, 2, False), (2, 2, True), (2, 1, True)],
    ids=["two parts", "two shares", "two by two", "two parts, distributed optimizer", "two shares, distributed"],
)
def test_updates_and_resumed_ones_are_those_of_one_process(
    native: tuple[Result, Result], ranks: int, size: int, distributed: bool
) -> None:
    for found in on_ranks(ranks, train, size, distributed, native[0][1]):
        assert_same(found["first"], native[0])
        assert found["differ"] == []
        assert found["same"], "a native checkpoint is loaded bit-exactly"
        assert_same(found["next"], native[1])


def go_on_natively(saved: EngineState) -> Result:
    engine = native_engine(CONFIG)
    engine.load_state_dict(saved)
    assert equal(copied(engine), saved)
    return updates(engine, CONFIG, range(3, 4)), copied(engine)


def test_a_native_run_continues_from_its_state(native: tuple[Result, Result]) -> None:
    saved = on_ranks(2, train, 2, False, native[0][1])[0]["first"][1]
    assert_same(on_ranks(1, go_on_natively, saved)[0], native[1])


def train_with_offload(distributed: bool) -> list[tuple[int, int]]:
    """Return bytes before and after, and check that nothing else is different."""
    if distributed:
        cuda_names.install()
    engine, found = megatron_engine(CONFIG, 2, distributed), list[tuple[int, int]]()
    metrics: list[dict[str, float]] = []
    for number in range(3):
        metrics += updates(engine, CONFIG, range(number, number + 1))
        report = engine.offload()
        assert report is not None
        found.append((report.before, report.after))
        kept = (*engine.policy.parameters(), *engine.state.leaves.values(), *(engine.state.reference or []))
        assert not any(tensor.untyped_storage().nbytes() for tensor in kept)
    state = copied(engine)
    stop()
    straight = megatron_engine(CONFIG, 2, distributed)
    assert updates(straight, CONFIG, range(3)) == metrics
    assert equal(copied(straight), state)
    return found


@pytest.mark.parametrize("distributed", [False, True], ids=["replicas", "distributed optimizer"])
def test_offload_between_updates_changes_no_bit(distributed: bool) -> None:
    for found in on_ranks(2, train_with_offload, distributed):
        assert all(before > after == 0 for before, after in found)


def through_shards(directory: Path) -> dict[str, bool]:
    """Write a run's shards with layers shared by two, and read them with layers cut otherwise, natively and back."""
    cuda_names.install()
    engine = megatron_engine(CONFIG, 2)
    updates(engine, CONFIG, range(2))
    saved = copied(engine)
    engine.save_shards(directory / "megatron")
    native = native_engine(CONFIG)
    native.load_shards(directory / "megatron", saved.state)
    found = {"native": equal(copied(native), saved)}
    if dist.get_rank() == 0:
        native.save_shards(directory / "native")
    dist.barrier()
    stop()
    for name, source, size, distributed in (
        ("two shares", "megatron", 1, False),
        ("two parts, distributed optimizer", "megatron", 2, True),
        ("two shares, distributed optimizer", "native", 1, True),
        ("two parts", "native", 2, False),
    ):
        other = megatron_engine(CONFIG, size, distributed)
        other.load_shards(directory / source, saved.state)
        other.save_shards(directory / name)
        again = native_engine(CONFIG)
        again.load_shards(directory / name, other.counters())
        found[name] = equal(copied(other), saved) and equal(copied(again), saved)
        stop()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=(DP, TP))
    fsdp = FsdpTrainEngine(whole_policy(CONFIG), EngineOptions(CONFIG.actor, CONFIG.runner.max_iterations, True), mesh)
    fsdp.load_shards(directory / "megatron", saved.state)
    return found | {"fsdp": equal(copied(fsdp), saved)}


def test_shards_of_a_run_are_read_by_every_backend(tmp_path: Path) -> None:
    for found in on_ranks(2, through_shards, tmp_path):
        assert len(found) == 6 and all(found.values()), found


def train_in_bf16(size: int) -> list[dict[str, float]]:
    config = config_of(precision="bf16", gradient_checkpointing=True)
    return updates(megatron_engine(config, size) if size else native_engine(config), config, range(2))


def test_autocast_and_recomputation_stay_near() -> None:
    expected = on_ranks(1, train_in_bf16, 0)[0]
    for metrics in on_ranks(2, train_in_bf16, 2):
        for name in ("train/value_loss", "train/entropy", "train/grad_norm"):
            assert metrics[1][name] == pytest.approx(expected[1][name], rel=0.1)


def resume_in_bf16(directory: Path, size: int) -> dict[str, bool]:
    """Continue a run in bf16 in memory, through shards, and from a native state, whose float32 copies come along."""
    cuda_names.install()
    config = config_of(param_dtype="bf16")
    engine = megatron_engine(config, size, distributed_optimizer=True)
    updates(engine, config, range(2))
    saved = copied(engine)
    engine.save_shards(directory / "megatron")
    expected = updates(engine, config, range(2, 3)), copied(engine)
    masters = {n.removeprefix("master."): t for n, t in saved.tensors["optimizer"].items() if n.startswith("master.")}
    found = {
        "in float32": any(not torch.equal(t, saved.tensors["policy"][n].float()) for n, t in masters.items()),
        "rounded": all(torch.equal(t.bfloat16(), saved.tensors["policy"][n]) for n, t in masters.items()),
        "sizes": engine.shapes().num_bytes == num_bytes(saved)
        and engine.state.inventory() == {s: {n: t.nbytes for n, t in ts.items()} for s, ts in saved.tensors.items()},
    }
    stop()
    for name in ("state", "shards"):
        again = megatron_engine(config, size, distributed_optimizer=True)
        updates(again, config, range(5, 6))  # what is there is replaced
        if name == "state":
            again.load_state_dict(saved)
        else:
            again.load_shards(directory / "megatron", saved.state)
        found[name] = equal(copied(again), saved)
        found[f"{name} continued"] = updates(again, config, range(2, 3)) == expected[0]
        found[f"{name} continued"] &= equal(copied(again), expected[1])
        stop()
    native = native_engine(config)
    native.load_state_dict(saved)
    found["native"] = equal(copied(native), saved)
    return found


def num_bytes(state: EngineState) -> int:
    """Return the bytes of a state, without the numbers of steps."""
    return sum(t.nbytes for part in state.tensors.values() for n, t in part.items() if not n.startswith("step."))


@pytest.mark.parametrize("size", [1, 2], ids=["two shares", "two parts"])
def test_float32_copies_of_bf16_weights_are_resumed_bit_exactly(tmp_path: Path, size: int) -> None:
    for found in on_ranks(2, resume_in_bf16, tmp_path, size):
        assert all(found.values()), found


def test_processes_of_a_run_train_as_one(native: tuple[Result, Result]) -> None:
    config = config_of(training_backend="megatron", tensor_parallel_size=2)
    policy = whole_policy(config)
    engine = make_train_engine(config, deployment_of(config, 2), policy)
    try:
        assert_same((updates(engine, config, range(3)), copied(engine)), native[0])
    finally:
        engine.close()
