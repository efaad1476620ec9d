"""An episode as a reward function gets it.

Shapes: n actions, t chunks, A action dimensions, S state dimensions, V cameras, H W image.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Episode:
    """What a reward function gets.

    Attributes:
        rewards: ``float32[n]``, those of the environment, one per action.
        success: the task has been solved.
        finished: the episode has ended, and not just the rollout.
        task: name of the task.
        frames: ``uint8[t,H,W,3]``, what the first camera sees after each of its t chunks.
        policy_version: ``int64[t]``, updates behind the weights that chose each chunk.
        instruction: task in words; this and all that follow are None where a workflow has run the episode, and where a
            checkpoint of an asynchronous run was written before the call had ended.
        actions: ``float32[n,A]``, as they were executed, in environment units.
        states: ``float32[t,S]``, proprioception after each chunk; S = 0 without ``env.include_state``.
        images: ``uint8[t,V,H,W,3]``, what all cameras see after each chunk.
        start_images: ``uint8[V,H,W,3]``, before the first chunk; None where ``images`` is.
        start_state: ``float32[S]``, the same.
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
