"""Policy inputs of a rollout outside its batch, which then has the number of each row in their place.

Shapes: T policy steps (chunks), B environments, N rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from embodrl.data.batch import Batch
from embodrl.errors import BatchIndexError
from embodrl.processes.codec import aligned
from embodrl.processes.memory_file import MemoryFile
from embodrl.storage.files import raw_bytes

RowsT = TypeVar("RowsT", bound=Batch)
INPUTS = "forward_inputs"
ROW = "row"
"""Column with the number of each row, ``int64``, in a batch whose inputs are elsewhere."""
SHARED = "shared_inputs"
"""Entry of a batch's meta: its ``SharedInputs``."""
_PLACE_BITS = 32  # of a row's number: its place in a file; the bits above are the number of the file


class RowInputs(ABC):
    """Policy inputs by the numbers of rows."""

    @abstractmethod
    def at(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the inputs of rows ``int64[M]``, ``[M,...]`` each.

        Raises:
            BatchIndexError: a row is not here.
        """

    def fill(self, chunks: RowsT, device: torch.device) -> RowsT:
        """Return flat chunks with their inputs, on a device."""
        found = {name: tensor.to(device, non_blocking=True) for name, tensor in self.at(chunks[ROW].cpu()).items()}
        masks: dict[str, Tensor] = chunks.get(INPUTS) or {}
        return chunks.replace(forward_inputs=masks | found)


@dataclass(frozen=True)
class SharedColumns:
    """Columns of N rows in a memory file.

    Attributes:
        layout: dtype, shape ``[N,...]`` and offset in bytes of each column.
    """

    file: MemoryFile
    layout: dict[str, tuple[str, list[int], int]]

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> SharedColumns:
        """Write columns ``[N,...]`` to a new file; raises MessageError if memory is lacking."""
        blobs = {name: np.frombuffer(raw_bytes(column), np.uint8) for name, column in columns.items()}
        layout: dict[str, tuple[str, list[int], int]] = {}
        end = 0
        for name, column in columns.items():
            layout[name] = (str(column.dtype).removeprefix("torch."), list(column.shape), end)
            end = end + aligned(blobs[name].nbytes)
        return cls(MemoryFile.of(list(blobs.values())), layout)

    @cached_property
    def columns(self) -> dict[str, Tensor]:
        """The columns, without copying."""
        memory = torch.frombuffer(self.file.mapped(), dtype=torch.uint8)
        found: dict[str, Tensor] = {}
        for name, (dtype, shape, start) in self.layout.items():
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            raw = memory[start : start + empty.numel() * empty.element_size()]
            found[name] = raw.view(empty.dtype).view(shape)
        return found


@dataclass(frozen=True)
class SharedInputs(RowInputs):
    """Policy inputs of a rollout in memory files, by the number of each file.

    The batch passes from process to process without them: a process maps the files, and reads the rows that it needs.
    """

    files: dict[int, SharedColumns]

    @property
    def num_bytes(self) -> int:
        return sum(part.file.num_bytes for part in self.files.values())

    def at(self, rows: Tensor) -> dict[str, Tensor]:
        numbers = rows >> _PLACE_BITS
        places = rows - (numbers << _PLACE_BITS)
        wanted: list[int] = numbers.unique().tolist()
        if not wanted:
            return {name: column[:0] for part in self.files.values() for name, column in part.columns.items()}
        if not self.files.keys() >= set(wanted):
            raise BatchIndexError("rows whose inputs are in no file", "this is a bug: please report it")
        if len(wanted) == 1:
            return {name: column[places] for name, column in self.files[wanted[0]].columns.items()}
        found: dict[str, Tensor] = {}
        for number in wanted:
            mine = numbers == number
            for name, column in self.files[number].columns.items():
                target = found.setdefault(name, column.new_empty((len(rows), *column.shape[1:])))
                target[mine] = column[places[mine]]
        return found


def numbered(batch: RowsT, number: int) -> RowsT:
    """Return a batch of ``shared_memory_batch``, whose file is numbered 0, with another number for it."""
    found = batch.replace(row=batch[ROW] + (number << _PLACE_BITS))
    found.meta[SHARED] = SharedInputs({number: batch.meta[SHARED].files[0]})
    return found


def merged(parts: list[SharedInputs]) -> SharedInputs:
    """Return the files of all parts."""
    return SharedInputs({number: file for part in parts for number, file in part.files.items()})
