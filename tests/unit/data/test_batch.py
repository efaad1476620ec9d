"""Operations of a batch: against plain lists, and each with its inverse."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from batches import PATIENT, batches, numbered, rows_of
from hypothesis import given
from hypothesis import strategies as st

from embodrl.data.balance import balanced_order
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import BatchError, BatchIndexError, BatchKeyError, BatchShapeError

TIMES = (None, 3)
ROWS = st.integers(0, 6)


@PATIENT
@given(batches(), st.data())
def test_parts_join_to_the_whole(batch: TrajectoryBatch, data: st.DataObject) -> None:
    num_rows = len(batch)
    parts = batch.chunk(data.draw(st.sampled_from([n for n in range(1, num_rows + 2) if num_rows % n == 0])))
    assert len({len(part) for part in parts}) == 1 and TrajectoryBatch.concat(parts).equals(batch)
    size = data.draw(st.integers(1, 7))
    parts = batch.split(size)
    assert all(len(part) == size for part in parts[:-1]) and TrajectoryBatch.concat(parts).equals(batch)
    cut = data.draw(st.integers(0, num_rows))
    assert TrajectoryBatch.concat([batch[:cut], batch[cut:]]).equals(batch)


@PATIENT
@given(batches(), st.data())
def test_what_is_undone_is_as_before(batch: TrajectoryBatch, data: st.DataObject) -> None:
    before = copy.deepcopy(batch)
    order = torch.tensor(data.draw(st.permutations(range(len(batch)))), dtype=torch.int64)
    assert batch.reorder(order).reorder(order.argsort()).equals(before)
    times = data.draw(st.integers(1, 3))
    assert batch.repeat(times)[::times].equals(before)
    assert batch.repeat(times, interleave=False)[: len(batch)].equals(before)
    padded, missing = batch.pad(times)
    assert len(padded) % times == 0 and 0 <= missing < times and padded.unpad(missing).equals(before)
    names = data.draw(st.lists(st.sampled_from(batch.names()), unique=True)) if batch.names() else []
    swapped = dict(zip(names, [*names[1:], *names[:1]], strict=True)) | ({names[0]: "new"} if len(names) == 1 else {})
    assert batch.rename(swapped).rename({new: old for old, new in swapped.items()}).equals(before)
    assert batch.to("cpu").equals(before) and batch.replace().equals(before)
    rest = batch.replace()
    taken = rest.pop(*names)
    assert taken.equals(before.select(*names)) and not any(name in rest for name in names)
    assert rest.union(taken).equals(before) and taken.union(rest).equals(before)
    assert batch.union(before).equals(before) and batch.equals(before), "the batch itself stays as it is"


@PATIENT
@given(batches(timed=True))
def test_time_is_folded_away_and_back(batch: TrajectoryBatch) -> None:
    flat = batch.fold()
    assert len(flat) == batch.batch_size[0] * batch.batch_size[1] and flat.num_steps is None
    assert flat.unfold(batch.batch_size[0]).equals(batch)
    for path, folded in flat.leaves():
        column = batch[path]
        assert all(
            torch.equal(folded[t * len(batch) : (t + 1) * len(batch)].isnan(), x.isnan()) for t, x in enumerate(column)
        )


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
def test_rows_are_repeated_padded_and_drawn(num_steps: int | None) -> None:
    batch = numbered(3, num_steps)
    assert rows_of(batch.repeat(2)) == [0, 0, 1, 1, 2, 2]
    assert rows_of(batch.repeat(2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    padded, missing = batch.pad(8)
    assert rows_of(padded) == [0, 1, 2, 0, 1, 2, 0, 1] and missing == 5
    assert numbered(0, num_steps).pad(4)[1] == 0 and batch.pad(3) == (batch, 0)
    assert rows_of(batch.reorder([2, 0, 1])) == [2, 0, 1]
    assert [rows_of(part) for part in batch.chunk(3)] == [[0], [1], [2]]
    assert [rows_of(part) for part in batch.split(2)] == [[0, 1], [2]]
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


@PATIENT
@given(st.lists(st.integers(0, 1000), max_size=24), st.integers(1, 4))
def test_balanced_parts_differ_by_no_more_than_the_longest_row(lengths: list[int], num_parts: int) -> None:
    lengths = lengths[: len(lengths) // num_parts * num_parts]
    order = balanced_order(lengths, num_parts)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    sums = torch.tensor(lengths, dtype=torch.int64)[order].view(num_parts, -1).sum(1)
    assert int(sums.max() - sums.min()) <= max(lengths, default=0)


def test_rows_are_balanced_by_length() -> None:
    batch, order = numbered(6, 2).balance(2, [9, 1, 8, 2, 7, 3])
    # by hand: 9 + 8 + ... can't be halved to 15 with three rows each other than {9, 1, ...}: 9+3+2 = 14, 8+7+1 = 16
    parts = [sorted(rows_of(part)) for part in batch.chunk(2)]
    sums = sorted(sum([9, 1, 8, 2, 7, 3][row] for row in part) for part in parts)
    assert sums == [14, 16] and rows_of(batch) == order.tolist()
    assert rows_of(batch.reorder(order.argsort())) == list(range(6))
    plain = sorted(range(6), key=lambda row: row)
    assert [sum([9, 1, 8, 2, 7, 3][row] for row in part) for part in (plain[:3], plain[3:])] == [18, 12]


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
    assert batch.get(("group", "pair")) is None and batch.union(part)["score"].tolist() == [1.0, 2.0]
    other = TrajectoryBatch({}, {"tag": ["x", "y"]}, {"source": 1}, [2])
    assert batch.union(other).meta == {"origin": "test", "source": 1} and batch.union(other)["tag"].tolist() == [
        "x",
        "y",
    ]
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
WRONG: dict[str, tuple[Any, type[BatchError], str]] = {
    "union sizes": (lambda: A.union(B), BatchShapeError, r"\[2\] and one of \[3\]"),
    "union values": (
        lambda: A.union(A.replace(row=torch.tensor([0, 7]))),
        BatchError,
        r"'row' is torch.int64 \[2\] in one batch and torch.int64 \[2\]",
    ),
    "union meta": (lambda: A.union(TrajectoryBatch({}, None, {"origin": 3}, [2])), BatchError, "'test' .* and 3 in"),
    "union nested": (
        lambda: A.union(TrajectoryBatch({"group": {"pair": torch.zeros(2)}})),
        BatchError,
        r"'group/pair' is torch.float32 \[2, 2\] .* \[2\]",
    ),
    "concat nothing": (lambda: TrajectoryBatch.concat([]), BatchError, "no batches"),
    "concat columns": (
        lambda: TrajectoryBatch.concat([A, A.select("row")]),
        BatchKeyError,
        "batch 0 has the columns group, group/pair, name, row, and batch 1 row",
    ),
    "concat shapes": (
        lambda: TrajectoryBatch.concat([A, A, B.replace(group={"pair": torch.zeros(3, 4)})]),
        BatchShapeError,
        r"'group/pair' is torch.float32 \[2, 2\] in batch 0 and torch.float32 \[3, 4\] in batch 2",
    ),
    "concat dtypes": (
        lambda: TrajectoryBatch.concat([A, B.replace(row=torch.zeros(3))]),
        BatchShapeError,
        "'row' is torch.int64 .* torch.float32",
    ),
    "concat times": (
        lambda: TrajectoryBatch.concat([A, numbered(2, 3)]),
        BatchShapeError,
        r"\[2\] and batch 1 \[3, 2\]",
    ),
    "concat meta": (
        lambda: TrajectoryBatch.concat([A, TrajectoryBatch(B.tensors, B.objects, {"origin": "else"})]),
        BatchError,
        "'test'.*'else'",
    ),
    "column": (lambda: A.replace(x=torch.zeros(3, 2)), BatchShapeError, r"'x' has shape \[3, 2\], and the batch \[2\]"),
    "scalar": (lambda: TrajectoryBatch({"x": torch.tensor(1.0)}), BatchShapeError, "'x' is a scalar"),
    "no tensor": (lambda: TrajectoryBatch({"g": {"x": "text"}}), BatchShapeError, "'g/x' is no tensor but str"),
    "objects": (lambda: A.replace(x=["one"]), BatchShapeError, r"'x' have shape \[1\], and the batch \[2\]"),
    "twice": (lambda: TrajectoryBatch({"x": torch.zeros(1)}, {"x": ["a"]}), BatchKeyError, "x: among"),
    "no steps": (lambda: TrajectoryBatch({}, batch_size=[0, 2]), BatchShapeError, r"\[0, 2\]"),
    "get": (lambda: A["rows"], BatchKeyError, "no column 'rows'; it has group, name, row"),
    "select": (lambda: A.select("row", ("group", "x")), BatchKeyError, "no column 'group/x'"),
    "pop": (lambda: A.pop("x"), BatchKeyError, "no column 'x'"),
    "rename what is not there": (lambda: A.rename({"x": "y"}), BatchKeyError, "no column 'x'"),
    "rename to the same": (lambda: A.rename({"row": "name"}), BatchKeyError, "called name"),
    "row": (lambda: A[2], BatchIndexError, "row 2 .* of 2"),
    "rows": (lambda: A[[0, -3]], BatchIndexError, "-3 of 2"),
    "mask": (lambda: A[[True]], BatchShapeError, "a mask of 1 for 2 rows"),
    "floats": (lambda: A[torch.tensor([0.5])], BatchIndexError, "float32"),
    "order": (lambda: A.reorder([0, 0]), BatchIndexError, "2 rows"),
    "chunk": (lambda: B.chunk(2), BatchShapeError, "3 rows can't be divided by 2"),
    "balance": (lambda: B.balance(2, [1, 2, 3]), BatchShapeError, "3 rows can't be divided by 2"),
    "lengths": (lambda: B.balance(2, [1, 2]), BatchShapeError, "2 lengths for 3 rows"),
    "unpad": (lambda: A.unpad(3), BatchIndexError, "3 of 2 rows"),
    "fold": (lambda: A.fold(), BatchShapeError, r"\[2\] has no time"),
    "unfold": (lambda: B.unfold(2), BatchShapeError, r"\[3\] can't be unfolded into 2"),
    "split": (lambda: A.split(0), BatchError, "parts of 0"),
    "repeat": (lambda: A.repeat(0), BatchError, "0 times"),
    "pad": (lambda: A.pad(0), BatchError, "multiple of 0"),
    "minibatches": (lambda: next(A.minibatches(0, 1, 0)), BatchError, "minibatches of 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_and_named(case: str) -> None:
    call, kind, message = WRONG[case]
    with pytest.raises(kind, match=message) as caught:
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
    assert TrajectoryBatch.concat([batch[:1], batch[1:]]).equals(batch) and batch.fold().unfold(2).equals(batch)
    batch.values = batch.values + 1
    assert batch.values.flatten().tolist() == list(range(1, 10))
    for wrong in (torch.zeros(2, 3, 1), torch.zeros(4, 3, 1)):
        with pytest.raises(BatchShapeError, match=r"for a batch of \[2, 3\]"):
            batch.values = wrong


def test_attributes_are_the_columns() -> None:
    batch = rollout()
    assert batch.rewards is batch["rewards"] and batch.success is None and "success" not in batch
    batch.success = torch.ones(2, 3, dtype=torch.bool)
    batch.rewards[0] = 5.0
    batch.forward_inputs["seen"][0] = -1.0
    assert batch["rewards"].sum() == 60 and batch.forward_inputs["seen"].sum() == 9 and bool(batch["success"].all())
    batch.success = None
    assert batch.equals(batch.replace(success=None)) and "success" not in batch
    with pytest.raises(AttributeError):
        batch.reward = batch.rewards  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(BatchKeyError, match="no column 'rewards'"):
        _ = batch.select("valid").rewards
    with pytest.raises(BatchKeyError, match="give bootstrap_values, logprobs"):
        rollout(reward=torch.zeros(2, 3))
    with pytest.raises(BatchShapeError, match="'logprobs'"):
        rollout(logprobs=torch.zeros(2, 4))
