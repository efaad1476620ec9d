"""Rollouts whose policy inputs are in memory files give the rows that they would hold themselves."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from expect import raises_code
from tiny_training import tiny_rollout, training_config

from embodrl.config.schema import Config
from embodrl.data.shared_inputs import INPUTS, ROW, SHARED, RowInputs, numbered
from embodrl.data.shared_rows import shared_memory_batch
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import solve
from embodrl.errors import BatchIndexError
from embodrl.processes.frames import Connection, Frame, Kind, socket_pair
from embodrl.processes.traffic import totals
from embodrl.scheduler.messages import CODEC
from embodrl.workers.actor import ActorWorker
from embodrl.workers.async_collector import join_shards
from embodrl.workers.policy import build_policy
from embodrl.workers.rollout_process import shares_inputs
from embodrl.workers.saved_rollouts import load_rollout, save_rollout


@pytest.fixture(scope="module", params=["openvla", "pi0_fast"])
def whole(request: pytest.FixtureRequest) -> list[TrajectoryBatch]:
    """Two rollouts; chunk-level tokens have masks."""
    config = training_config(request.param)
    policy = build_policy(config)
    found = [tiny_rollout(request.param, policy, config, seed) for seed in range(2)]
    for batch in found:
        batch.group_id = torch.zeros_like(batch.task_id)
        batch.meta = {"env_steps": 5}
    return found


def shared(batches: list[TrajectoryBatch]) -> list[TrajectoryBatch]:
    return [numbered(shared_memory_batch(batch), number) for number, batch in enumerate(batches)]


def assert_same(mine: TrajectoryBatch, theirs: TrajectoryBatch) -> None:
    left, right = dict(mine.with_inputs().leaves()), dict(theirs.leaves())
    assert left.keys() == right.keys()
    assert all(left[path].dtype == right[path].dtype and left[path].equal(right[path]) for path in left)


def test_rows_are_chosen_joined_and_read_on_demand(whole: list[TrajectoryBatch]) -> None:
    parts = shared(whole)
    assert set(parts[0].tensors.get(INPUTS, {})) <= {"token_mask"}
    assert parts[0].drawn.equal(whole[0].drawn)
    assert_same(parts[0], whole[0])
    expected = TrajectoryBatch.concat(whole)
    joined = TrajectoryBatch.concat(parts)
    assert_same(joined, expected)
    rows = [2, 0, 2, len(joined) - 1]
    assert_same(joined[rows], expected[rows])
    assert_same(joined[1:3].fold()[[3, 0]], expected[1:3].fold()[[3, 0]])
    assert_same(joined.fold()[[]], expected.fold()[[]])
    for name, tensor in expected.forward_inputs.items():
        assert joined.get((INPUTS, name)).equal(tensor)
    assert joined.get((INPUTS, "nothing")) is None
    assert_same(join_shards(parts, 0, 3), join_shards(whole, 0, 3))


def test_joined_to_a_rollout_of_a_checkpoint_it_holds_its_inputs(whole: list[TrajectoryBatch]) -> None:
    both = TrajectoryBatch.concat([shared(whole)[0], whole[1]])
    assert SHARED not in both.meta and ROW not in both
    assert_same(both, TrajectoryBatch.concat(whole))


def test_a_file_of_a_rollout_has_the_inputs(whole: list[TrajectoryBatch], tmp_path: Path) -> None:
    save_rollout(tmp_path / "rollout", shared(whole)[1], {})
    found, _ = load_rollout(tmp_path / "rollout")
    assert_same(found, whole[1])
    assert found.meta == whole[1].meta


def test_messages_have_the_small_columns_only(whole: list[TrajectoryBatch]) -> None:
    batch = TrajectoryBatch.concat(shared(whole))
    received: list[int] = []
    for value in (batch, batch.with_inputs()):
        ours, theirs = socket_pair()
        before = totals().get("test")
        with ours, theirs:
            Connection(ours, CODEC).send(Frame(Kind.OK, value=value))
            found = Connection(theirs, CODEC, link="test").receive(time.monotonic() + 5).value
        received.append(totals()["test"].received - (before.received if before else 0))
        assert_same(found, TrajectoryBatch.concat(whole))
    inputs = sum(x.nbytes for name, x in batch.forward_inputs.items() if name != "token_mask")
    assert received[1] - received[0] > inputs - 4096


def test_rows_of_no_file_are_an_error(whole: list[TrajectoryBatch]) -> None:
    with raises_code("batch-index", BatchIndexError):
        shared(whole)[0].meta[SHARED].at(torch.tensor([1 << 32]))


def test_inputs_are_released_after_an_error(whole: list[TrajectoryBatch]) -> None:
    held: list[RowInputs | None] = []
    worker = ActorWorker.__new__(ActorWorker)
    worker._engine = cast("Any", SimpleNamespace(onload=lambda: None))
    worker._updates = [SimpleNamespace(hold=held.append, update=lambda: 1 / 0)]
    with pytest.raises(ZeroDivisionError):
        worker.call_update(0, "update", [], {}, shared(whole)[0].meta[SHARED])
    assert len(held) == 2 and held[1] is None


OFF = {
    "an own pipeline": {"pipeline": {"fn": "embodrl.pipelines.builtin:on_policy"}},
    "records": {"algorithm": {"loss_type": "sac", "adv_type": "sac"}},
    "more files than a message has": {"algorithm": {"rollout_epoch": 65}},
    "more files than a process opens": {"runner": {"max_staleness": 255}},
}


def placed(config: Config, rollout: str = "0:0-1", launcher: str = "process") -> bool:
    places = {"actor": "0:0-1", "rollout": rollout, "env": "0"}
    cluster = config.cluster.model_copy(update={"component_placement": places, "launcher": launcher, "device": "cpu"})
    config = config.model_copy(update={"cluster": cluster})
    return shares_inputs(config, solve(config).deployment)


@pytest.mark.parametrize("name", OFF)
def test_inputs_pass_the_main_process_where_files_can_not(name: str) -> None:
    actor = {"training_backend": "fsdp"}
    assert placed(training_config(actor=actor))
    assert not placed(training_config(actor=actor, **OFF[name]))


def test_inputs_pass_the_main_process_if_it_acts_or_other_machines_may() -> None:
    actor = {"training_backend": "fsdp"}
    assert not placed(training_config(actor=actor), rollout="0")
    assert not placed(training_config(actor=actor), launcher="ray")
