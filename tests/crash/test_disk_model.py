"""The model of the disk, against states that were worked out by hand."""

from __future__ import annotations

from disk_model import Disk, joined, read_tree, states, write_tree
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


def test_a_sync_of_the_file_keeps_its_content_and_one_of_the_directory_its_name() -> None:
    ops = [Op("create", "x"), Op("write", "x", data=b"abcd"), Op("sync", "x")]
    assert left(ops, {}) == {of(x=b"abcd"), of()}
    assert left([*ops, Op("sync", ".")], {}) == {of(x=b"abcd")}


def test_an_overwritten_file_may_be_a_mixture() -> None:
    ops = [Op("truncate", "x"), Op("write", "x", data=b"oXYZW")]
    # Zeros take the place of blocks beyond the old size; torn: "o" is equal, then half of the rest is new.
    assert left(ops, {"x": OLD}) == {of(x=b"oXYZW"), of(x=OLD), of(x=OLD + b"\0"), of(x=b"oXY.")}


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


def test_removals_and_links_follow() -> None:
    ops = [Op("symlink", "best", "step_1"), Op("unlink", "x"), Op("rename", "d", "e"), Op("rmdir", "f")]
    start = {"x": OLD, "d": None, "d/y": NEW, "f": None}
    disk = Disk(start)
    for op in ops:
        disk.apply(op)
    assert dict(disk.tree()) == {"best": "step_1", "e": None, "e/y": NEW}
    assert frozenset(start.items()) in left(ops, start)


def test_writes_that_continue_each_other_count_as_one() -> None:
    ops = [Op("write", "x", data=b"ab"), Op("write", "x", offset=2, data=b"c"), Op("write", "x", offset=9, data=b"d")]
    assert joined(ops) == [Op("write", "x", data=b"abc"), ops[2]]


def test_trees_are_written_and_read_back(tmp_path) -> None:
    tree = {"d": None, "d/x": b"\0\1", "link": "d/x"}
    write_tree(tree, tmp_path / "made")
    assert read_tree(tmp_path / "made") == tree
