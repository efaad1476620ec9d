"""SmolVLA's network (Shukor et al., "SmolVLA", 2025, arXiv 2506.01844), with lerobot's parameter names.

SmolVLM2 (SigLIP, a pixel shuffle and the lower layers of SmolLM2) encodes images, prompt and state; a narrower
transformer, the action expert, denoises an action chunk. Every second expert layer attends to the VLM's keys and values
of the same layer and to earlier actions (self-attention); the layers in between attend only to the VLM's, through their
own projections (cross-attention). Nothing before the actions depends on them or on the noise level, so the VLM's keys
and values are computed once per chunk (``SmolContext``).
Shapes: B batch, V cameras, N tokens of a camera, L prompt tokens, P all tokens before the actions, W the VLM's width,
E the expert's, G key-value heads, K head dimension, H actions, D padded action dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.attention import attention
from embodrl.models.common.init import QUERY_KEY_GAIN
from embodrl.models.common.llama import Mlp, RMSNorm
from embodrl.models.flow.expert_policy import ExpertNetwork, Towers
from embodrl.models.flow.gemma import GemmaSpec, KeysValues, LayerStack, Rotary, per_token, rotary, rotate
from embodrl.models.flow.siglip import SiglipTower
from embodrl.models.flow.time_embedding import time_embedding
from embodrl.models.smolvla.config import SmolVlaConfig

RMS_NORM_EPS = 1e-5


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions; keys and values of other tokens may precede its own.

    ``source`` is the width of the tokens behind keys and values; None for the tokens themselves.
    """

    def __init__(self, spec: GemmaSpec, source: int | None = None) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.is_cross = source is not None
        self.q_proj = nn.Linear(spec.width, spec.num_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(source or spec.width, spec.num_kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(source or spec.width, spec.num_kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.width, bias=False)

    def keys_values(self, x: Tensor, rope: Rotary) -> KeysValues:
        """Return keys and values ``[B,G,S,K]`` of ``[B,S,W]``."""
        return _rotated(self._heads(self.k_proj(x)), rope), self._heads(self.v_proj(x))

    def projected(self, known: KeysValues) -> KeysValues:
        """Return keys and values projected from another network's ``[B,G,P,K]``, without rotating again."""
        keys, values = (x.transpose(1, 2).flatten(2) for x in known)
        return self._heads(self.k_proj(keys)), self._heads(self.v_proj(values))

    def forward(self, x: Tensor, rope: Rotary, known: KeysValues, mask: Tensor | None) -> Tensor:
        """Map ``[B,S,W]`` to ``[B,S,W]``, attending to ``known``."""
        queries = _rotated(self._heads(self.q_proj(x)), rope)
        return self.o_proj(attention(queries, *known, mask).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _rotated(x: Tensor, rope: Rotary) -> Tensor:
    return rotate(x.float(), rope).to(x.dtype)


class DecoderLayer(nn.Module):
    """A pre-norm layer of Llama; ``source`` as in ``SelfAttention``."""

    def __init__(self, spec: GemmaSpec, source: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.width, RMS_NORM_EPS)
        self.self_attn = SelfAttention(spec, source)
        self.post_attention_layernorm = RMSNorm(spec.width, RMS_NORM_EPS)
        self.mlp = Mlp(spec.width, spec.mlp_dim)

    def keys_values(self, x: Tensor, rope: Rotary) -> KeysValues:
        """Return only the keys and values, for a layer whose output is unused."""
        return self.self_attn.keys_values(self.input_layernorm(x), rope)

    def forward(
        self, x: Tensor, rope: Rotary, mask: Tensor | None, past: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Return the output ``[B,S,W]`` and the tokens' own keys and values ``[B,G,S,K]``.

        Args:
            x: ``[B,S,W]``.
            rope: rotary embedding of the tokens.
            mask: ``bool``, broadcastable to ``[B,1,S,S]`` or, with ``past``, to ``[B,1,S,P+S]`` (cross-attention
                ``[B,1,S,P]``); None lets tokens see everything.
            past: keys and values of the VLM.
        """
        normed = self.input_layernorm(x)
        if self.self_attn.is_cross:
            assert past is not None
            own = seen = self.self_attn.projected(past)
        else:
            own = seen = self.self_attn.keys_values(normed, rope)
            if past is not None:
                seen = (torch.cat([past[0], own[0]], dim=2), torch.cat([past[1], own[1]], dim=2))
        x = x + self.self_attn(normed, rope, seen, mask)
        return x + self.mlp(self.post_attention_layernorm(x)), own


class Decoder(LayerStack):
    """The VLM's language model, or the expert; ``sources`` has each layer's attention ``source``."""

    def __init__(self, spec: GemmaSpec, vocab_size: int | None, sources: list[int | None]) -> None:
        super().__init__(spec, vocab_size, (DecoderLayer(spec, source) for source in sources))
        self.norm = RMSNorm(spec.width, RMS_NORM_EPS)

    def init_module(self, module: nn.Module) -> None:
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, SelfAttention):
            module.q_proj.weight.data *= QUERY_KEY_GAIN
            module.k_proj.weight.data *= QUERY_KEY_GAIN


class Projection(nn.Module):
    """Nesting level of parameter names."""

    def __init__(self, wide: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(wide, width, bias=False)


class Connector(nn.Module):
    """Projects vision features to language embeddings, ``scale`` x ``scale`` neighbouring patches per token."""

    def __init__(self, vision_width: int, width: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.modality_projection = Projection(vision_width * scale**2, width)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[B,N*scale^2,*]`` of a square grid to ``[B,N,W]`` (pixel shuffle, then a linear layer)."""
        batch, patches, _ = features.shape
        side = math.isqrt(patches)
        scale = self.scale
        blocks = features.view(batch, side // scale, scale, side // scale, scale, -1)
        return self.modality_projection.proj(blocks.transpose(2, 3).flatten(3).flatten(1, 2))


class SmolVlm(nn.Module):
    """SmolVLM2 without its output layer, cut to the used layers."""

    def __init__(self, config: SmolVlaConfig) -> None:
        super().__init__()
        self.vision_tower = SiglipTower(config.siglip)
        self.connector = Connector(config.siglip.width, config.vlm.width, config.scale_factor)
        self.text_model = Decoder(config.vlm, config.vocab_size, [None] * config.vlm.depth)


class _Vlm(nn.Module):
    """Nesting level of parameter names."""

    def __init__(self, config: SmolVlaConfig) -> None:
        super().__init__()
        self.model = SmolVlm(config)


class VlmWithExpert(nn.Module):
    """Nesting level of parameter names."""

    def __init__(self, config: SmolVlaConfig) -> None:
        super().__init__()
        self.vlm = _Vlm(config)
        source = config.vlm.num_kv_heads * config.vlm.head_dim
        places = [index * config.expert_every for index in range(config.expert.depth)]
        sources = [source if config.is_cross(place) else None for place in places]
        self.lm_expert = Decoder(config.expert, None, sources)


@dataclass
class SmolContext:
    """Encoded observation, computed once for all denoising steps.

    Attributes:
        cache: keys and values ``[B,G,P,K]`` of every layer of the VLM.
        last_input: ``[B,P,W]``, input of the VLM's last layer.
        prefix_rope: rotary embedding of the tokens before the actions.
        prefix_mask: ``bool[B,1,P,P]``, True where a token before the actions may attend.
        valid: ``bool[B,P]``, False at padding.
        rope: rotary embedding of the actions, after the tokens before them (self-attention).
        cross_rope: rotary embedding of the actions, counted from 0 (cross-attention).
    """

    cache: list[KeysValues]
    last_input: Tensor
    prefix_rope: Rotary
    prefix_mask: Tensor
    valid: Tensor
    rope: Rotary
    cross_rope: Rotary


class SmolVlaModel(ExpertNetwork):
    """SmolVLA."""

    trunk = "vlm_with_expert"

    def __init__(self, config: SmolVlaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.expert.width
        self.vlm_with_expert = VlmWithExpert(config)
        self.state_proj = nn.Linear(config.max_state_dim, config.vlm.width)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    @property
    def vlm(self) -> SmolVlm:
        return self.vlm_with_expert.vlm.model

    @property
    def expert(self) -> Decoder:
        return self.vlm_with_expert.lm_expert

    @property
    def towers(self) -> Towers:
        return Towers(self.vlm.vision_tower, self.vlm.connector, self.vlm.text_model, self.expert)

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Map ``[B,V,3,h,w]`` in [-1, 1] to embeddings ``[B,V*N,W]``."""
        features = self.vlm.vision_tower(pixels.flatten(0, 1).to(self.dtype))
        tokens = self.vlm.connector(features) * math.sqrt(self.config.vlm.width)
        return tokens.unflatten(0, (len(pixels), -1)).flatten(1, 2)

    def encode(self, pixels: Tensor, ids: Tensor, prompt_mask: Tensor, state: Tensor) -> SmolContext:
        """Encode everything before the actions.

        Args:
            pixels: ``[B,V,3,h,w]`` in [-1, 1].
            ids: ``int64[B,L]``, padded on the right.
            prompt_mask: ``bool[B,L]``, False at padding.
            state: ``[B,*]``, normalised and padded.
        """
        longest = int(prompt_mask.sum(dim=1).max())
        ids = ids[:, :longest]
        prompt_mask = prompt_mask[:, :longest]
        text = self.vlm.text_model
        images = self.embed_images(pixels)
        words = text.embed_tokens(ids) * math.sqrt(self.config.vlm.width)
        x = torch.cat([images, words, self.state_proj(state.to(self.dtype))[:, None]], dim=1)
        valid = torch.cat(
            [prompt_mask.new_ones(x.shape[0], images.shape[1]), prompt_mask, prompt_mask.new_ones(x.shape[0], 1)], dim=1
        )
        # Images and prompt see each other; the state sees them, and nothing before the actions sees the state.
        mask = valid[:, None, None].repeat(1, 1, x.shape[1], 1)
        mask[:, :, :-1, -1] = False
        positions = valid.cumsum(dim=1) - 1
        rope = rotary(positions.clamp(min=0), self.config.vlm.head_dim, torch.float32)
        cache: list[KeysValues] = []
        for layer in text.layers[:-1]:
            x, known = text.run(layer, x, rope, mask)
            cache.append(known)
        last = text.layers[-1]
        assert isinstance(last, DecoderLayer)
        cache.append(last.keys_values(x, rope))
        steps = torch.arange(self.config.action_horizon, device=x.device)[None]
        after = valid.sum(dim=1, keepdim=True)
        head_dim = self.config.expert.head_dim
        ropes = (rotary(after + steps, head_dim, torch.float32), rotary(steps, head_dim, torch.float32))
        return SmolContext(cache, x, rope, mask, valid, *ropes)

    def prefix_hidden(self, context: SmolContext) -> Tensor:
        """Return the VLM's final hidden states ``[B,P,W]``; nothing else needs its last layer."""
        text = self.vlm.text_model
        x, _ = text.run(text.layers[-1], context.last_input, context.prefix_rope, context.prefix_mask)
        return text.norm(x)

    def velocity(self, context: SmolContext, x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.action_in_proj(x.to(self.dtype))
        time = time_embedding(tau, self.config.expert.width).to(self.dtype)
        mixed = torch.cat([tokens, per_token(time).expand_as(tokens)], dim=-1)
        hidden = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(mixed)))
        horizon = hidden.shape[1]
        before = context.valid[:, None, None].expand(-1, 1, horizon, -1)
        causal = torch.ones(horizon, horizon, dtype=torch.bool, device=x.device).tril()
        whole = torch.cat([before, causal.expand(len(x), 1, -1, -1)], dim=-1)
        for index, layer in enumerate(self.expert.layers):
            place = index * self.config.expert_every
            cross = self.config.is_cross(place)
            rope, mask = (context.cross_rope, before) if cross else (context.rope, whole)
            hidden, _ = self.expert.run(layer, hidden, rope, mask, context.cache[place])
        hidden = self.expert.norm(hidden)
        return self.action_out_proj(hidden), hidden
