"""Operations of a batch, compared with plain lists."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from batches import PATIENT, batches, numbered, rows_of, same
from expect import raises_code
from hypothesis import given
from hypothesis import strategies as st

from embodrl.data.columns import is_same
from embodrl.data.trajectory import TrajectoryBatch, batch_from_tensors, batch_to_tensors
from embodrl.errors import BatchError, BatchIndexError, BatchKeyError, BatchShapeError

TIMES = (None, 3)
ROWS = st.integers(0, 6)


@PATIENT
@given(batches(), st.data())
def test_parts_join_to_the_whole(batch: TrajectoryBatch, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 7))
    parts = batch.split(size)
    assert all(len(part) == size for part in parts[:-1]) and same(TrajectoryBatch.concat(parts), batch)
    cut = data.draw(st.integers(0, len(batch)))
    assert same(TrajectoryBatch.concat([batch[:cut], batch[cut:]]), batch)


@PATIENT
@given(batches(), st.data())
def test_columns_that_are_popped_and_put_back_give_the_same_batch(batch: TrajectoryBatch, data: st.DataObject) -> None:
    before = copy.deepcopy(batch)
    names = data.draw(st.lists(st.sampled_from(batch.names()), unique=True)) if batch.names() else []
    assert same(batch.to("cpu"), before) and same(batch.replace(), before)
    rest = batch.replace()
    taken = rest.pop(*names)
    assert same(taken, before.select(*names)) and not any(name in rest for name in names)
    assert same(rest.replace(**{name: taken.get(name) for name in names}), before)
    assert same(batch, before), "the batch itself stays as it is"


@PATIENT
@given(batches(timed=True))
def test_folding_puts_the_rows_of_one_step_after_another(batch: TrajectoryBatch) -> None:
    flat = batch.fold()
    num_steps = batch.batch_size[0]
    assert len(flat) == num_steps * len(batch) and flat.num_steps is None and flat.meta == batch.meta
    for path, folded in flat.leaves():
        assert is_same(folded.unflatten(0, batch.batch_size), batch[path])
    for name, folded in flat.objects.items():
        assert is_same(folded.reshape(*batch.batch_size, *folded.shape[1:]), batch[name])


@pytest.mark.parametrize("num_steps", TIMES)
@PATIENT
@given(num_rows=ROWS, data=st.data())
def test_rows_are_named_as_those_of_a_list(num_steps: int | None, num_rows: int, data: st.DataObject) -> None:
    batch, plain = numbered(num_rows, num_steps), list(range(num_rows))
    piece = data.draw(st.slices(num_rows))
    assert rows_of(batch[piece]) == plain[piece]
    mask = data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    wanted = [row for row, chosen in zip(plain, mask, strict=True) if chosen]
    assert rows_of(batch[np.array(mask, bool)]) == rows_of(batch[torch.tensor(mask, dtype=torch.bool)]) == wanted
    if num_rows:
        some = data.draw(st.lists(st.integers(-num_rows, num_rows - 1), max_size=4))
        assert rows_of(batch[some]) == rows_of(batch[torch.tensor(some, dtype=torch.int64)]) == [plain[i] for i in some]
        assert rows_of(batch[num_rows - 1]) == [num_rows - 1] and rows_of(batch[-1]) == [num_rows - 1]
        assert rows_of(batch[mask]) == wanted
    assert [rows_of(row) for row in batch] == [[i] for i in plain]


@pytest.mark.parametrize("num_steps", TIMES)
def test_rows_are_split(num_steps: int | None) -> None:
    assert [rows_of(part) for part in numbered(3, num_steps).split(2)] == [[0, 1], [2]]
    assert [len(part) for part in numbered(0, num_steps).split(2)] == [0]


@PATIENT
@given(num_rows=ROWS, size=st.integers(1, 4), epochs=st.integers(0, 2), seed=st.integers(0, 9))
def test_minibatches_are_even_seeded_and_cover_every_row(num_rows: int, size: int, epochs: int, seed: int) -> None:
    batch = numbered(num_rows)
    parts = [rows_of(part) for part in batch.minibatches(size, epochs, seed)]
    assert sorted(row for part in parts for row in part) == sorted(list(range(num_rows)) * epochs)
    assert not parts or (max(map(len, parts)) <= size and max(map(len, parts)) - min(map(len, parts)) <= 1)
    again = [rows_of(p) for p in batch.minibatches(size, epochs, torch.Generator().manual_seed(seed))]
    assert again == parts


def test_another_seed_gives_another_order() -> None:
    orders = {tuple(rows_of(next(numbered(50).minibatches(50, 1, seed)))) for seed in range(3)}
    assert len(orders) == 3


def test_columns_are_taken_set_and_removed() -> None:
    batch = numbered(2)
    assert batch.select(("group", "pair")).names() == ["group"] and batch.select("name").names() == ["name"]
    batch["score"] = torch.tensor([1.0, 2.0])
    batch["lists"] = [[1, 2], [3, 4]]
    assert batch[1]["lists"].tolist() == [[3, 4]] and batch["lists"].shape == (2,)
    assert batch["score"].tolist() == [1.0, 2.0] and ("group", "pair") in batch and ("group", "x") not in batch
    batch["lists"] = torch.zeros(2)
    assert "lists" not in batch.objects and batch["lists"].shape == (2,)
    assert batch.replace(score=None, lists=None).names() == ["row", "group", "name"]
    part = batch.pop(("group", "pair"), "score")
    assert batch.get(("group", "pair")) is None and part["score"].tolist() == [1.0, 2.0]
    assert part["group"]["pair"].shape == (2, 2) and "score" not in batch
    assert batch.to("meta")["row"].device.type == "meta" and batch["row"].device.type == "cpu"
    timed = numbered(2, 3)
    timed["label"] = ["a", "b"]
    assert timed["label"].tolist() == [["a", "b"]] * 3


def test_slices_share_memory_and_chosen_rows_do_not() -> None:
    batch = TrajectoryBatch({"x": torch.zeros(4)})
    batch[1:3]["x"][:] = 1.0
    batch[[0, 3]]["x"][:] = 2.0
    assert batch["x"].tolist() == [0, 1, 1, 0]


A, B = numbered(2), numbered(3)
WRONG: dict[str, tuple[Any, type[BatchError], list[object]]] = {
    "concat nothing": (lambda: TrajectoryBatch.concat([]), BatchError, []),
    "concat columns": (
        lambda: TrajectoryBatch.concat([A, A.select("row")]),
        BatchKeyError,
        ["group, group/pair, name, row", "batch 1"],
    ),
    "concat shapes": (
        lambda: TrajectoryBatch.concat([A, A, B.replace(group={"pair": torch.zeros(3, 4)})]),
        BatchShapeError,
        ["'group/pair'", "[2, 2]", "batch 0", "[3, 4]", "batch 2"],
    ),
    "concat dtypes": (
        lambda: TrajectoryBatch.concat([A, B.replace(row=torch.zeros(3))]),
        BatchShapeError,
        ["'row'", "torch.int64", "torch.float32"],
    ),
    "concat times": (
        lambda: TrajectoryBatch.concat([A, numbered(2, 3)]),
        BatchShapeError,
        ["[2]", "batch 1", "[3, 2]"],
    ),
    "concat meta": (
        lambda: TrajectoryBatch.concat([A, TrajectoryBatch(B.tensors, B.objects, {"origin": "else"})]),
        BatchError,
        ["'test'", "'else'"],
    ),
    "column": (lambda: A.replace(x=torch.zeros(3, 2)), BatchShapeError, ["'x'", "[3, 2]", "[2]"]),
    "scalar": (lambda: TrajectoryBatch({"x": torch.tensor(1.0)}), BatchShapeError, ["'x'"]),
    "no tensor": (lambda: TrajectoryBatch({"g": {"x": "text"}}), BatchShapeError, ["'g/x'", "str"]),
    "objects": (lambda: A.replace(x=["one"]), BatchShapeError, ["'x'", "[1]", "[2]"]),
    "twice": (lambda: TrajectoryBatch({"x": torch.zeros(1)}, {"x": ["a"]}), BatchKeyError, ["x"]),
    "no steps": (lambda: TrajectoryBatch({}, batch_size=[0, 2]), BatchShapeError, ["[0, 2]"]),
    "get": (lambda: A["rows"], BatchKeyError, ["'rows'", "group, name, row"]),
    "select": (lambda: A.select("row", ("group", "x")), BatchKeyError, ["'group/x'"]),
    "pop": (lambda: A.pop("x"), BatchKeyError, ["'x'"]),
    "row": (lambda: A[2], BatchIndexError, [2]),
    "rows": (lambda: A[[0, -3]], BatchIndexError, [-3, 2]),
    "mask": (lambda: A[[True]], BatchShapeError, [1, 2]),
    "floats": (lambda: A[torch.tensor([0.5])], BatchIndexError, ["torch.float32"]),
    "fold": (lambda: A.fold(), BatchShapeError, ["[2]"]),
    "split": (lambda: A.split(0), BatchError, [0]),
    "minibatches": (lambda: next(A.minibatches(0, 1, 0)), BatchError, [0]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_and_named(case: str) -> None:
    call, kind, names = WRONG[case]
    with raises_code(kind.code, kind, *names) as caught:
        call()
    assert type(caught.value) is kind and caught.value.hint
    assert rows_of(A) == [0, 1] and rows_of(B) == [0, 1, 2], "nothing has changed"


def rollout(**changes: Any) -> TrajectoryBatch:
    columns: dict[str, Any] = {
        "forward_inputs": {"seen": torch.arange(6.0).view(2, 3)},
        "values": torch.arange(9.0).view(3, 3, 1),
        "rewards": torch.zeros(2, 3, 4),
        "logprobs": torch.zeros(2, 3, 4, 7),
        "bootstrap_values": torch.zeros(2, 3, 1),
        "policy_version": torch.zeros(2, 3, dtype=torch.int64),
        "task_id": torch.zeros(2, 3, dtype=torch.int64),
    }
    columns |= dict.fromkeys(("valid", "terminated", "truncated"), torch.ones(2, 3, 4, dtype=torch.bool))
    return TrajectoryBatch.from_rollout(**(columns | changes))


def test_values_keep_the_one_after_the_rollout() -> None:
    batch = rollout()
    assert batch.values.flatten().tolist() == list(range(9))
    assert batch["values"].flatten().tolist() == list(range(6))
    assert batch["end_values"].flatten().tolist() == [0, 0, 0, 6, 7, 8]
    assert batch[[2, 0]].values[..., 0].tolist() == [[2, 0], [5, 3], [8, 6]]
    assert same(TrajectoryBatch.concat([batch[:1], batch[1:]]), batch)
    batch.values = batch.values + 1
    assert batch.values.flatten().tolist() == list(range(1, 10))
    for wrong in (torch.zeros(2, 3, 1), torch.zeros(4, 3, 1)):
        with raises_code("batch-shape", BatchShapeError, "[2, 3]"):
            batch.values = wrong


def test_attributes_are_the_columns() -> None:
    batch = rollout()
    assert batch.rewards is batch["rewards"] and batch.success is None and "success" not in batch
    batch.success = torch.ones(2, 3, dtype=torch.bool)
    batch.rewards[0] = 5.0
    batch.forward_inputs["seen"][0] = -1.0
    assert batch["rewards"].sum() == 60 and batch.forward_inputs["seen"].sum() == 9 and bool(batch["success"].all())
    batch.success = None
    assert same(batch, batch.replace(success=None)) and "success" not in batch
    with pytest.raises(AttributeError):
        batch.reward = batch.rewards  # pyright: ignore[reportAttributeAccessIssue]
    with raises_code("batch-key", BatchKeyError, "'rewards'"):
        _ = batch.select("valid").rewards
    with raises_code("batch-key", BatchKeyError, "bootstrap_values", "logprobs"):
        rollout(reward=torch.zeros(2, 3))
    with raises_code("batch-shape", BatchShapeError, "'logprobs'"):
        rollout(logprobs=torch.zeros(2, 4))


@PATIENT
@given(batches())
def test_tensors_of_a_checkpoint_give_the_same_columns(batch: TrajectoryBatch) -> None:
    batch = batch.select(*(path for path, _ in batch.leaves()))  # neither objects nor empty groups
    tensors = batch_to_tensors(batch)
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    assert same(batch_from_tensors(tensors, list(batch.batch_size), batch.meta), batch)


def test_objects_and_foreign_names_are_not_read_as_tensors() -> None:
    with raises_code("batch", BatchError, "name"):
        batch_to_tensors(numbered(2))
    with raises_code("batch", BatchError, "'weight'"):
        batch_from_tensors({"weight": torch.zeros(2)}, [2], {})
