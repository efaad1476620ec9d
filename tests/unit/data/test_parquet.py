"""Parquet files that are not what they should be: the rest is tested with LeRobot datasets."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from expect import raises_code

from embodrl.data.parquet import Table

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "action", "action"]), path)
    assert Table(path, ["a"]).names == ["a"]
    for columns in (["action"], None):
        with raises_code("dataset-layout"):
            Table(path, columns)


def test_rows_that_do_not_fit_in_memory_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes may hold millions of rows."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.array([0] * 1_000_000), "b": pa.array([[0.0] * 2] * 1_000_000)}), path)
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16_000_000))
    assert Table(path, ["a"]).num_rows == 1_000_000
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("it was read"))
    for columns in (["b"], None):
        with raises_code("dataset-too-large"):
            Table(path, columns)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.parquet")
    with raises_code("file-damaged"):
        Table(tmp_path / "a.parquet")


def limit_memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


@pytest.mark.parametrize("kind", ["bytes", "struct", "list", "fixed"])
def test_one_value_of_many_rows_counts_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A dictionary stores it once."""
    path = tmp_path / "a.parquet"
    value = os.urandom(100_000)
    row = {"struct": {"bytes": value, "path": "a"}, "list": [value]}.get(kind, value)
    rows = pa.array([row] * 300, pa.binary(len(value)) if kind == "fixed" else None)
    pq.write_table(pa.table({"a": rows, "b": list(range(300))}), path)
    assert path.stat().st_size < 200_000
    limit_memory(monkeypatch, 60_000_000)
    assert Table(path, ["a"]).num_rows == 300
    limit_memory(monkeypatch, 30_000_000)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("it was read"))
    with raises_code("dataset-too-large"):
        Table(path, ["a"])


def test_values_that_differ_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    values = [{"bytes": os.urandom(10_000), "path": None if n % 2 else f"{n}"} for n in range(300)]
    pairs = pa.array([[("key", "value")]] * 300, pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"a": values, "b": [["a", None]] * 300, "c": pairs}), path)
    limit_memory(monkeypatch, 6_000_000)
    assert Table(path).rows()[7].content["a"] == values[7]
