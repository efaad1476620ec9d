"""GR00T as a reinforcement-learning policy.

Shapes: B batch, V cameras, H predicted actions, D padded action dimensions, S tokens of images and prompt, E hidden
size of the language model, W width of the diffusion transformer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.models.common import checkpoint
from embodrl.models.common.heads import save_heads
from embodrl.models.common.images import normalize
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.common.public_layout import PublicLayout
from embodrl.models.common.value_head import ValueHead, masked_mean
from embodrl.models.flow.flow import NoiseHead, Velocity, reversed_velocity
from embodrl.models.flow.flow_policy import FlowPolicy
from embodrl.models.flow.flow_spec import FlowModelConfig
from embodrl.models.flow.noise_head import save_noise_head
from embodrl.models.gr00t.dit import ContextMask, KeyValue
from embodrl.models.gr00t.modeling import Gr00tModel, Gr00tN17Model
from embodrl.models.gr00t.processing import Gr00tProcessor, load_chat_tokenizer
from embodrl.models.gr00t.robots import RobotStats
from embodrl.types import Observation

MEAN_AND_STD = 0.5
"""Pixel mean and standard deviation of SigLIP and Qwen3-VL."""


@dataclass(frozen=True)
class Gr00tContext:
    """Encoded observation, shared by all denoising steps of a chunk.

    Attributes:
        features: features ``[B,S,E]`` of images and prompt, processed by the action head.
        mask: ``bool[B,S]``, False at padding; None without padding.
        seen: features that each block of the action head attends to.
        known: keys and values of the features per block.
        state: ``[B,1,W]``.
    """

    features: Tensor
    mask: Tensor | None
    seen: ContextMask
    known: list[KeyValue | None]
    state: Tensor


class Gr00tPolicy(FlowPolicy, PublicLayout):
    """Denoises an action chunk with a diffusion transformer that attends to images and prompt; see ``FlowPolicy``.

    ``robot`` selects statistics, encoders and decoders. Raises ``CheckpointError`` if the model lacks its encoders.
    """

    def __init__(
        self,
        model: Gr00tModel | Gr00tN17Model,
        processor: Gr00tProcessor,
        robot: RobotStats,
        config: FlowModelConfig,
        value_head: ValueHead | None = None,
        noise_head: NoiseHead | None = None,
    ) -> None:
        head = model.config.head
        super().__init__(robot.action, config, head.action_horizon, head.action_dim, "prefix", value_head, noise_head)
        self.model = model
        self.processor = processor
        self.robot = robot
        self.embodiment = embodiment_id(robot.name, model.config.embodiment_ids, head.num_embodiments)

    @property
    def action_horizon(self) -> int:
        return self.horizon if self.robot.horizon is None else self.robot.horizon

    def scaled(self, actions: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return actions ``[...,A]`` in model units, without clipping."""
        return self.robot.action.scale(actions)

    def relative_to(self, actions: NDArray[np.float64], observation: Observation) -> NDArray[np.float64]:
        """Make those actions relative to the state that the model learned as relative."""
        return self._shifted(actions, observation, -1.0)

    def absolute_from(self, actions: NDArray[np.float64], observation: Observation) -> NDArray[np.float64]:
        """Invert ``relative_to`` for unnormalised actions ``[B,C,A]``."""
        return self._shifted(actions, observation, 1.0)

    def _shifted(self, actions: NDArray[np.float64], observation: Observation, sign: float) -> NDArray[np.float64]:
        if not self.robot.relative:
            return actions
        if not observation.state.shape[1]:
            raise EmbodrlError(
                "actions of this checkpoint are relative to the robot's state, but there is no state",
                "set env.include_state=true",
                code="state-size",
            )
        shifted = actions.copy()
        for part, origin in self.robot.relative:
            shifted[..., part] += sign * observation.state[:, None, origin]
        return shifted

    def check_instructions(self, instructions: Sequence[str], num_cameras: int) -> None:
        for text in instructions:
            self.processor.prompt_row(text, num_cameras)

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return ``images uint8[B,V,H,W,3]``, ``input_ids``, ``attention_mask``, ``state``; see ``Gr00tProcessor``."""
        return self.processor(observation, self.device)

    def encode(self, inputs: dict[str, Tensor]) -> Gr00tContext:
        """Run images, prompt, state, and the step-independent part of the action head."""
        head = self.model.action_head
        dtype = self.model.action_head.vlln.weight.dtype
        input_ids, mask = trimmed(inputs["input_ids"], inputs["attention_mask"])
        images = inputs["images"]
        half = torch.tensor(MEAN_AND_STD, device=images.device)
        pixels = normalize(images.flatten(0, 1), half, half).to(dtype).unflatten(0, images.shape[:2])
        image_token_id = self.processor.tokenizer.image_token_id
        features = self.model.features(pixels, input_ids, image_token_id, mask)
        features = head.process_features(features, None if mask is None else mask[:, None, None])
        seen = head.seen(mask, input_ids == image_token_id)
        state = head.encode_state(inputs["state"][:, None].to(dtype), self.embodiment)
        return Gr00tContext(features, mask, seen, head.model.key_values(features), state)

    def velocity(self, context: Gr00tContext) -> Velocity:
        """Return the network with its time reversed, since it runs from noise to data."""
        head = self.model.action_head

        def towards_data(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
            actions = x.to(head.action_encoder.W1.W.dtype)
            return head(actions, head.buckets(time), context.state, context.known, context.seen, self.embodiment)

        return reversed_velocity(towards_data)

    def prefix_features(self, context: Gr00tContext) -> Tensor:
        """Return ``float32[B,E+W]``: the mean over images and prompt, and the state token."""
        mean = masked_mean(context.features, context.mask)
        return torch.cat([mean, context.state[:, 0].float()], dim=-1)

    def training_times(self, batch: int) -> Tensor:
        """Draw tau ``float32[B]``: the network's time is ``(s - b) / s``, b from Beta(1.5, 1), so tau is ``b / s``."""
        head = self.model.config.head
        beta = torch.distributions.Beta(head.noise_beta_alpha, head.noise_beta_beta)
        return beta.sample((batch,)) / head.noise_s

    def loss_action_dims(self) -> int:
        """Return A: the public loss excludes padded dimensions."""
        return self.action_dim

    def parts(self) -> dict[str, nn.Module]:
        """Return the parts; the connector belongs to ``vision``."""
        return {
            "vision": self.model.vision,
            "language": self.model.language,
            "action_expert": self.model.action_head,
            **self.own_heads(),
        }

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the last layer of the action decoder."""
        return list(self.model.action_head.action_decoder.layer2.parameters())

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return checkpoint weights that nothing runs, such as Qwen's output layer."""
        return self.model.unused_parameters()

    def enable_gradient_checkpointing(self) -> None:
        self.model.enable_gradient_checkpointing()

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        parts = self.parts()
        config = self.model.config
        head = self.model.action_head
        patches = num_cameras * config.patches_per_image
        merged = num_cameras * config.tokens_per_image
        prefix = merged + self.processor.max_prompt_tokens
        actions = 1 + config.head.num_future_tokens + self.horizon
        counts = [(parts["vision"], patches), (parts["language"], prefix), (head, actions * self.trained_steps)]
        return [*counts, (head.vl_self_attention, prefix), *((each, merged) for each in self.model.connectors)]

    def cache_shape(self, num_cameras: int) -> tuple[int, int, int]:
        """Return the cache shape of the cross-attentions."""
        config = self.model.config
        positions = num_cameras * config.tokens_per_image + self.processor.max_prompt_tokens
        return -(-config.head.dit.num_layers // 2), config.head.dit.width, positions

    def enlarge(self, own_tokenizer: bool) -> nn.Module:
        self.model = self.model.public_size(self.action_dim)
        return self.model

    def take_tokenizer(self, directory: Path | None) -> tuple[int, int]:
        if directory is not None:
            self.processor.tokenizer = load_chat_tokenizer(directory, type(self.processor.tokenizer))
        return self.processor.tokenizer.vocab_size, self.model.config.qwen.vocab_size

    def public_state(self) -> dict[str, Tensor]:
        return merged_state_dict(self.model, deferred=True)

    def write_files(self, directory: Path) -> None:
        save_heads(directory, self.value_head)
        save_noise_head(directory, self.noise_head)
        for name, content in self.model.config.files().items():
            (directory / name).parent.mkdir(exist_ok=True)
            checkpoint.write_json(directory / name, content)
        self.processor.tokenizer.save(directory)


def trimmed(input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Drop the leading columns of ``int64[B,S]`` that are padding in every row; the mask becomes ``bool``.

    Without padding the mask is None, which enables attention's fast path.
    """
    longest = int(mask.sum(dim=1).max())
    input_ids = input_ids[:, -longest:]
    kept = mask[:, -longest:].bool()
    return input_ids, None if bool(kept.all()) else kept


def embodiment_id(name: str, known: Mapping[str, int], count: int) -> int:
    """Return the index of a robot's encoders; raise ``CheckpointError`` if unknown or out of range."""
    if name not in known:
        raise CheckpointError(
            f"no encoder index is known for the robot '{name}'; known: {', '.join(known)}",
            f'add "{name}": NUMBER to embodiment_id.json of the checkpoint; of N1.5, to config.json'
            f' "embodrl": {{"embodiment_ids": {{"{name}": NUMBER}}}}',
            code="gr00t-robot",
        )
    if known[name] >= count:
        raise CheckpointError(
            f"the robot '{name}' has number {known[name]}, but the checkpoint has {count} robots",
            "use a checkpoint that was trained on this robot",
            code="gr00t-robot",
        )
    return known[name]
