"""Batches as dictionaries of verl and AReaL: a round trip changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import JSON_THINGS, PATIENT, batches, same, tensor
from expect import raises_code
from hypothesis import given
from hypothesis import strategies as st

from embodrl.data.columns import is_same
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import BatchError, BatchKeyError, BatchShapeError
from embodrl.tools.converters.batches import (
    from_areal,
    from_areal_list,
    from_verl,
    to_areal,
    to_areal_list,
    to_verl,
)


@PATIENT
@given(batches())
def test_dictionaries_of_verl_give_the_same_batch(batch: TrajectoryBatch) -> None:
    parts = to_verl(batch)
    assert parts.keys() == {"batch", "non_tensor_batch", "meta_info"}
    assert all(len(tensor) == len(batch) for tensor in parts["batch"].values())
    assert all(isinstance(x, np.ndarray) and len(x) == len(batch) for x in parts["non_tensor_batch"].values())
    assert same(from_verl(parts), batch)


@PATIENT
@given(batches())
def test_dictionaries_of_areal_give_the_same_batch(batch: TrajectoryBatch) -> None:
    entries = to_areal(batch)
    for name, entry in entries.items():
        assert name == "embodrl" or (isinstance(entry, torch.Tensor | list) and len(entry) == len(batch))
    assert batch.num_steps is None or entries["attention_mask"].shape == (len(batch), batch.num_steps)
    assert same(from_areal(entries), batch)


@st.composite
def foreign_verl(draw: st.DrawFn) -> dict[str, Any]:
    num_rows = draw(st.integers(1, 4))
    things = np.empty(num_rows, dtype=object)
    for row in range(num_rows):
        things[row] = draw(JSON_THINGS)
    return {
        "batch": {"input_ids": tensor(draw(st.integers(0, 9)), [num_rows, 5], torch.int64)},
        "non_tensor_batch": {"raw_prompt": things, "index": np.arange(num_rows)},
        "meta_info": draw(st.dictionaries(st.text(max_size=3), JSON_THINGS, max_size=2)),
    }


@PATIENT
@given(foreign_verl())
def test_a_dataproto_comes_back_as_it_was(parts: dict[str, Any]) -> None:
    batch = from_verl(parts)
    assert batch["input_ids"] is parts["batch"]["input_ids"] and batch.meta == parts["meta_info"]
    assert is_same(to_verl(batch), parts)


def trajectory(length: int, start: int = 0) -> dict[str, Any]:
    """What a workflow of AReaL returns for one episode."""
    tokens = torch.arange(start, start + length)[None]
    return {
        "input_ids": tokens,
        "loss_mask": torch.ones_like(tokens),
        "logprobs": -tokens.float() / 8,
        "versions": torch.full_like(tokens, 3),
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
        "rewards": torch.tensor([start + 0.5]),
        "routed_experts": torch.full((1, length, 2), start),
        "multi_modal_input": [{"note": start}],
    }


@pytest.mark.parametrize("lengths", [[3], [2, 4, 1], [5, 5], []])
def test_trajectories_of_different_length_are_padded_and_cut_again(lengths: list[int]) -> None:
    parts = [trajectory(length, 10 * number) for number, length in enumerate(lengths)]
    if not parts:
        with raises_code("batch", BatchError):
            from_areal_list(parts)
        return
    batch = from_areal_list(parts)
    assert batch["input_ids"].shape == (len(lengths), max(lengths)) and batch["rewards"].shape == (len(lengths),)
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert is_same(to_areal_list(batch), parts)
    if lengths == [2, 4, 1]:
        assert batch["input_ids"].tolist() == [[0, 1, 0, 0], [10, 11, 12, 13], [20, 0, 0, 0]]


def test_a_rollout_becomes_rows_of_environments() -> None:
    valid = torch.tensor([[[True, True], [True, False]], [[False, False], [True, True]]])
    batch = TrajectoryBatch({"valid": valid, "task_id": torch.tensor([[0, 1], [2, 3]])}, None, {"env_steps": 5}, [2, 2])
    entries = to_areal(batch)
    assert entries["task_id"].tolist() == [[0, 2], [1, 3]]
    assert entries["attention_mask"].tolist() == [[True, False], [True, True]]
    assert entries["embodrl"]["meta"] == {"env_steps": 5}
    assert to_verl(batch)["batch"]["task_id"].tolist() == [[0, 2], [1, 3]]


def test_what_can_not_be_converted_is_refused_and_named() -> None:
    with raises_code("batch-key", BatchKeyError, "meta", "batch", "meta_info"):
        from_verl({"meta": {}})
    with raises_code("batch-shape", BatchShapeError, "'b'", "[3]", "2"):
        from_verl({"batch": {"a": torch.zeros(2), "b": torch.zeros(3)}})
    with raises_code("batch-shape", BatchShapeError, "'x'", "[1]", "[2]"):
        from_verl({"batch": {"a": torch.zeros(2)}, "non_tensor_batch": {"x": np.zeros(1)}})
    with raises_code("batch-key", BatchKeyError, "'a.b'"):
        to_verl(TrajectoryBatch({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}))
    with raises_code("batch-key", BatchKeyError, "'embodrl'"):
        to_verl(TrajectoryBatch({}, None, {"embodrl": 1}))
    with raises_code("batch-key", BatchKeyError, "attention_mask"):
        to_areal(TrajectoryBatch({}, {"attention_mask": ["x"]}, None, [2, 1]))
    with raises_code("batch", BatchError, "'rewards'"):
        from_areal({"rewards": 1.0})
    with raises_code("batch-key", BatchKeyError, "attention_mask"):
        from_areal_list([{"rewards": torch.zeros(1)}])
    with raises_code("batch-shape", BatchShapeError, "'logprobs'", "[1, 2]", "attention_mask", "[1, 3]"):
        from_areal_list([trajectory(3) | {"logprobs": torch.zeros(1, 2)}])
