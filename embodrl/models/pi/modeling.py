"""The networks of pi0 (Black et al., 2024) and pi0.5 (Physical Intelligence, 2025), with openpi's parameter names.

PaliGemma (SigLIP and Gemma) encodes images and prompt; a smaller Gemma, the action expert, denoises an action chunk and
attends, layer by layer, to PaliGemma's keys and values. pi0 has a state token, which sees images and prompt but no
action, and mixes the noise level into each action's embedding. pi0.5 conditions the expert's norms on the noise level.
Nothing before the actions depends on them or on the noise level, so keys and values of images, prompt and state are
computed once per chunk (``PiContext``).
Shapes: B batch, V cameras, N image patches of a camera, L prompt tokens, P all tokens before the actions, W PaliGemma's
width, E the expert's, H actions, D padded action dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.flow.expert_policy import ExpertNetwork, Towers
from embodrl.models.flow.gemma import (
    GemmaLayer,
    GemmaModel,
    KeysValues,
    Rotary,
    full_precision,
    per_token,
    rotary,
)
from embodrl.models.flow.time_embedding import time_embedding
from embodrl.models.openpi.config import PiConfig
from embodrl.models.openpi.paligemma import PaliGemmaModel, token_places


class PaliGemma(nn.Module):
    """Nesting level of parameter names."""

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        self.model = PaliGemmaModel(config.siglip, config.vlm, config.vocab_size)


class GemmaExpert(nn.Module):
    """Nesting level of parameter names."""

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        self.model = GemmaModel(config.expert, condition_dim=config.expert.width if config.adaptive_norm else None)


class PaliGemmaWithExpert(nn.Module):
    """Nesting level of parameter names."""

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        self.paligemma = PaliGemma(config)
        self.gemma_expert = GemmaExpert(config)


@dataclass
class PiContext:
    """Encoded observation, computed once for all denoising steps.

    Attributes:
        cache: keys and values ``[B,G,P,*]`` per layer, of images, prompt and (pi0) state.
        mask: ``bool[B,1,1,P+H]``, True where an action may attend; None without padding.
        rope: rotary embedding of the actions.
        last_input: ``[B,P',W]``, input of PaliGemma's last layer; P' excludes the state.
        prefix_rope: rotary embedding of images and prompt.
        prefix_mask: ``bool[B,P']``, False at padding; None without padding.
    """

    cache: list[KeysValues]
    mask: Tensor | None
    rope: Rotary
    last_input: Tensor
    prefix_rope: Rotary
    prefix_mask: Tensor | None


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
        """Dtype of attention and MLP weights; ``in_float32`` names more precise ones."""
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
        """Encode everything before the actions.

        Args:
            pixels: ``[B,V,3,h,w]`` in [-1, 1].
            ids: ``int64[B,L]``, padded on the right.
            prompt_mask: ``bool[B,L]``, False at padding.
            state: ``[B,D]``, normalised and padded; read by pi0 only.
            image_mask: ``bool[B,V]``, False where a row lacks the camera; None if all rows have all.
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
        """Return PaliGemma's final hidden states ``[B,P',W]``; nothing else needs its last layer."""
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
