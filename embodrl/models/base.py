"""The interface of every VLA policy.

Shapes: B batch, C actions in a chunk, A action dimensions, V cameras, H x W image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodrl.data.rng import RandomSource
from embodrl.errors import BatchShapeError, EmbodrlError
from embodrl.models.common.condition import Condition, condition_observation
from embodrl.types import MODES, ActMode, ChunkPrefix, Decoding, EvalOutput, Observation, PolicyOutput, SamplingParams

if TYPE_CHECKING:
    from embodrl.models.common.adapters import Adapters


@dataclass
class LoadReport:
    """How each name in a checkpoint was used.

    Attributes:
        source: directory or hub id.
        num_loaded: tensors loaded.
        missing: names that the model has and the checkpoint lacks.
        unexpected: names that the checkpoint has and the model lacks.
        mismatched: ``(name, shape in checkpoint, shape in model)``.
        aliased: checkpoint name -> model name, renamed on purpose.
        ignored: checkpoint name -> why it is not used.
        initialized: model name -> why it is not in the checkpoint (e.g. a new value head).
        conventions: what prompts and actions follow -> which, and which file, dataset or setting says so.
        has_checksums: the files were compared with the list that embodrl writes; False if there is no list.
        adapters: of ``model.lora_path``.
    """

    source: str
    num_loaded: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    aliased: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    initialized: dict[str, str] = field(default_factory=dict)
    conventions: dict[str, str] = field(default_factory=dict)
    has_checksums: bool = False
    adapters: Adapters | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def describe(self, limit: int | None = None) -> str:
        """Return the whole report in words, one kind of name per line.

        Args:
            limit: at most this many names per kind; None lists all.
        """
        kinds: dict[str, list[str]] = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "other shapes": [f"{name} {stored} instead of {wanted}" for name, stored, wanted in self.mismatched],
            "renamed on purpose": [f"{stored} -> {name}" for stored, name in self.aliased.items()],
            "ignored on purpose": [f"{name} ({reason})" for name, reason in self.ignored.items()],
            "new": [f"{name} ({reason})" for name, reason in self.initialized.items()],
            "conventions": [f"{name}: {found}" for name, found in self.conventions.items()],
        }
        checked = "compared with checksums.json" if self.has_checksums else "no checksums"
        lines = [f"{self.source}: {self.num_loaded} tensors loaded, {checked}"]
        for kind, names in kinds.items():
            if names:
                shown = names[:limit]
                more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
                lines.append(f"  {kind}: {', '.join(shown)}{more}")
        return "\n".join(lines)


def check_decoding(decoding: Decoding, offered: Sequence[Decoding], who: str) -> None:
    """Refuse a decoding that is not offered.

    Args:
        decoding: that is wanted.
        offered: by a policy or an engine.
        who: its name, for the message.

    Raises:
        EmbodrlError: see above.
    """
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
"""What a policy need not offer -> the methods of ``VLAPolicy`` that it has to define for it."""


class VLAPolicy(nn.Module, ABC):
    """A policy that maps camera images and an instruction to a chunk of actions.

    RL needs ``preprocess``, ``predict_action_batch`` and ``evaluate_actions``. The other methods have a default: what
    is right for most networks, or, for what is in ``OPTIONAL``, a refusal.

    Attributes:
        num_action_chunks: C.
        action_dim: A.
        draws_by_row: ``predict_action_batch`` takes a RowGenerators as well.
        decodings: what ``predict_action_batch`` can choose actions by; the first is that of main figures.
        condition: what those who act say of the advantage with every instruction (``model.condition``).
        seen_state_dim: S of the states that it has acted or learnt from; None if there were none in this process.
    """

    num_action_chunks: int
    action_dim: int
    draws_by_row: ClassVar[bool] = False
    decodings: ClassVar[tuple[Decoding, ...]] = ("greedy", "sampled")
    condition: Condition | None = None
    seen_state_dim: int | None = None

    @property
    def action_horizon(self) -> int:
        """Actions that imitation learns at once; a flow policy may predict more than the C that are run."""
        return self.num_action_chunks

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def check_instructions(self, instructions: Sequence[str], num_cameras: int) -> None:
        """Refuse, on the meta device, an instruction whose prompt is too long; nothing where prompts have the state.

        Raises:
            EmbodrlError: see above.
        """

    @abstractmethod
    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return model inputs, batch first, of fixed shape; images stay uint8. On the policy's device."""

    @abstractmethod
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Choose a chunk of actions for each row: sampled in ``train`` mode, the most probable in ``eval`` mode.

        In ``mean`` mode it is nearest to the mean of the distribution; only some families have it, see ``decodings``.

        Raises:
            EmbodrlError: the family does not have the mode.
        """

    def check_mode(self, mode: ActMode) -> None:
        """Refuse a mode that ``decodings`` lacks.

        Raises:
            EmbodrlError: see above.
        """
        check_decoding(next(name for name, one in MODES.items() if one == mode), self.decodings, type(self).__name__)

    def predict(
        self,
        images: NDArray[np.uint8],
        instruction: str | Sequence[str],
        state: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Choose the most probable chunk of actions, as for deployment.

        Args:
            images: ``uint8[H,W,3]`` RGB of one camera, ``uint8[V,H,W,3]`` of V cameras in the order of
                ``env.cameras``, or a batch ``uint8[B,V,H,W,3]``.
            instruction: in words; B of them for a batch.
            state: ``float32[S]`` or ``float32[B,S]`` proprioception, for policies that use it.

        Returns:
            ``float32[C,A]`` actions in environment units, -1 to 1, to be executed in order; ``[B,C,A]`` for a batch.
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
        """Return the most probable chunks ``float32[B,C,A]`` that continue those that robots are in the midst of.

        Args:
            observation: ``[B]``.
            prefix: what is left of those chunks.
            guidance: largest weight of the pull towards the prefix.

        Raises:
            EmbodrlError: only flow policies can.
        """
        del observation, prefix, guidance
        raise EmbodrlError(
            f"{type(self).__name__} can't continue a chunk",
            "leave 'rtc' out of the request: real-time chunking is for flow policies",
            code="policy-continues-no-chunk",
        )

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        """Return ``float32[B,1]`` or ``float32[B,C]`` values of observations, without gradients.

        By default those that come with the most probable actions; a family that need not choose any overrides it.

        Raises:
            EmbodrlError: the policy has no values.
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

    def sft_inputs(self, observation: Observation, actions: Tensor) -> dict[str, Tensor]:
        """Return the inputs of ``sft_loss``; ``actions float32[B,C,A]`` in environment units."""
        raise not_offered(self, IMITATION)

    def out_of_range(self, actions: NDArray[np.floating], state: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return which values of demonstrations ``[N,A]``, in environment units, this policy can't learn to say.

        A family with action statistics overrides it; by default all pass.

        Args:
            actions: ``[N,A]``.
            state: ``[N,S]`` of the same frames.
        """
        return np.zeros(actions.shape, np.bool_)

    def sft_loss(self, batch: dict[str, Tensor], label_smoothing_bins: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the imitation loss (scalar) and scalars to log (e.g. token accuracy, L1 error)."""
        raise not_offered(self, IMITATION)

    def trainable_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the trainable parameters by group (see ``parts``), without empty groups.

        A parameter that several parts share is in the group of the first, since no optimizer takes it twice.
        """
        groups: dict[str, list[nn.Parameter]] = {}
        known: set[int] = set()
        for name, part in self.parts().items():
            groups[name] = [p for p in part.parameters() if p.requires_grad and id(p) not in known]
            known.update(map(id, groups[name]))
        return {name: parameters for name, parameters in groups.items() if parameters}

    def parts(self) -> dict[str, nn.Module]:
        """Return every part of the network by group: what ``model.trainable`` and learning rates tell apart.

        Token families have ``vision``, ``projector``, ``language``; flow families ``vision``, ``language``,
        ``action_expert`` and, with Flow-Noise, ``noise_head``; both ``value_head`` where there is one. By default every
        module that is an attribute of the policy, under the attribute's name.

        Raises:
            EmbodrlError: a parameter is in none of those modules, so that nothing would train it.
        """
        if outside := [name for name, _ in self.named_parameters(recurse=False)]:
            raise EmbodrlError(
                f"{type(self).__name__} has parameters outside of its modules: {', '.join(outside)}",
                "put them into an nn.Module, or define parts()",
                code="policy-parts",
            )
        return dict(self.named_children())

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the output layer, which are all that trains with ``model.trainable: head``."""
        raise not_offered(self, TRAINABLE_HEAD)

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return parameters that exist for the checkpoint's sake and that no output depends on; by default none."""
        return []

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        """Return modules and how many positions of one row each is applied to, for `embodrl plan`; others count as 1.

        Prompts count at their greatest length; a later entry overrides what an earlier one says of the same module.
        """
        return []

    def cache_shape(self, num_cameras: int) -> tuple[int, int, int]:
        """Return layers, numbers per key and positions of what is cached while a row is decided; zeros for nothing."""
        return 0, 0, 0

    def chosen_bytes(self, num_cameras: int) -> int:
        """Return the bytes that a rollout keeps of a chunk besides its inputs: by default tokens and log-probs."""
        return (torch.int64.itemsize + torch.float32.itemsize) * self.num_action_chunks * self.action_dim

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the activations of every block in the backward pass; call it after ``eval()``, which undoes it."""
        raise not_offered(self, CHECKPOINTING)

    def public_name(self, module: str) -> str:
        """Return what public checkpoints call a module of the network ``self.model``."""
        return module

    def save_pretrained(self, directory: Path) -> None:
        """Write the policy in the public layout of its family (config, safetensors, tokenizer, statistics).

        By default config.json, which names the class, and all weights under their names in it, adapters merged:
        ``checkpoint.load_strict`` reads them. Implementations write through ``storage.atomic.atomic_directory``:
        callers rely on it that the directory appears, or is replaced, as a whole, and that failures of the disk are
        ``OutputError``.
        """
        from embodrl.models.common import checkpoint
        from embodrl.models.common.lora import merged_state_dict

        with checkpoint.policy_directory(directory) as staging:
            checkpoint.save_weights(merged_state_dict(self, deferred=True), staging)
            checkpoint.write_json(staging / checkpoint.CONFIG_FILE, {"architectures": [type(self).__name__]})

    def save_lerobot(self, directory: Path, cameras: Sequence[str]) -> list[str]:
        """Write the policy in lerobot's layout, with its processor files.

        Args:
            directory: a new one.
            cameras: names of the pictures, in the order of ``env.cameras``.

        Returns:
            what the user has to know about how it acts there.

        Raises:
            EmbodrlError: lerobot has no such family, or no way to say how the policy acts.
            OutputError: the directory can't be written.
        """
        raise EmbodrlError(
            f"lerobot has no layout for {type(self).__name__}",
            "export it in its public layout (--layout public)",
            code="export-layout",
        )


def lacking(policy: VLAPolicy, feature: str) -> list[str]:
    """Return the methods that a policy would have to define to offer a feature of ``OPTIONAL``."""
    return [name for name in OPTIONAL[feature] if getattr(type(policy), name) is getattr(VLAPolicy, name)]


def require(policy: VLAPolicy, feature: str, asked_by: str = "") -> None:
    """Refuse a policy that does not offer a feature, before anything begins.

    Args:
        policy: of any family.
        feature: of ``OPTIONAL``.
        asked_by: the setting or command that needs it; "" for the feature itself.

    Raises:
        EmbodrlError: see above.
    """
    if lacking(policy, feature):
        raise not_offered(policy, feature, asked_by)


def not_offered(policy: VLAPolicy, feature: str, asked_by: str = "") -> EmbodrlError:
    """Return the error of what needs a feature of ``OPTIONAL`` that a policy does not offer; see ``require``."""
    methods = " and ".join(lacking(policy, feature) or OPTIONAL[feature])
    return EmbodrlError(
        f"{asked_by or feature} needs {methods}, which {type(policy).__name__} does not define",
        "define what is missing, as embodrl.VLAPolicy describes it, or leave out what asks for it",
        code="policy-lacks-feature",
    )


class OffPolicyActor(ABC):
    """What a policy offers to off-policy algorithms besides ``VLAPolicy``: re-parameterised actions.

    Families whose spec says ``off_policy`` derive from it.
    """

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """F: what ``features`` returns."""

    @property
    @abstractmethod
    def chunk_shape(self) -> tuple[int, int]:
        """What ``sample_chunk`` returns of a row: as a rule C and A."""

    @abstractmethod
    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return what critics see, ``float32[B,F]``, of what ``preprocess`` returned; with gradients."""

    @abstractmethod
    def encoder_parameters(self) -> list[nn.Parameter]:
        """Return the parameters behind ``features``, which the loss of the critics trains and the actor's does not."""

    @abstractmethod
    def sample_chunk(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions ``float32[B,C,A]`` in environment units and log-probs of whole chunks ``float32[B]``.

        Both have gradients.

        Args:
            features: ``float32[B,F]``.
            noise: standard normal, ``float32[B,C,A]``; the same noise gives the same actions.
        """
