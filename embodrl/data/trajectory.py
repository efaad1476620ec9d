"""TrajectoryBatch: the batch of a rollout, with its usual columns as attributes.

Shapes: T policy steps (chunks), B environments, C actions per chunk, A action dimensions, K values per chunk (1 or C),
H x W image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from embodrl.data.batch import Batch
from embodrl.data.columns import Group, group_at
from embodrl.errors import BatchError, BatchKeyError, BatchShapeError
from embodrl.types import TOKEN_MASK


class Column:
    """A column that every rollout has."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, batch: Batch, owner: type | None = None) -> Tensor:
        return batch[self.name]

    def __set__(self, batch: Batch, value: Tensor) -> None:
        batch[self.name] = value


class OptionalColumn:
    """A column that some rollouts have; None without, and setting None removes it."""

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

    Columns may be changed in place. Attributes raise BatchKeyError where the batch has no such column, except those
    that may be None.

    Attributes:
        logprobs: ``float32[T,B,C,A]`` under the policy that acted; these and others ``[T,B,M,1]`` with ``TOKEN_MASK``.
        rewards: ``float32[T,B,C]``.
        valid: ``bool[T,B,C]``.
        terminated, truncated: ``bool[T,B,C]``.
        bootstrap_values: ``float32[T,B,K]``, value of the final observation where truncated, else 0.
        policy_version: ``int64[T,B]``, the train engine's ``version`` whose weights chose the chunk.
        value_version: ``int64[T,B]``, the version of the weights that computed the value of the observation after the
            chunk, for ``bootstrap_values`` and the last row of ``values``; -1 where they are zeros or of mixed
            versions. None if not known.
        task_id: ``int64[T,B]``.
        success: ``bool[T,B]``, the task has been solved earlier in the episode or in this chunk; None if not known.
        group_id: ``int64[T,B]``, equal where episodes began in the same initial state; None if not known.
        frames: ``uint8[T,B,H,W,3]``, the first camera's image after the chunk, at the end of an episode if it ends
            there; None unless requested.
        call_id: ``int64[T,B]``, at the last chunk of an episode the number of the call of ``reward.fn`` that judges it,
            -1 elsewhere; None where no call has begun.
        ref_logprobs: ``float32[T,B,C,A]`` under the reference policy; None without one.
        actions: ``float32[T,B,C,A]`` in environment units, or what the policy chose in their place (``types.CHOSEN``);
            this and the next two of off-policy runs only.
        source: ``int8[T,B]``, who chose the chunk: 0 the policy, 1 an expert, 2 a human.
        final_inputs: a group of columns ``[T,B,...]``, what the policy sees after the chunk where an episode was
            truncated or the rollout ended there, as ``VLAPolicy.preprocess`` returns it; zeros elsewhere.
        prox_logprobs: ``float32[T,B,C,A]`` under the weights at the start of the update; None where not decoupled.
        meta: scalars about the rollout: ``env_steps``, the simulated steps, including those of dropped episodes.
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

        Args:
            forward_inputs: tensors ``[T,B,...]``.
            values: ``float32[T+1,B,K]``.
            rewards: ``float32[T,B,C]``.
            meta: about the rollout.
            final_inputs: tensors ``[T,B,...]``; None leaves them out.
            columns: the other attributes; None leaves one out.

        Raises:
            BatchKeyError: a column is missing or unknown.
            BatchShapeError: a column does not fit.
        """
        allowed = {name for name, kind in vars(cls).items() if isinstance(kind, Column | OptionalColumn)} - {"rewards"}
        required = {name for name in allowed if isinstance(vars(cls)[name], Column)}
        if not required <= columns.keys() <= allowed:
            raise BatchKeyError(
                f"a rollout with the columns {', '.join(sorted(columns))}",
                f"pass {', '.join(sorted(required))}, and of the others only {', '.join(sorted(allowed - required))}",
            )
        given = {name: column for name, column in columns.items() if column is not None}
        # The batch size is given because a batch is flat without it.
        batch = cls({"forward_inputs": forward_inputs, "rewards": rewards, **given}, None, meta, rewards.shape[:2])
        batch.values = values
        if final_inputs is not None:
            batch["final_inputs"] = final_inputs
        return batch

    @property
    def forward_inputs(self) -> dict[str, Tensor]:
        """Tensors ``[T,B,...]``, everything that ``evaluate_actions`` needs."""
        return self["forward_inputs"]

    @property
    def token_mask(self) -> Tensor | None:
        """``bool[T,B,M]`` of policies whose tokens stand for a whole chunk (``TOKEN_MASK``); None of others."""
        return self.get(("forward_inputs", TOKEN_MASK))

    @property
    def drawn(self) -> Tensor:
        """Which log-probs count: ``valid bool[T,B,C]`` or, where there are, tokens ``bool[T,B,M]`` of valid chunks.

        A loss sees tokens that stand for a whole chunk as if they were actions of one number each.
        """
        tokens = self.token_mask
        return self.valid if tokens is None else tokens & self.valid.any(-1, keepdim=True)

    @property
    def values(self) -> Tensor:
        """``float32[T+1,B,K]``, a copy; the last row belongs to the observation after the rollout.

        The columns are ``values [T,B,K]``, and ``end_values [T,B,K]`` with the last row at its last step and 0 before,
        so that every column has the axes of the batch.
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
    """Return the columns under names that ``batch_from_tensors`` can read, for files that hold more than a batch.

    Raises:
        BatchError: the batch has objects, which are not tensors.
    """
    if batch.objects:
        raise BatchError(f"objects {', '.join(batch.objects)} are not tensors", "remove them from the batch")
    # A name may hold any character, so a path is written as JSON and not joined by one of them.
    return {json.dumps(list(path)): tensor for path, tensor in batch.leaves()}


def batch_from_tensors(tensors: dict[str, Tensor], batch_size: list[int], meta: dict[str, Any]) -> TrajectoryBatch:
    """Return the batch of ``batch_to_tensors``.

    Args:
        tensors: the result of ``batch_to_tensors``.
        batch_size: ``[N]`` or ``[T,N]``.
        meta: description of the batch.

    Raises:
        BatchError: these are not the tensors of a batch.
    """
    tree: Group = {}
    for name, tensor in tensors.items():
        try:
            path = json.loads(name)
            group_at(tree, path[:-1])[path[-1]] = tensor
        except (ValueError, TypeError, IndexError) as error:
            raise BatchError(f"'{name}' is not a column of a batch", "read what batch_to_tensors wrote") from error
    return TrajectoryBatch(tree, None, meta, batch_size)
