"""Rollouts for several training processes: every process gets all small columns, and the policy inputs of its own rows.

Shapes: T policy steps (chunks), B environments; rows are those of ``Batch.fold``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodrl.data.batch import Group
from embodrl.data.shared_inputs import SHARED, RowInputs, SharedColumns, SharedInputs
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import BatchIndexError
from embodrl.types import TOKEN_MASK


def share_of(num_rows: int, num_shares: int, share: int) -> Tensor:
    """Return which of ``num_rows`` rows a share has, ``int64``, in order; the first share is the largest."""
    return torch.arange(num_rows).tensor_split(num_shares)[share]


def read_by(rows: Tensor, num_shares: int) -> list[Tensor]:
    """Return the rows that each share reads of a minibatch ``int64[N]``.

    A smaller share may have a micro-batch less. It then repeats the first row, which does not count, as the others'
    collective calls wait for it.
    """
    own = [rows[share_of(len(rows), num_shares, share)] for share in range(num_shares)]
    return [part if len(part) == len(own[0]) else torch.cat([part, rows[:1]]) for part in own]


@dataclass(frozen=True)
class HeldInputs(RowInputs):
    """Policy inputs of some rows.

    Attributes:
        rows: ``int64[N]``, their numbers, in increasing order.
        inputs: tensors ``[N,...]``.
    """

    rows: Tensor
    inputs: dict[str, Tensor]

    def at(self, rows: Tensor) -> dict[str, Tensor]:
        places = torch.searchsorted(self.rows, rows).clamp_max(len(self.rows) - 1)
        if not torch.equal(self.rows[places], rows):
            raise BatchIndexError("rows whose inputs another process has", "this is a bug: please report it")
        return {name: tensor[places] for name, tensor in self.inputs.items()}


def separate(batch: TrajectoryBatch, shares: Sequence[Tensor]) -> tuple[TrajectoryBatch, list[HeldInputs]]:
    """Return a batch ``[T,B]`` without its large columns, with ``ROW``, and for each share the inputs of its rows.

    Token masks stay: the counts of a minibatch are those of all its rows. Frames are left out.

    Args:
        batch: a rollout.
        shares: row numbers ``int64[N]`` of each share.
    """
    small, flat = _separated(batch.replace(frames=None))
    held: list[HeldInputs] = []
    for rows in shares:
        mine = torch.unique(rows)
        held.append(HeldInputs(mine, {name: tensor[mine] for name, tensor in flat.items()}))
    return small, held


def shared_memory_batch(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Return a batch ``[T,B]`` whose large columns are in a memory file (``SharedInputs``), with the number 0.

    Raises:
        MessageError: memory is lacking.
    """
    small, flat = _separated(batch)
    small.meta[SHARED] = SharedInputs({0: SharedColumns.of(flat)})
    return small


def _separated(batch: TrajectoryBatch) -> tuple[TrajectoryBatch, dict[str, Tensor]]:
    """Return a batch with ``ROW`` in place of its large columns, and these, ``[T*B,...]`` each."""
    inputs = batch.forward_inputs
    masks: Group = {name: tensor for name, tensor in inputs.items() if name == TOKEN_MASK}
    numbers = torch.arange(batch.valid.shape[:2].numel()).view(batch.valid.shape[:2])
    flat = {name: tensor.flatten(0, 1) for name, tensor in inputs.items() if name != TOKEN_MASK}
    return batch.replace(forward_inputs=masks or None, row=numbers), flat
