"""The networks of pi0 (Black et al., 2024) and pi0.5 (Physical Intelligence, 2025), with openpi's parameter names.

PaliGemma (SigLIP and Gemma) encodes images and prompt; a smaller Gemma, the action expert, denoises a chunk of actions
and attends, layer by layer, to PaliGemma's keys and values. pi0 has a token of the robot's state, which sees images and
prompt but no action, and mixes the noise level into each action's embedding. pi0.5 conditions the expert's norms on it.

Nothing before the actions depends on them or on the noise level, so keys and values of images, prompt and state are
computed once for a chunk (``PiContext``).
Shapes: B batch, V cameras, N image patches of a camera, L prompt tokens, P all tokens before the actions, W PaliGemma's
width, E the expert's, H actions, D padded action dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.patches import SiglipSpec
from embodrl.models.flow.expert_policy import ExpertNetwork, Towers
from embodrl.models.flow.gemma import (
    GemmaLayer,
    GemmaModel,
    GemmaSpec,
    KeysValues,
    Rotary,
    full_precision,
    per_token,
    rotary,
)
from embodrl.models.flow.siglip import SiglipTower
from embodrl.models.pi.config import PiConfig

MIN_PERIOD = 4e-3
MAX_PERIOD = 4.0


class MultiModalProjector(nn.Module):
    """Vision features to language embeddings."""

    def __init__(self, vision_width: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(vision_width, width)

    def forward(self, features: Tensor) -> Tensor:
        """``[B,N,*]`` to ``[B,N,W]``; other than text, images are not scaled by sqrt(W)."""
        return self.linear(features)


class PaliGemmaModel(nn.Module):
    """Beyer et al., "PaliGemma", 2024, without its output layer."""

    def __init__(self, siglip: SiglipSpec, vlm: GemmaSpec, vocab_size: int) -> None:
        super().__init__()
        self.vision_tower = SiglipTower(siglip)
        self.multi_modal_projector = MultiModalProjector(siglip.width, vlm.width)
        self.language_model = GemmaModel(vlm, vocab_size)

    def embed_images(self, pixels: Tensor) -> Tensor:
        """``[B,V,3,h,w]`` in [-1, 1] to embeddings ``[B,V*N,W]``."""
        features = self.vision_tower(pixels.flatten(0, 1))
        return self.multi_modal_projector(features).unflatten(0, (len(pixels), -1)).flatten(1, 2)

    def embed_prefix(
        self, pixels: Tensor, ids: Tensor, prompt_mask: Tensor, image_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return embeddings ``[B,P',W]`` of images and prompt, and ``bool[B,P']``, False at padding; None without any.

        Cameras and columns that every row lacks are left out. Arguments as of ``PiModel.encode``.
        """
        if image_mask is not None:
            needed = image_mask.any(dim=0)
            pixels = pixels[:, needed]
            image_mask = image_mask[:, needed]
        longest = int(prompt_mask.sum(dim=1).max())
        ids = ids[:, :longest]
        prompt_mask = prompt_mask[:, :longest]
        x = torch.cat([self.embed_images(pixels), self.language_model.embed(ids)], dim=1)
        # Without a mask attention is faster in every layer.
        if bool(prompt_mask.all()) and (image_mask is None or bool(image_mask.all())):
            return x, None
        if image_mask is None:
            image_mask = prompt_mask.new_ones(pixels.shape[:2])
        patches = image_mask.repeat_interleave(self.vision_tower.spec.num_patches, dim=1)
        return x, torch.cat([patches, prompt_mask], dim=1)


class PaliGemma(nn.Module):
    """A level of names."""

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        self.model = PaliGemmaModel(config.siglip, config.vlm, config.vocab_size)


class GemmaExpert(nn.Module):
    """A level of names."""

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        self.model = GemmaModel(config.expert, condition_dim=config.expert.width if config.adaptive_norm else None)


class PaliGemmaWithExpert(nn.Module):
    """A level of names."""

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        self.paligemma = PaliGemma(config)
        self.gemma_expert = GemmaExpert(config)


@dataclass
class PiContext:
    """What denoising needs of an observation, computed once.

    Attributes:
        cache: keys and values ``[B,G,P,*]`` of every layer, of images, prompt and (pi0) state.
        mask: ``bool[B,1,1,P+H]``, True where an action may look; None where nothing is padded.
        rope: of the actions.
        last_input: ``[B,P',W]``, input of PaliGemma's last layer; P' leaves out the state.
        prefix_rope: of images and prompt.
        prefix_mask: ``bool[B,P']``, False at padding; None where there is none.
    """

    cache: list[KeysValues]
    mask: Tensor | None
    rope: Rotary
    last_input: Tensor
    prefix_rope: Rotary
    prefix_mask: Tensor | None


