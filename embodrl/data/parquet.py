"""Columns of parquet files, read with types and sizes checked. The only module that reads pyarrow tables.

Shapes: N rows, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from embodrl.data.demos import HINT, damaged, layout_error
from embodrl.data.lerobot import require
from embodrl.data.pictures import MEMORY_FRACTION
from embodrl.errors import EmbodrlError, FileDamagedError
from embodrl.fields import Fields, check_regular_file, with_whole_numbers

VALUE_BYTES = 8
"""Bytes of the largest number in a column."""


class Table:
    """Some columns of a parquet file: ``columns`` (None: all without the prefix ``exclude``) and ``optional`` ones.

    Raises EmbodrlError if the file is missing, damaged, lacks a column, or does not fit in memory.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str] | None = None,
        exclude: str | None = None,
        optional: Sequence[str] = (),
    ) -> None:
        pyarrow, parquet = require("pyarrow", "pyarrow.parquet")
        self.path = path
        if not path.is_file():
            raise damaged(path, "it is missing")
        try:
            check_regular_file(path)
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                present: list[str] = file.schema_arrow.names
                names = list(columns) if columns is not None else present
                if exclude is not None:
                    names = [name for name in names if not name.startswith(exclude)]
                if missing := [name for name in names if name not in present]:
                    problem = f"it has no column {', '.join(missing)}; it has {', '.join(present)}"
                    raise layout_error(path, problem, "map other column names with sft.keys")
                names += [name for name in optional if name in present and name not in names]
                if twice := [name for name in names if present.count(name) > 1]:
                    raise layout_error(path, f"it has several columns {twice[0]}", "write each column once")
                self._check_size(file.metadata, names)
                self._table: Any = file.read(columns=names)
        except (OSError, pyarrow.ArrowException) as error:
            raise damaged(path, f"{type(error).__name__} {error}") from error
        self.num_rows = int(self._table.num_rows)
        self.names: list[str] = list(self._table.column_names)

    def _check_size(self, metadata: Any, names: Sequence[str]) -> None:
        """Reject columns that do not fit in memory: with run-length encoding, a few bytes may hold millions of rows."""
        free = psutil.virtual_memory().available
        read = _columns_of(metadata, names)
        num_bytes = sum(_stated_bytes(metadata, group, number) for group, number in read)
        self._check_bytes(num_bytes, free)
        # A dictionary stores a value once, but it takes memory in each row that has it. No value is longer than the
        # stored total. The encodings stated by the file can't be relied on.
        texts = [(*place, _stated_bytes(metadata, *place)) for place in read if _is_text(metadata, *place)]
        at_most = num_bytes + sum(_part(metadata, *place).num_values * size for *place, size in texts)
        if at_most <= MEMORY_FRACTION * free:
            return
        for group, number, size in texts:
            num_bytes += max(0, self._decoded_bytes(metadata, group, number) - size)
            self._check_bytes(num_bytes, free)

    def _check_bytes(self, num_bytes: int, free: int) -> None:
        if not 0 <= num_bytes <= MEMORY_FRACTION * free:
            raise EmbodrlError(
                f"{self.path} states {num_bytes / 2**30:.1f} GiB of rows; {free / 2**30:.1f} GiB are free",
                "free memory, or use a smaller dataset",
                code="dataset-too-large",
            )

    def _decoded_bytes(self, metadata: Any, group: int, number: int) -> int:
        """Return the decoded size in bytes of a column of bytes or texts; reads each unique value once."""
        pyarrow, compute, parquet = require("pyarrow", "pyarrow.compute", "pyarrow.parquet")
        name = _part(metadata, group, number).path_in_schema
        with parquet.ParquetFile(self.path, page_checksum_verification=True, read_dictionary=[name]) as file:
            chunks = file.read_row_group(group, columns=[name]).column(0).chunks
        num_bytes = 0
        for values in chunks:
            while pyarrow.types.is_nested(values.type):
                values = values.flatten()[0] if pyarrow.types.is_struct(values.type) else values.flatten()
            if not pyarrow.types.is_dictionary(values.type):  # e.g. decimals
                num_bytes += values.nbytes
                continue
            lengths = compute.binary_length(values.dictionary).take(values.indices)
            num_bytes += int(compute.sum(lengths).as_py() or 0) + len(values) * VALUE_BYTES
        return num_bytes

    def rows(self) -> list[Fields]:
        """Return the rows as objects whose fields are checked on access."""
        content: list[dict[str, object]] = self._table.to_pylist()
        rows = [Fields(row, f"{self.path}, row {n}", FileDamagedError, HINT) for n, row in enumerate(content)]
        return [with_whole_numbers(row) for row in rows]

    def integers(self, name: str) -> NDArray[np.int64]:
        """Return a column of integers, or of whole floats, as ``int64[N]``."""
        column = self._table[name].combine_chunks()
        if hasattr(column.type, "value_type"):  # lists of one number
            column = column.flatten()
        numeric = str(column.type).startswith(("int", "uint", "float", "double"))
        if not numeric or column.null_count or len(column) != self.num_rows:
            raise self._unlike(f"{name} is {column.type} with {column.null_count} nulls, not integers")
        values = np.asarray(column.to_numpy())
        if (values % 1 != 0).any():  # NaN, too
            raise self._unlike(f"{name} holds {values[values % 1 != 0][0]:g}, not integers")
        return values.astype(np.int64)

    def _unlike(self, problem: str) -> EmbodrlError:
        return layout_error(self.path, problem, "write the column as the lerobot package does")

    def texts(self, name: str) -> list[str]:
        """Return a column of strings."""
        values: list[object] = self._table[name].to_pylist()
        if wrong := [value for value in values if not isinstance(value, str)]:
            raise self._unlike(f"{name} holds {wrong[0]!r:.60}, not a string")
        return [str(value) for value in values]

    def vectors(self, name: str, size: int) -> NDArray[np.float32]:
        """Return a column of numbers, or of (nested) lists with D = ``size`` numbers, as ``float32[N,D]``."""
        values = self._table[name].combine_chunks()
        shape = [len(values)]
        while hasattr(values.type, "value_type"):
            lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False)) if len(values) else [1]
            if values.null_count or len(lengths) != 1:
                raise self._unlike(f"the lists of {name} differ in length or are null")
            shape.append(int(lengths[0]))
            values = values.flatten()
        if not str(values.type).startswith(("int", "uint", "float", "double", "halffloat", "bool")):
            raise self._unlike(f"{name} is {values.type}, not numbers")
        if int(np.prod(shape[1:])) != size:
            raise self._unlike(f"{name} has {int(np.prod(shape[1:]))} numbers per row, and {size} by info.json")
        with np.errstate(over="ignore"):  # overflow gives infinity, reported with its frame
            return np.asarray(values.to_numpy(zero_copy_only=False), np.float32).reshape(-1, size)

    def seconds(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return some rows of a column of seconds as ``float64[n]``, NaN where null.

        Columns of timestamps are converted to seconds since the first row.
        """
        values = self._table[name].take(rows).combine_chunks()
        if str(values.type).startswith("timestamp"):
            nanoseconds = values.cast("timestamp[ns]").cast("int64")
            first = nanoseconds[0].as_py() if len(nanoseconds) else 0  # float64 can't hold nanoseconds since 1970
            return np.array([np.nan if x is None else (x - (first or 0)) * 1e-9 for x in nanoseconds.to_pylist()])
        if hasattr(values.type, "value_type"):  # lists of one number
            values = values.flatten()
        if not str(values.type).startswith(("int", "uint", "float", "double", "halffloat")):
            raise self._unlike(f"{name} is {values.type}, not seconds")
        if len(values) != len(rows):
            raise self._unlike(f"{name} has {len(values)} numbers in {len(rows)} rows")
        return np.asarray(values.to_numpy(zero_copy_only=False), np.float64)

    def pictures(self, name: str, rows: NDArray[np.int64]) -> list[bytes]:
        """Return the encoded images in some rows of a column."""
        values: list[object] = self._table[name].take(rows).to_pylist()
        result: list[bytes] = []
        for row, value in zip(rows, values, strict=True):
            encoded: object = value.get("bytes") if isinstance(value, dict) else None
            if not isinstance(encoded, bytes) or not encoded:
                raise self._unlike(f"row {row}: {name} holds no image; it must be embedded in the file")
            result.append(encoded)
        return result


def _columns_of(metadata: Any, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the row groups, and the column numbers in them, that hold some columns."""
    prefixes = tuple(f"{name}." for name in names)
    schema = metadata.schema
    numbers = [n for n in range(metadata.num_columns) if f"{schema.column(n).path}.".startswith(prefixes)]
    return [(group, number) for group in range(metadata.num_row_groups) for number in numbers]


def _part(metadata: Any, group: int, number: int) -> Any:
    return metadata.row_group(group).column(number)


def _stated_bytes(metadata: Any, group: int, number: int) -> int:
    part = _part(metadata, group, number)
    value_bytes = max(VALUE_BYTES, metadata.schema.column(number).length or 0)  # fixed-length types state their length
    return max(part.total_uncompressed_size, part.num_values * value_bytes)


def _is_text(metadata: Any, group: int, number: int) -> bool:
    return _part(metadata, group, number).physical_type == "BYTE_ARRAY"
