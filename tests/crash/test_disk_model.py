"""The model of the disk, against states that were worked out by hand."""

from __future__ import annotations

from disk_model import Disk, states
from recorder import Op

OLD, NEW = b"old.", b"newer."
REPLACED = [
    Op("create", ".x.partial"),
    Op("write", ".x.partial", data=NEW),
    Op("sync", ".x.partial"),
    Op("rename", ".x.partial", "x"),
    Op("sync", "."),
]


def left(ops: list[Op], start: dict[str, bytes | str | None]) -> set[frozenset[tuple[str, object]]]:
    """All directories that may be left by a cut after the last operation."""
    disk = Disk(start)
    for op in ops:
        disk.apply(op)
    return {frozenset(tree.items()) for _, tree in disk.after_power_cut()}


def of(**files: bytes | str | None) -> frozenset[tuple[str, object]]:
    return frozenset(files.items())


def test_a_file_that_is_written_in_place_may_be_empty_zero_torn_or_complete() -> None:
    ops = [Op("create", "x"), Op("write", "x", data=b"abcd")]
    assert left(ops, {}) == {of(x=b"abcd"), of(x=b""), of(x=bytes(4)), of(x=b"ab"), of()}


def test_an_atomic_replacement_leaves_the_old_or_the_new_file_under_the_name() -> None:
    found = states(REPLACED, {"x": OLD})
    assert {state.tree["x"] for state in found} == {OLD, NEW}
    last = left(REPLACED, {"x": OLD})
    assert last == {of(x=NEW)}, "after the sync of the directory nothing can be lost"


def test_a_replacement_without_a_sync_of_the_content_may_leave_an_empty_file() -> None:
    careless = [op for op in REPLACED if op != Op("sync", ".x.partial")]
    assert b"" in {state.tree["x"] for state in states(careless, {"x": OLD})}


def test_directories_lag_behind_one_at_a_time() -> None:
    ops = [Op("mkdir", "a"), Op("sync", "."), Op("create", "a/x"), Op("create", "y")]
    whole = {"a": None, "a/x": b"", "y": b""}
    assert left(ops, {}) == {
        frozenset(whole.items()),
        frozenset({"a": None}.items()),  # names lost
        frozenset({"a": None, "y": b""}.items()),
        frozenset({"a": None, "a/x": b""}.items()),
    }
