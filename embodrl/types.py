"""Records exchanged between packages.

Shapes: T policy steps (chunks), B environments, C actions in a chunk, A action dimensions, V cameras, H x W image, S
state dimensions. Arrays on the environment side are numpy, tensors on the policy side torch; this module imports no
torch, so that simulators can run without the training stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import EnvError

if TYPE_CHECKING:
    from torch import Tensor

Decoding = Literal["greedy", "sampled", "mean"]
"""How actions are derived from a distribution: the most probable, a sample, or the nearest to its mean."""
ActMode = Literal["train", "eval", "mean"]
"""Requested actions of a policy: a sample, the most probable, or the nearest to the mean."""
MODES: dict[Decoding, ActMode] = {"greedy": "eval", "sampled": "train", "mean": "mean"}


@dataclass(frozen=True)
class CameraSpec:
    """A camera that the policy sees; sizes in pixels."""

    name: str
    height: int
    width: int


@dataclass(frozen=True)
class EnvSpec:
    """Interface of a VectorEnv.

    Attributes:
        num_envs: number of environments, B.
        cameras: the V cameras, in the order of ``Observation.images``.
        state_dim: S; 0 without proprioception.
        action_dim: A.
        action_low, action_high: bounds of an action in environment units, A numbers each: always -1 and 1, which
            policies, noise and experts assume.
        max_chunk: largest C that the buffers hold.
        tasks: tasks of the episodes.
        control_hz: actions per second of the robot's time.

    Raises:
        EnvError: an action has other bounds.
    """

    num_envs: int
    cameras: tuple[CameraSpec, ...]
    state_dim: int
    action_dim: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    max_chunk: int
    tasks: tuple[str, ...]
    control_hz: float = 20.0

    def __post_init__(self) -> None:
        for number, bounds in enumerate(zip(self.action_low, self.action_high, strict=True)):
            if bounds != (-1, 1):
                raise EnvError(
                    f"number {number} of an action is between {bounds[0]:g} and {bounds[1]:g}, not -1 and 1",
                    "give the environment the bounds -1 and 1, and map them to its own in step, as"
                    " embodrl/envs/gymnasium/env.py does",
                    code="action-bounds",
                )


@dataclass
class Observation:
    """Input of a policy.

    Attributes:
        images: ``uint8[B,V,H,W,3]``, RGB.
        state: ``float32[B,S]``.
        instruction: B instructions in words.
        task_id: ``int32[B]``, index into ``EnvSpec.tasks``.
    """

    images: NDArray[np.uint8]
    state: NDArray[np.float32]
    instruction: list[str]
    task_id: NDArray[np.int32]

    @property
    def batch_size(self) -> int:
        return len(self.images)

    def select(self, indices: NDArray[np.int64]) -> Observation:
        """Return copies of the given rows."""
        return Observation(
            self.images[indices],
            self.state[indices],
            [self.instruction[i] for i in indices],
            self.task_id[indices],
        )

    @staticmethod
    def concat(parts: list[Observation]) -> Observation:
        return Observation(
            np.concatenate([p.images for p in parts]),
            np.concatenate([p.state for p in parts]),
            [text for p in parts for text in p.instruction],
            np.concatenate([p.task_id for p in parts]),
        )


@dataclass(frozen=True)
class ChunkPrefix:
    """Remainders of the chunks that robots are executing, for a policy that continues them.

    Attributes:
        actions: ``float32[B,N,A]`` in environment units, from the time of the observation on.
        length: ``int64[B]``, 0 to N: number of valid actions.
        delay: ``int64[B]``, at most ``length``: number of actions executed before the new chunk arrives.
    """

    actions: NDArray[np.float32]
    length: NDArray[np.int64]
    delay: NDArray[np.int64]

    @staticmethod
    def stack(rows: Sequence[tuple[NDArray[np.float32], int]]) -> ChunkPrefix:
        """Return the prefix of several rows, each given as its actions ``[n,A]`` and delay."""
        longest = max(len(actions) for actions, _ in rows)
        padded = np.stack([np.pad(actions, ((0, longest - len(actions)), (0, 0))) for actions, _ in rows])
        lengths = np.array([len(actions) for actions, _ in rows], np.int64)
        return ChunkPrefix(padded, lengths, np.array([delay for _, delay in rows], np.int64))


@dataclass
class EnvStep:
    """Result of a chunk of actions.

    Attributes:
        observation: next observation; after an auto-reset, of the new episode.
        reward: ``float32[B,C]``, 0 where not valid.
        valid: ``bool[B,C]``, whether the sub-step was simulated (the episode had not ended before it).
        terminated, truncated: ``bool[B,C]``, whether the episode ended at that sub-step.
        success: ``bool[B]``, whether the task has been solved at some time in this chunk's episode.
        episode_return: ``float32[B]`` and episode_length: ``int32[B]`` (environment steps) of that episode so far.
        episode_seed: ``int64[B]``, reset seed of that episode; -1 if unseeded.
        final_mask: ``bool[B]``, whether the episode was truncated and ``final_observation`` holds its last observation.
        final_observation: valid only in the rows of ``final_mask``; other rows are undefined.
    """

    observation: Observation
    reward: NDArray[np.float32]
    valid: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_]
    episode_return: NDArray[np.float32]
    episode_length: NDArray[np.int32]
    episode_seed: NDArray[np.int64]
    final_mask: NDArray[np.bool_]
    final_observation: Observation | None

    @property
    def done(self) -> NDArray[np.bool_]:
        """``bool[B]``: whether the episode ended within this chunk."""
        return np.asarray((self.terminated | self.truncated).any(axis=1))


CHOSEN = "chosen"
"""Key in ``PolicyOutput.forward_inputs``: an off-policy actor's choice ``float32[B,...]``, if not the actions."""
TOKEN_MASK = "token_mask"
"""Key in ``forward_inputs`` of policies whose tokens stand for a whole chunk: mask ``bool[B,M]`` of the M tokens.

Their log-probs and entropies are ``float32[B,M,1]``, whatever C and A.
"""


@dataclass
class PolicyOutput:
    """Output of a policy for an observation.

    Attributes:
        actions: ``float32[B,C,A]`` numpy, in environment units.
        logprobs: ``float32[B,C,A]``, at the finest level; ``float32[B,M,1]`` with ``TOKEN_MASK``.
        values: ``float32[B,1]`` (chunk level) or ``float32[B,C]``; None if not requested.
        forward_inputs: batch-first tensors, with all inputs of ``evaluate_actions``.
        version: number of updates that the weights had seen; set by a rollout engine.
    """

    actions: NDArray[np.float32]
    logprobs: Tensor
    values: Tensor | None
    forward_inputs: dict[str, Tensor]
    version: int = 0


@dataclass
class EvalOutput:
    """Log-probs of given actions under the current weights.

    Attributes:
        logprobs: ``float32[B,C,A]``; ``float32[B,M,1]`` with ``TOKEN_MASK``.
        entropy: shaped like ``logprobs``, in nats, or None.
        values: ``float32[B,1]`` or ``float32[B,C]``, or None.
        errors: ``float32[B,N,C,A]``, differences of N velocities of a flow policy from their targets, or None.
        router_loss: ``float32[]``, load-balancing loss of a mixture of experts, without its weight, or None.
    """

    logprobs: Tensor
    entropy: Tensor | None
    values: Tensor | None
    errors: Tensor | None = None
    router_loss: Tensor | None = None


@dataclass(frozen=True)
class SamplingParams:
    """Token sampling; rollout and training share one object, so that log-probs agree.

    Attributes:
        temperature: > 0.
        top_k: keep the k most probable action bins; 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
