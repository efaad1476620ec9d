"""Columns of parquet files, read with their types and sizes checked. The only reader of pyarrow tables.

Shapes: N rows, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from embodrl.data.demos import HINT, damaged
from embodrl.data.lerobot import require
from embodrl.errors import FileDamagedError
from embodrl.fields import Fields

MEMORY_FRACTION = 0.7
"""Of the free memory, which data may fill."""


class Table:
    """Some columns of a parquet file.

    Args:
        path: of the file.
        columns: to read; None reads those that ``exclude`` does not match.
        exclude: prefix of columns that are left out.

    Raises:
        FileDamagedError: the file is missing, damaged, lacks a column, or does not fit in memory.
    """

    def __init__(self, path: Path, columns: Sequence[str] | None = None, exclude: str | None = None) -> None:
        pyarrow, parquet = require("pyarrow", "pyarrow.parquet")
        self.path = path
        if not path.is_file():
            raise damaged(path, "it is missing")
        try:
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                present: list[str] = file.schema_arrow.names
                names = list(columns) if columns is not None else present
                if exclude is not None:
                    names = [name for name in names if not name.startswith(exclude)]
                if missing := [name for name in names if name not in present]:
                    raise damaged(path, f"it has no column {', '.join(missing)}")
                groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
                self._check_size(sum(group.total_byte_size for group in groups))
                self._table: Any = file.read(columns=names)
        except (OSError, pyarrow.ArrowException) as error:
            raise damaged(path, f"{type(error).__name__} {error}") from error
        self.num_rows = int(self._table.num_rows)
        self.names: list[str] = list(self._table.column_names)

    def _check_size(self, num_bytes: int) -> None:
        free = psutil.virtual_memory().available
        if not 0 <= num_bytes <= MEMORY_FRACTION * free:
            raise damaged(self.path, f"it states {num_bytes / 2**30:.1f} GiB of rows; {free / 2**30:.1f} GiB are free")

    def rows(self) -> list[Fields]:
        """Return the rows as objects whose fields are checked when they are read."""
        content: list[dict[str, object]] = self._table.to_pylist()
        return [Fields(row, f"{self.path}, row {n}", FileDamagedError, HINT) for n, row in enumerate(content)]

    def integers(self, name: str) -> NDArray[np.int64]:
        """Return a column of integers as ``int64[N]``."""
        column = self._table[name]
        if column.null_count or not str(column.type).startswith(("int", "uint")):
            raise damaged(self.path, f"{name} is {column.type} with {column.null_count} nulls, not integers")
        return np.asarray(column.to_numpy(), np.int64)

    def texts(self, name: str) -> list[str]:
        """Return a column of strings."""
        values: list[object] = self._table[name].to_pylist()
        if wrong := [value for value in values if not isinstance(value, str)]:
            raise damaged(self.path, f"{name} holds {wrong[0]!r:.60}, not a string")
        return [str(value) for value in values]

    def vectors(self, name: str, size: int) -> NDArray[np.float32]:
        """Return a column of numbers, or of (nested) lists of them, as ``float32[N,D]``.

        Args:
            name: of the column.
            size: D.
        """
        values = self._table[name].combine_chunks()
        shape = [len(values)]
        while hasattr(values.type, "value_type"):
            lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False)) if len(values) else [1]
            if values.null_count or len(lengths) != 1:
                raise damaged(self.path, f"the lists of {name} differ in length, or are null")
            shape.append(int(lengths[0]))
            values = values.flatten()
        if not str(values.type).startswith(("int", "uint", "float", "double", "halffloat", "bool")):
            raise damaged(self.path, f"{name} is {values.type}, not numbers")
        if int(np.prod(shape[1:])) != size:
            raise damaged(self.path, f"{name} has {int(np.prod(shape[1:]))} numbers per row, and {size} by info.json")
        with np.errstate(over="ignore"):  # what overflows is infinite, which is reported with its frame
            return np.asarray(values.to_numpy(zero_copy_only=False), np.float32).reshape(-1, size)

    def pictures(self, name: str, rows: NDArray[np.int64]) -> list[bytes]:
        """Return the encoded pictures in some rows of a column."""
        values: list[object] = self._table[name].take(rows).to_pylist()
        result: list[bytes] = []
        for row, value in zip(rows, values, strict=True):
            encoded: object = value.get("bytes") if isinstance(value, dict) else None
            if not isinstance(encoded, bytes) or not encoded:
                raise damaged(self.path, f"row {row}: {name} holds no picture; it must be embedded in the file")
            result.append(encoded)
        return result
