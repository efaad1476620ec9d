"""An episode as passed to a reward function.

Shapes: n actions, t chunks, A action dimensions, S state dimensions, V cameras, H x W image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Episode:
    """The argument of a reward function.

    Attributes:
        rewards: ``float32[n]``, environment rewards, one per action.
        success: the task has been solved.
        finished: the episode itself has ended, not only the rollout.
        task: task name.
        frames: ``uint8[t,H,W,3]``, first-camera image after each of the t chunks.
        policy_version: ``int64[t]``, number of updates behind the weights that chose each chunk.
        instruction: task instruction; this and all further fields are None if a workflow ran the episode, or if a
            checkpoint of an asynchronous run was written before the call ended.
        actions: ``float32[n,A]``, as executed, in environment units.
        states: ``float32[t,S]``, proprioception after each chunk; S = 0 without ``env.include_state``.
        images: ``uint8[t,V,H,W,3]``, images of all cameras after each chunk.
        start_images: ``uint8[V,H,W,3]``, before the first chunk; None where ``images`` is.
        start_state: ``float32[S]``, before the first chunk; None where ``states`` is.
    """

    rewards: Tensor
    success: bool
    finished: bool
    task: str
    frames: Tensor
    policy_version: Tensor
    instruction: str | None = None
    actions: Tensor | None = None
    states: Tensor | None = None
    images: Tensor | None = None
    start_images: Tensor | None = None
    start_state: Tensor | None = None


JUDGED = ("rewards", "success", "terminated", "truncated", "valid", "frames", "policy_version")
"""Columns of a ``TrajectoryBatch`` that ``episode_of`` reads."""


def episode_of(columns: Mapping[str, Tensor], task: str) -> Episode:
    """Return an episode as far as it got, from the ``JUDGED`` columns ``[t,...]`` of its chunks with valid actions."""
    valid = columns["valid"]
    ended = (columns["terminated"] | columns["truncated"])[-1] & valid[-1]
    return Episode(
        rewards=columns["rewards"][valid],
        success=bool(columns["success"][-1]),
        finished=bool(ended.any()),
        task=task,
        frames=columns["frames"],
        policy_version=columns["policy_version"],
    )
