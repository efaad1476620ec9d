"""Training states written in shards, and read cut up otherwise: nothing is lost, torn ones are not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsdp_worker import Comparer
from tiny_training import training_config

from embodrl.config.schema import Config
from embodrl.scheduler.group import WorkerGroup

ALGORITHM = {"update_epoch": 1, "entropy_bonus": 0.01, "kl": {"coef": 0.1}}
START_S, CALL_S = 600.0, 600.0


def config_of(**actor: Any) -> Config:
    return training_config(algorithm=ALGORITHM, actor={"training_backend": "fsdp"} | actor)


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerGroup]:
    with WorkerGroup(Comparer, "comparer").launch(2, timeout_s=START_S) as group:
        yield group


@pytest.mark.long
def test_shards_of_two_processes_are_read_by_others_bit_exactly(two: WorkerGroup, tmp_path: Path) -> None:
    others = {"tp": config_of(tensor_parallel_size=2)}
    for found in two.reshard(config_of(), others, str(tmp_path)).result(CALL_S):
        assert found["native"] == found["tp"] == found["tp continued"] == 0


@pytest.mark.slow
@pytest.mark.long
def test_shards_of_four_processes_are_read_by_others_bit_exactly(tmp_path: Path) -> None:
    others = {"fsdp": config_of(micro_batch_size=1)}
    both = config_of(tensor_parallel_size=2, micro_batch_size=1)
    with WorkerGroup(Comparer, "comparer").launch(4, timeout_s=START_S) as four:
        for found in four.reshard(both, others, str(tmp_path)).result(CALL_S):
            assert found["native"] == found["fsdp"] == found["fsdp continued"] == 0


@pytest.mark.long
def test_a_full_disk_of_one_process_and_another_policy_are_reported_by_all(two: WorkerGroup, tmp_path: Path) -> None:
    for full, other in two.fail(config_of(), str(tmp_path)).result(CALL_S):
        assert full.startswith("OSError") and "No space left" in full
        assert other.startswith("CheckpointError") and "layers.1" in other and "is unknown" in other