def time_embedding(tau: Tensor, width: int) -> Tensor:
    """Return sines, then cosines, ``float32[...,width]`` of noise levels ``float32[...]``.

    Periods are spaced geometrically from 4e-3 to 4. The phases reach 2 pi / 4e-3, so they are computed in float64.
    """
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=tau.device)
    period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** fraction
    phase = 2.0 * math.pi * tau.double()[..., None] / period
    return torch.cat([phase.sin(), phase.cos()], dim=-1).float()


class PiModel(ExpertNetwork):
    """pi0 or pi0.5."""

    trunk = "paligemma_with_expert"

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        self.config = config
        width = config.expert.width
        self.paligemma_with_expert = PaliGemmaWithExpert(config)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)
        if config.adaptive_norm:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.max_action_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights of attention and MLPs; ``in_float32`` names more precise ones."""
        return cast(GemmaLayer, self.expert.layers[0]).self_attn.q_proj.weight.dtype

    @property
    def paligemma(self) -> PaliGemmaModel:
        return self.paligemma_with_expert.paligemma.model

    @property
    def expert(self) -> GemmaModel:
        return self.paligemma_with_expert.gemma_expert.model

    @property
    def towers(self) -> Towers:
        vlm = self.paligemma
        return Towers(vlm.vision_tower, vlm.multi_modal_projector, vlm.language_model, self.expert)

    def encode(
        self,
        pixels: Tensor,
        ids: Tensor,
        prompt_mask: Tensor,
        state: Tensor | None,
        image_mask: Tensor | None = None,
    ) -> PiContext:
        """Run everything that comes before the actions.

        Args:
            pixels: ``[B,V,3,h,w]`` in [-1, 1].
            ids: ``int64[B,L]``, padded on the right.
            prompt_mask: ``bool[B,L]``, False at padding.
            state: ``[B,D]``, normalised and padded; read by pi0 only.
            image_mask: ``bool[B,V]``, False where a row has no such camera; None: all have all.
        """
        language = self.paligemma.language_model
        x, valid = self.paligemma.embed_prefix(pixels, ids, prompt_mask, image_mask)
        positions = token_places(valid, x.shape[1], x.device)
        rope = rotary(positions, self.config.vlm.head_dim, x.dtype)
        cache, last_input = language.encode(x, rope, None if valid is None else valid[:, None, None])
        after = positions[:, -1:] + 1
        seen = valid
        if not self.config.adaptive_norm:
            assert state is not None
            cache, seen = self._append_state(cache, state, after, valid)
            after = after + 1
        places = after + torch.arange(self.config.action_horizon, device=x.device)
        if seen is not None:
            seen = F.pad(seen, (0, self.config.action_horizon), value=True)[:, None, None]
        return PiContext(cache, seen, rotary(places, self.config.expert.head_dim, x.dtype), last_input, rope, valid)

    def prefix_hidden(self, context: PiContext) -> Tensor:
        """Return PaliGemma's final hidden states ``[B,P',W]``, whose last layer nothing else needs."""
        mask = None if context.prefix_mask is None else context.prefix_mask[:, None, None]
        return self.paligemma.language_model.finish(context.last_input, context.prefix_rope, mask)

    def velocity(self, context: PiContext, x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        exact = self.action_out_proj.weight.dtype
        condition = None
        with full_precision(x):
            tokens = self.action_in_proj(x.to(exact))
            time = time_embedding(tau, self.config.expert.width).to(exact)
            if self.config.adaptive_norm:
                condition = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(time))))
            else:
                mixed = torch.cat([tokens, per_token(time).expand_as(tokens)], dim=-1)
                tokens = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(mixed)))
        hidden = self.expert.decode(tokens.to(self.dtype), context.rope, context.cache, context.mask, condition)
        hidden = hidden.to(exact)
        with full_precision(x):
            return self.action_out_proj(hidden), hidden

    def _append_state(
        self, cache: list[KeysValues], state: Tensor, position: Tensor, valid: Tensor | None
    ) -> tuple[list[KeysValues], Tensor | None]:
        with full_precision(state):
            token = self.state_proj(state.to(self.state_proj.weight.dtype))[:, None].to(self.dtype)
        seen = None if valid is None else F.pad(valid, (0, 1), value=True)
        rope = rotary(position, self.config.expert.head_dim, token.dtype)
        extended, _ = self.expert.encode(token, rope, None if seen is None else seen[:, None, None], cache)
        return extended, seen


def token_places(valid: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return ``int64[B,S]``, or ``[1,S]`` where rows agree: each token's place among those that are not padding."""
    if valid is None:
        return torch.arange(length, device=device)[None]
    return (valid.cumsum(dim=1) - 1).clamp(min=0)
