"""The interface of every VLA policy.

Shapes: B batch, C actions in a chunk, A action dimensions, V cameras, H x W image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodrl.data.rng import RandomSource
from embodrl.errors import BatchShapeError, EmbodrlError
from embodrl.models.common import checkpoint
from embodrl.models.common.chat import WrittenText
from embodrl.models.common.condition import Condition, condition_observation
from embodrl.models.common.merging import merged_state_dict
from embodrl.types import MODES, ActMode, ChunkPrefix, Decoding, EvalOutput, Observation, PolicyOutput, SamplingParams


def check_decoding(decoding: Decoding, offered: Sequence[Decoding], who: str) -> None:
    """Raise ``EmbodrlError`` unless a policy or engine, named ``who``, offers a decoding."""
    if decoding not in offered:
        raise EmbodrlError(
            f"{who} has no decoding '{decoding}': it has {', '.join(offered)}",
            f"set env.eval.decoding or serve.decoding to {' or '.join(offered)}",
            code="policy-has-no-decoding",
        )


IMITATION = "imitation"
TRAINABLE_HEAD = "model.trainable=head"
CHECKPOINTING = "actor.gradient_checkpointing=true"
OPTIONAL: dict[str, tuple[str, ...]] = {
    IMITATION: ("sft_inputs", "sft_loss"),
    TRAINABLE_HEAD: ("head_parameters",),
    CHECKPOINTING: ("enable_gradient_checkpointing",),
}
"""Optional policy feature -> the ``VLAPolicy`` methods that a policy must define to offer it."""


class VLAPolicy(nn.Module, ABC):
    """A policy that maps camera images and an instruction to a chunk of actions.

    RL needs ``preprocess``, ``predict_action_batch`` and ``evaluate_actions``. The other methods have defaults that
    suit most networks; the methods in ``OPTIONAL`` raise by default.

    Attributes:
        num_action_chunks: C.
        action_dim: A.
        draws_by_row: ``predict_action_batch`` also accepts a RowGenerators.
        writes_text: its chunks are messages: it defines ``text_of``.
        decodings: supported ways to choose actions; the first is used for the main figures.
        condition: advantage condition appended to every instruction at inference (``model.condition``).
        reads_cameras: whether its input ``images`` has an axis for cameras.
        seen_state_dim: S of the states seen so far in this process; None before the first.
    """

    num_action_chunks: int
    action_dim: int
    draws_by_row: ClassVar[bool] = False
    writes_text: ClassVar[bool] = False
    decodings: ClassVar[tuple[Decoding, ...]] = ("greedy", "sampled")
    condition: Condition | None = None
    seen_state_dim: int | None = None
    reads_cameras: bool = True

    @property
    def action_horizon(self) -> int:
        """Number of actions that imitation learns at once; a flow policy may predict more than the C it executes."""
        return self.num_action_chunks

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def check_instructions(self, instructions: Sequence[str], num_cameras: int) -> None:
        """Raise ``EmbodrlError`` for an instruction whose prompt is too long, on the meta device.

        Prompts that include the state are not checked.
        """

    @abstractmethod
    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return model inputs on the policy's device: batch first, of fixed shape, images still uint8."""

    @abstractmethod
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Choose a chunk of actions per row: sampled in ``train`` mode, the most probable in ``eval`` mode.

        In ``mean`` mode the actions nearest to the mean of the distribution; raises ``EmbodrlError`` if ``decodings``
        does not offer the mode.
        """

    def check_mode(self, mode: ActMode) -> None:
        """Raise ``EmbodrlError`` unless ``decodings`` offers a mode."""
        check_decoding(next(name for name, one in MODES.items() if one == mode), self.decodings, type(self).__name__)

    def predict(
        self,
        images: NDArray[np.uint8],
        instruction: str | Sequence[str],
        state: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Choose the most probable chunk of actions, as for deployment.

        Args:
            images: RGB ``uint8[H,W,3]`` of one camera, ``uint8[V,H,W,3]`` of V cameras in the order of ``env.cameras``,
                or a batch ``uint8[B,V,H,W,3]``.
            instruction: one instruction, or B for a batch.
            state: proprioception ``float32[S]`` or ``float32[B,S]``, for policies that use it.

        Returns:
            Actions ``float32[C,A]`` (``[B,C,A]`` for a batch) in environment units, -1 to 1, in execution order.
        """
        is_batch = np.ndim(images) == 5
        pictures = np.asarray(images)
        pictures = pictures if is_batch else pictures[None] if pictures.ndim == 4 else pictures[None, None]
        if pictures.ndim != 5 or pictures.shape[-1] != 3 or pictures.dtype != np.uint8:
            raise BatchShapeError(
                f"images have shape {list(np.shape(images))} and type {np.asarray(images).dtype}",
                "give uint8 [H,W,3], [V,H,W,3] or [B,V,H,W,3]",
                code="predict-images",
            )
        rows = len(pictures)
        texts = [instruction] * rows if isinstance(instruction, str) else list(instruction)
        states = np.zeros((rows, 0), np.float32) if state is None else np.asarray(state, np.float32).reshape(rows, -1)
        observation = condition_observation(
            Observation(pictures, states, texts, np.zeros(rows, np.int32)), self.condition
        )
        with torch.no_grad():
            output = self.predict_action_batch(observation, "eval", SamplingParams(), compute_values=False)
        return output.actions if is_batch else output.actions[0]

    def continue_chunk(self, observation: Observation, prefix: ChunkPrefix, guidance: float) -> NDArray[np.float32]:
        """Return the most probable chunks ``float32[B,C,A]`` that continue chunks in execution; only flow policies can.

        Args:
            observation: observation of B robots.
            prefix: remaining actions of the chunks in execution.
            guidance: maximum weight of the pull towards the prefix.
        """
        del observation, prefix, guidance
        raise EmbodrlError(
            f"{type(self).__name__} can't continue a chunk",
            "leave 'rtc' out of the request: real-time chunking is for flow policies",
            code="policy-continues-no-chunk",
        )

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        """Return values ``float32[B,1]`` or ``float32[B,C]``, without gradients; ``EmbodrlError`` without a critic.

        By default computed along with the most probable actions; families that need no actions for it override this.
        """
        values = self.predict_action_batch(observation, "eval", SamplingParams()).values
        if values is None:
            raise EmbodrlError(
                f"{type(self).__name__} has no values, which algorithms with a critic need",
                "return values from predict_action_batch and evaluate_actions, or choose an algorithm without a critic,"
                " such as algorithm=grpo",
                code="policy-has-no-values",
            )
        return values

    @abstractmethod
    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
    ) -> EvalOutput:
        """Return log-probs, entropy and values of the actions stored in ``forward_inputs``, with gradients."""

    def text_of(self, forward_inputs: Mapping[str, Tensor]) -> list[WrittenText]:
        """Return the B messages in the ``forward_inputs`` of an output, as far as ``TOKEN_MASK`` reaches.

        Only families that write text have any.
        """
        raise EmbodrlError(
            f"{type(self).__name__} writes no text",
            "choose a family that does, such as model=planner, or ask for actions: engine.act",
            code="policy-writes-no-text",
        )

    def sft_inputs(self, observation: Observation, actions: Tensor) -> dict[str, Tensor]:
        """Return the inputs of ``sft_loss``; ``actions float32[B,C,A]`` in environment units."""
        raise not_offered(self, IMITATION)

    def out_of_range(self, actions: NDArray[np.floating], state: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return which ``actions [N,A]`` (environment units), at ``state [N,S]``, the policy can't learn to output.

        By default none; families with action statistics override this.
        """
        return np.zeros(actions.shape, np.bool_)

    def sft_loss(self, batch: dict[str, Tensor], label_smoothing_bins: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the imitation loss (scalar) and scalars to log (e.g. token accuracy, L1 error)."""
        raise not_offered(self, IMITATION)

    def trainable_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the non-empty groups of trainable parameters; one shared by ``parts`` is in the first group only."""
        groups: dict[str, list[nn.Parameter]] = {}
        known: set[int] = set()
        for name, part in self.parts().items():
            groups[name] = [p for p in part.parameters() if p.requires_grad and id(p) not in known]
            known.update(map(id, groups[name]))
        return {name: parameters for name, parameters in groups.items() if parameters}

    def parts(self) -> dict[str, nn.Module]:
        """Return the network's parts by group, as ``model.trainable`` and learning rates address them.

        Token families have ``vision``, ``projector``, ``language``; flow families ``vision``, ``language``,
        ``action_expert`` and, with Flow-Noise, ``noise_head``; both have ``value_head`` if there is a critic. The
        default is every module attribute of the policy, under its attribute name.

        Raises:
            EmbodrlError: a parameter is outside of these modules, so nothing would train it.
        """
        if outside := [name for name, _ in self.named_parameters(recurse=False)]:
            raise EmbodrlError(
                f"{type(self).__name__} has parameters outside of its modules: {', '.join(outside)}",
                "put them into an nn.Module, or define parts()",
                code="policy-parts",
            )
        return dict(self.named_children())

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the output layer, the only ones that ``model.trainable: head`` trains."""
        raise not_offered(self, TRAINABLE_HEAD)

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return parameters that exist only for checkpoint compatibility and affect no output; by default none."""
        return []

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        """Return modules and their positions per row at maximum prompt length, for `embodrl plan`; others count 1."""
        return []

    def cache_shape(self, num_cameras: int) -> tuple[int, int, int]:
        """Return layers, numbers per key, and positions of the cache used to decide a row; zeros without a cache."""
        return 0, 0, 0

    def chosen_bytes(self, num_cameras: int) -> int:
        """Return the bytes that a rollout stores per chunk besides its inputs; by default tokens and log-probs."""
        return (torch.int64.itemsize + torch.float32.itemsize) * self.num_action_chunks * self.action_dim

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the activations of every block in the backward pass; call it after ``eval()``, which undoes it."""
        raise not_offered(self, CHECKPOINTING)

    def public_name(self, module: str) -> str:
        """Return the public checkpoint name of a module of ``self.model``."""
        return module

    def save_pretrained(self, directory: Path) -> None:
        """Write the policy in its family's public layout (config, safetensors, tokenizer, statistics).

        The default writes a config.json that names the class, and all weights with adapters merged, for
        ``checkpoint.load_strict``. Overrides must write through ``storage.atomic.atomic_directory``: callers rely on
        atomic replacement of the directory and on disk failures being ``OutputError``.
        """
        with checkpoint.policy_directory(directory) as staging:
            checkpoint.save_weights(merged_state_dict(self, deferred=True), staging)
            checkpoint.write_json(staging / checkpoint.CONFIG_FILE, {"architectures": [type(self).__name__]})

    def save_lerobot(self, directory: Path, cameras: Sequence[str]) -> list[str]:
        """Write the policy in lerobot's layout, with its processor files; return notes on how it behaves in lerobot.

        Args:
            directory: new directory.
            cameras: image names in the order of ``env.cameras``.

        Raises:
            EmbodrlError: lerobot lacks the family, or can't express how the policy acts.
            OutputError: the directory can't be written.
        """
        raise EmbodrlError(
            f"lerobot has no layout for {type(self).__name__}",
            "export it in its public layout (--layout public)",
            code="export-layout",
        )


def lacking(policy: VLAPolicy, feature: str) -> list[str]:
    """Return the methods that a policy still has to define to offer a feature of ``OPTIONAL``."""
    return [name for name in OPTIONAL[feature] if getattr(type(policy), name) is getattr(VLAPolicy, name)]


def require(policy: VLAPolicy, feature: str, asked_by: str = "") -> None:
    """Raise ``EmbodrlError`` if a policy lacks a feature of ``OPTIONAL``, before any work starts.

    ``asked_by`` is the setting or command that needs the feature; "" for the feature itself.
    """
    if lacking(policy, feature):
        raise not_offered(policy, feature, asked_by)


def not_offered(policy: VLAPolicy, feature: str, asked_by: str = "") -> EmbodrlError:
    """Return the error that ``require`` raises."""
    methods = " and ".join(lacking(policy, feature) or OPTIONAL[feature])
    return EmbodrlError(
        f"{asked_by or feature} needs {methods}, which {type(policy).__name__} does not define",
        "define the missing methods as embodrl.VLAPolicy describes them, or remove the setting that needs them",
        code="policy-lacks-feature",
    )


class OffPolicyActor(ABC):
    """Re-parameterised actions for off-policy algorithms; base class of families whose spec sets ``off_policy``."""

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """F, the size of ``features``."""

    @property
    @abstractmethod
    def chunk_shape(self) -> tuple[int, int]:
        """Shape of a row of ``sample_chunk``, normally (C, A)."""

    @abstractmethod
    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return critic inputs ``float32[B,F]`` from the output of ``preprocess``, with gradients."""

    @property
    @abstractmethod
    def state_dim(self) -> int:
        """S, the size of ``whole_state``."""

    @abstractmethod
    def whole_state(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the state ``float32[B,S]``, also what the policy does not read of it."""

    @abstractmethod
    def encoder_parameters(self) -> list[nn.Parameter]:
        """Return the parameters behind ``features``, which the critic loss trains if the critics read them."""

    @abstractmethod
    def sample_chunk(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions ``float32[B,C,A]`` in environment units and chunk log-probs ``float32[B]``, with gradients.

        ``noise`` is standard normal ``float32[B,C,A]``; equal noise gives equal actions.
        """
