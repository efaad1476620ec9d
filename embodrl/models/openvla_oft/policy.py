"""OpenVLA-OFT: an RL policy with discrete actions, and policies with an L1 or a diffusion head for imitation only.

Shapes: B batch, V cameras, C actions in a chunk, A action dimensions, H x W pixels, L prompt tokens, D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.data.rng import RandomSource
from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy
from embodrl.models.common.gripper import to_environment, to_model
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.common.norm_stats import ActionStats
from embodrl.models.common.sampling import draw, expected, exponential_noise, noise_of, standard_normal
from embodrl.models.common.value_head import ValueHead
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.models.openvla.token_policy import TokenPolicy, prompt_of
from embodrl.models.openvla_oft.components import ACTION_HEAD, NOISY_ACTIONS, PROPRIO
from embodrl.models.openvla_oft.config import normalization_of
from embodrl.models.openvla_oft.ddim import add_noise, denoise, level_at, without_noise
from embodrl.models.openvla_oft.modeling import (
    ActionHead,
    DiffusionHead,
    NoisyActionProjector,
    ProprioProjector,
    append_action_places,
    at_action_places,
    instruction_mean,
    step_embedding,
)
from embodrl.models.openvla_oft.processing import OpenVLAOFTProcessor
from embodrl.models.openvla_oft.spec import OpenVlaOftConfig
from embodrl.storage.files import write_safetensors
from embodrl.types import ActMode, EvalOutput, Observation, PolicyOutput, SamplingParams


class OpenVLAOFTPolicy(TokenPolicy):
    """Predicts all action tokens of a chunk in one bidirectional pass over images, state, prompt and empty positions.

    Chosen tokens are never fed back, so a chunk's tokens are independent given the observation, and rollout and
    training run the same pass. ``preprocess`` returns ``images uint8[B,V,H,W,3]``, ``input_ids`` and ``attention_mask``
    ``int64[B,L]``, and ``proprio float32[B,S]`` with a state token.

    Args:
        model: network, not causal.
        processor: prepares the network's inputs.
        stats: action statistics of the robot.
        config: section ``model``.
        value_head: critic, or None.
        proprio_projector: makes the state token, or None.
    """

    def __init__(
        self,
        model: OpenVLAModel,
        processor: OpenVLAOFTProcessor,
        stats: ActionStats,
        config: OpenVlaOftConfig,
        value_head: ValueHead | None = None,
        proprio_projector: ProprioProjector | None = None,
    ) -> None:
        super().__init__(model, processor, stats, config, value_head)
        self.keep_stop_token = config.keep_stop_token
        self.use_film = config.use_film
        # With FiLM the features depend on the instruction embedding, which trains.
        self.vision_is_frozen &= not config.use_film
        self.normalization = normalization_of(config)[0]
        self.proprio_projector = proprio_projector

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Choose a chunk of actions per row: sampled in ``train`` mode, the most probable bins in ``eval`` mode.

        In ``mean`` mode they are the bins nearest to the mean. ``forward_inputs`` has the output of ``preprocess`` and
        ``action_tokens int64[B,C,A]``.
        """
        inputs = self.with_patches(self.preprocess(observation))
        logits, features = self.action_logits(inputs)
        noise = exponential_noise(logits.shape, generator, self.device) if mode == "train" else None
        values = self.values_from(features) if compute_values else None
        index = expected(logits, sampling) if mode == "mean" else draw(logits, sampling, noise)
        return self.make_output(inputs, index, logits, values, sampling)

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        """Return values from a whole pass, since the prompt's hidden states depend on the empty positions after it."""
        return self.values_from(self.action_features(self.preprocess(observation))[1])

    def action_logits(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits; ``action_tokens`` are not read."""
        hidden, features = self.action_features(inputs)
        return self.model.action_logits(hidden), features

    def action_features(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the hidden states ``[B,C*A,D]`` that predict actions, and ``[B,D]`` for the value."""
        prefix, prefix_mask = self.prompt_embeddings(inputs)
        length = prefix.shape[1]
        num_tokens = self.num_action_chunks * self.action_dim
        sequence = append_action_places(self.model, prefix, num_tokens, self.keep_stop_token, self.places(inputs))
        mask = None if prefix_mask is None else F.pad(prefix_mask, (0, sequence.shape[1] - length), value=1)
        first = self.first_read(length)
        hidden = self.model.hidden_states(sequence, mask, first)
        length -= first
        return at_action_places(hidden, length, num_tokens), self._features(hidden[:, :length], prefix_mask)

    def state_tokens(self, inputs: dict[str, Tensor]) -> Tensor | None:
        if self.proprio_projector is None:
            return None
        return self.proprio_projector(inputs["proprio"])[:, None]

    def places(self, inputs: dict[str, Tensor]) -> Tensor | None:
        """Return embeddings ``[B,C*A,D]`` of noisy actions for the positions of the chunk; None for zeros."""
        return None

    def film_input(self, input_ids: Tensor, mask: Tensor) -> Tensor | None:
        return instruction_mean(self.model, input_ids, mask, self.keep_stop_token) if self.use_film else None

    def parts(self) -> dict[str, nn.Module]:
        """Return the parts; with a state token including ``proprio_projector``."""
        own = {} if self.proprio_projector is None else {"proprio_projector": self.proprio_projector}
        return {**super().parts(), **own}

    def own_section(self) -> dict[str, object]:
        choices = {"keep_stop_token": self.keep_stop_token, "use_film": self.use_film}
        return {**super().own_section(), **choices, "normalization": self.normalization}

    def save_extras(self, directory: Path) -> None:
        """Write the value head, and as safetensors the components that public checkpoints pickle."""
        super().save_extras(directory)
        for name, part in self.parts().items():
            if name in (PROPRIO, ACTION_HEAD, NOISY_ACTIONS):
                write_safetensors(directory / f"{name}.safetensors", merged_state_dict(part))


class OpenVLAOFTRegressionPolicy(OpenVLAOFTPolicy):
    """Regresses the chunk with the L1 ``action_head`` on the same pass, for evaluation, deployment and imitation.

    Without a density there are no log-probs: sampling and ``evaluate_actions`` are refused. Log-probs of ``eval`` mode,
    which is deterministic, are 0.
    """

    draws_by_row = False
    decodings = ("greedy",)

    def __init__(self, *args: Any, action_head: ActionHead | DiffusionHead, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.action_head = action_head

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Choose a chunk per row; raise ``EmbodrlError`` in modes other than ``eval``."""
        if mode == "train":
            raise _no_density()
        self.check_mode(mode)
        inputs = self.preprocess(observation)
        chosen, features = self.choose(inputs, observation)
        actions = to_environment(self.stats.unnormalize(chosen.double().cpu().numpy()), self.gripper)
        values = self.values_from(features) if compute_values else None
        return PolicyOutput(actions.astype(np.float32), torch.zeros_like(chosen), values, inputs)

    def choose(self, inputs: dict[str, Tensor], observation: Observation) -> tuple[Tensor, Tensor]:
        """Return normalised actions ``float32[B,C,A]``, and ``[B,D]`` for the value."""
        hidden, features = self.action_features(inputs)
        return self.action_head(hidden), features

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
    ) -> EvalOutput:
        """Raise: there is no density."""
        raise _no_density()

    def sft_inputs(self, observation: Observation, actions: Tensor) -> dict[str, Tensor]:
        """Return the output of ``preprocess`` and ``target float32[B,C,A]``, normalised and clipped to [-1, 1]."""
        raw = to_model(actions.detach().cpu().numpy().astype(np.float64), self.gripper)
        target = torch.from_numpy(self.stats.normalize(raw)).float().to(self.device)
        return {**self.preprocess(observation), "target": target}

    def sft_loss(self, batch: dict[str, Tensor], label_smoothing_bins: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean absolute error in normalised units, also as ``l1``.

        ``action_mask bool[B,C]`` in ``batch``, if present, excludes actions.
        """
        error = (self.action_head(self.action_features(batch)[0]) - batch["target"]).abs()
        loss = self.mean_of(error, batch)
        return loss, {"l1": loss.detach()}

    def mean_of(self, error: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean of ``error [B,C,A]`` over the actions of a batch, by its ``action_mask`` if any."""
        weight = torch.ones_like(error[..., :1])
        if "action_mask" in batch:
            weight = batch["action_mask"][..., None].to(error.dtype)
        return (error * weight).sum() / (weight.sum().clamp(min=1.0) * self.action_dim)

    def parts(self) -> dict[str, nn.Module]:
        """Return the parts, including ``action_head``."""
        return {**super().parts(), "action_head": self.action_head}

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        return [*super().positions(num_cameras), (self.action_head, self.num_action_chunks)]

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the last layer of the action head."""
        return list(self.action_head.last_layer().parameters())

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the unused parameters, including lm_head."""
        return [*super().unused_parameters(), *self.model.language_model.lm_head.parameters()]


class OpenVLAOFTDiffusionPolicy(OpenVLAOFTRegressionPolicy):
    """Denoises the chunk by DDIM: a step is a pass whose action positions hold the noisy chunk.

    The number of the step is a token after images and state (finetune.py and modeling_prismatic.py of
    moojink/openvla-oft). The starting noise is drawn from a row's images and state, so that evaluations repeat.

    Args:
        noisy_action_projector: makes the embeddings of noisy actions.
        diffusion_steps: noise levels that the head is trained at.
        denoising_steps: steps that choose a chunk.
    """

    def __init__(
        self,
        *args: Any,
        noisy_action_projector: NoisyActionProjector,
        diffusion_steps: int,
        denoising_steps: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.noisy_action_projector = noisy_action_projector
        self.diffusion_steps = diffusion_steps
        self.denoising_steps = denoising_steps

    def choose(self, inputs: dict[str, Tensor], observation: Observation) -> tuple[Tensor, Tensor]:
        film = self.film_input(*prompt_of(inputs))
        # Every step reads the same features of the images.
        seen = {**inputs, "patches": self.model.vision_backbone(self._pixels(inputs["images"]), film)}
        features: list[Tensor] = []

        def predict(noisy: Tensor, step: Tensor) -> Tensor:
            hidden, last = self.action_features({**seen, "noisy": noisy, "step": step})
            features[:] = [last]
            return self.action_head(hidden)

        start = noise_of(observation, (self.num_action_chunks, self.action_dim)).to(self.device)
        return denoise(predict, start, self.diffusion_steps, self.denoising_steps), features[0]

    def predict_values(self, observation: Observation) -> Tensor:
        """Return the values of the last denoising step."""
        return VLAPolicy.predict_values(self, observation)

    def sft_inputs(self, observation: Observation, actions: Tensor) -> dict[str, Tensor]:
        """Return also ``noise float32[B,C,A]`` and ``step int64[B]``, drawn from torch's global generator."""
        inputs = super().sft_inputs(observation, actions)
        noise = standard_normal(inputs["target"].shape, None, torch.device("cpu"))
        step = torch.randint(self.diffusion_steps, (len(noise),))
        return {**inputs, "noise": noise.to(self.device), "step": step.to(self.device)}

    def sft_loss(self, batch: dict[str, Tensor], label_smoothing_bins: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean squared error of the noise, and ``l1``, the error of the actions that it implies.

        ``action_mask bool[B,C]`` in ``batch``, if present, excludes actions.
        """
        level = level_at(batch["step"], self.diffusion_steps)
        noisy = add_noise(batch["target"], batch["noise"], level)
        found = self.action_head(self.action_features({**batch, "noisy": noisy})[0])
        with torch.no_grad():
            l1 = self.mean_of((without_noise(noisy, found, level) - batch["target"]).abs(), batch)
        return self.mean_of((found - batch["noise"]).square(), batch), {"l1": l1}

    def state_tokens(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the state's token, if any, and the token of the step."""
        state = super().state_tokens(inputs)
        step = step_embedding(inputs["step"], self.model.config.llama.hidden_size)[:, None]
        return step if state is None else torch.cat([state, step.to(state.dtype)], dim=1)

    def places(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.noisy_action_projector(inputs["noisy"])

    def parts(self) -> dict[str, nn.Module]:
        """Return the parts, including ``noisy_action_projector``."""
        return {**super().parts(), "noisy_action_projector": self.noisy_action_projector}

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        own = (self.noisy_action_projector, self.num_action_chunks * self.action_dim)
        return [*super().positions(num_cameras), own]

    def own_section(self) -> dict[str, object]:
        return {**super().own_section(), "diffusion_steps": self.diffusion_steps}


def _no_density() -> EmbodrlError:
    return EmbodrlError(
        "an L1 or diffusion head has no log-probs of its actions to learn from",
        "use it with `embodrl eval` and `embodrl sft`, or set model.action_head=tokens",
        code="policy-has-no-density",
    )
