"""TrajectoryBatch: the batch of a rollout, with its usual columns as attributes.

Shapes: T policy steps (chunks), B environments, C actions per chunk, A action dimensions, K values per chunk (1 or C),
H x W image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from embodrl.data.batch import Batch, Key
from embodrl.data.columns import Group, group_at
from embodrl.data.shared_inputs import INPUTS, ROW, SHARED, SharedInputs, merged
from embodrl.errors import BatchError, BatchKeyError, BatchShapeError
from embodrl.types import TOKEN_MASK


class Column:
    """A column of every rollout."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, batch: Batch, owner: type | None = None) -> Tensor:
        return batch[self.name]

    def __set__(self, batch: Batch, value: Tensor) -> None:
        batch[self.name] = value


class OptionalColumn:
    """An optional column: None if absent; setting None removes it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, batch: Batch, owner: type | None = None) -> Tensor | None:
        return batch.get(self.name)

    def __set__(self, batch: Batch, value: Tensor | None) -> None:
        if value is not None:
            batch[self.name] = value
        elif self.name in batch:
            batch.pop(self.name)


class TrajectoryBatch(Batch):
    """A rollout, ``[T,B]``, or a batch derived from one.

    Columns may be changed in place. Accessing a missing attribute raises BatchKeyError, unless it may be None.

    Attributes:
        logprobs: ``float32[T,B,C,A]`` under the behaviour policy; ``[T,B,M,1]``, like other per-token columns, with
            ``TOKEN_MASK``.
        rewards: ``float32[T,B,C]``.
        valid: ``bool[T,B,C]``.
        terminated, truncated: ``bool[T,B,C]``.
        bootstrap_values: ``float32[T,B,K]``, value of the final observation where truncated, else 0.
        policy_version: ``int64[T,B]``, ``version`` of the train engine's weights that chose the chunk.
        value_version: ``int64[T,B]``, version of the weights that valued the observation after the chunk, for
            ``bootstrap_values`` and the last row of ``values``; -1 where these are zeros or of mixed versions. None if
            unknown.
        task_id: ``int64[T,B]``.
        success: ``bool[T,B]``, the task was solved in this chunk or earlier in the episode; None if unknown.
        group_id: ``int64[T,B]``, equal where episodes began in the same initial state; None if unknown.
        frames: ``uint8[T,B,H,W,3]``, the first camera's image after the chunk, or at the end of an episode that ends in
            it; None unless requested.
        call_id: ``int64[T,B]``, at the last chunk of an episode the number of the ``reward.fn`` call that judges it, -1
            elsewhere; None if no call was started.
        ref_logprobs: ``float32[T,B,C,A]`` under the reference policy; None without one.
        actions: ``float32[T,B,C,A]`` in environment units, or the policy's choice in their place (``types.CHOSEN``);
            like ``source`` and ``final_inputs``, only in off-policy runs.
        source: ``int8[T,B]``, who chose the chunk: 0 the policy, 1 an expert, 2 a human.
        final_inputs: group of columns ``[T,B,...]``, the policy's inputs (as from ``VLAPolicy.preprocess``) after the
            chunk where an episode was truncated or the rollout ended; zeros elsewhere.
        prox_logprobs: ``float32[T,B,C,A]`` under the weights at the start of the update; None if not decoupled.
        meta: scalars of the rollout: ``env_steps``, the simulated steps, including those of dropped episodes. Further
            ``SharedInputs``, if the inputs are in shared memory: ``forward_inputs`` reads them there.
    """

    __slots__ = ()

    logprobs = Column()
    rewards = Column()
    valid = Column()
    terminated = Column()
    truncated = Column()
    bootstrap_values = Column()
    policy_version = Column()
    task_id = Column()
    value_version = OptionalColumn()
    success = OptionalColumn()
    group_id = OptionalColumn()
    frames = OptionalColumn()
    call_id = OptionalColumn()
    ref_logprobs = OptionalColumn()
    prox_logprobs = OptionalColumn()
    actions = OptionalColumn()
    source = OptionalColumn()

    @classmethod
    def required(cls) -> tuple[str, ...]:
        """Return the names of the columns that every rollout has."""
        return tuple(name for name, column in vars(cls).items() if isinstance(column, Column))

    @classmethod
    def from_rollout(
        cls,
        *,
        forward_inputs: Mapping[str, Tensor],
        values: Tensor,
        rewards: Tensor,
        meta: Mapping[str, Any] | None = None,
        final_inputs: Mapping[str, Tensor] | None = None,
        **columns: Tensor | None,
    ) -> Self:
        """Return the batch of a rollout.

        ``forward_inputs`` and ``final_inputs`` are tensors ``[T,B,...]``, ``values`` ``float32[T+1,B,K]``, ``rewards``
        ``float32[T,B,C]``. ``columns`` are the other attributes; None omits one. Raises BatchKeyError for missing or
        unknown columns, BatchShapeError for columns that do not fit.
        """
        allowed = {name for name, kind in vars(cls).items() if isinstance(kind, Column | OptionalColumn)} - {"rewards"}
        required = {name for name in allowed if isinstance(vars(cls)[name], Column)}
        if not required <= columns.keys() <= allowed:
            raise BatchKeyError(
                f"a rollout with the columns {', '.join(sorted(columns))}",
                f"pass {', '.join(sorted(required))}, and of the others only {', '.join(sorted(allowed - required))}",
            )
        given = {name: column for name, column in columns.items() if column is not None}
        # Pass the batch size explicitly: without it a batch is flat.
        batch = cls({"forward_inputs": forward_inputs, "rewards": rewards, **given}, None, meta, rewards.shape[:2])
        batch.values = values
        if final_inputs is not None:
            batch["final_inputs"] = final_inputs
        return batch

    def get(self, key: Key) -> Any:
        found = super().get(key)
        group, *rest = (key,) if isinstance(key, str) else key
        if group != INPUTS or SHARED not in self.meta or (rest and found is not None):
            return found
        rows: Tensor = super().get(ROW)
        inputs = {name: x.unflatten(0, rows.shape) for name, x in self.meta[SHARED].at(rows.flatten()).items()}
        return inputs.get(rest[0]) if rest else inputs | (found or {})

    def with_inputs(self) -> Self:
        """Return the batch with the columns ``forward_inputs``, though they be in shared memory."""
        if SHARED not in self.meta:
            return self
        whole = self.replace(forward_inputs=self.forward_inputs, row=None)
        del whole.meta[SHARED]
        return whole

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]  (of Self)
        shared: list[SharedInputs] = [part.meta[SHARED] for part in parts if SHARED in part.meta]
        if len(shared) < len(parts):
            return super().concat([part.with_inputs() for part in parts])
        bare = [part.replace() for part in parts]
        for part in bare:
            part.meta[SHARED] = None
        whole = super().concat(bare)
        whole.meta[SHARED] = merged(shared)
        return whole

    @property
    def forward_inputs(self) -> dict[str, Tensor]:
        """Tensors ``[T,B,...]``, all inputs of ``evaluate_actions``."""
        return self["forward_inputs"]

    @property
    def token_mask(self) -> Tensor | None:
        """``bool[T,B,M]`` for policies whose tokens stand for a whole chunk (``TOKEN_MASK``); None otherwise."""
        return self.get(("forward_inputs", TOKEN_MASK))

    @property
    def drawn(self) -> Tensor:
        """Mask of the log-probs that count: ``bool[T,B,C]``, or ``bool[T,B,M]`` for chunk-level tokens.

        A loss sees chunk-level tokens as if they were actions of one number each.
        """
        tokens = self.token_mask
        return self.valid if tokens is None else tokens & self.valid.any(-1, keepdim=True)

    @property
    def values(self) -> Tensor:
        """``float32[T+1,B,K]``, a copy; the last row belongs to the observation after the rollout.

        Stored as ``values [T,B,K]`` and ``end_values [T,B,K]`` (the last row at its last step, 0 before), so that every
        column has the axes of the batch.
        """
        return torch.cat([self["values"], self["end_values"][-1:]])

    @values.setter
    def values(self, values: Tensor) -> None:
        if self.num_steps is None or len(values) != self.num_steps + 1:
            raise BatchShapeError(
                f"values of shape {list(values.shape)} for a batch of {list(self.batch_size)}",
                "pass [T+1, B, K], or set the column batch['values']",
            )
        end = torch.zeros_like(values[:-1])
        end[-1] = values[-1]
        self["values"] = values[:-1]
        self["end_values"] = end


def batch_to_tensors(batch: TrajectoryBatch) -> dict[str, Tensor]:
    """Return the columns under names that ``batch_from_tensors`` can read; BatchError if the batch has objects."""
    if batch.objects:
        raise BatchError(f"objects {', '.join(batch.objects)} are not tensors", "remove them from the batch")
    # A name may contain any character, so a path is encoded as JSON, not joined by a separator.
    return {json.dumps(list(path)): tensor for path, tensor in batch.leaves()}


def batch_from_tensors(tensors: dict[str, Tensor], batch_size: list[int], meta: dict[str, Any]) -> TrajectoryBatch:
    """Return the batch of ``batch_to_tensors``; ``batch_size`` is ``[N]`` or ``[T,N]``.

    Raises BatchError if the tensors are not those of a batch.
    """
    tree: Group = {}
    for name, tensor in tensors.items():
        try:
            path = json.loads(name)
            group_at(tree, path[:-1])[path[-1]] = tensor
        except (ValueError, TypeError, IndexError) as error:
            raise BatchError(f"'{name}' is not a column of a batch", "pass the output of batch_to_tensors") from error
    return TrajectoryBatch(tree, None, meta, batch_size)
