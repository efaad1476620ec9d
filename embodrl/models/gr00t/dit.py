"""Diffusion transformer with adaptive layer norms and cross-attention, with the parameter names of diffusers' blocks.

Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023, without gates; as in GR00T (NVIDIA, 2025) even
blocks attend to a context and odd ones to the sequence itself. GR00T's training dropout is omitted: with it, a
rollout's log-probs could not be recomputed.
Shapes: B batch, L sequence, S context, D width, C context width, O output width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from embodrl.models.common.attention import attention
from embodrl.models.common.init import init_linears
from embodrl.models.flow.gemma import per_token

LAYER_NORM_EPS = 1e-5
OUTPUT_NORM_EPS = 1e-6
TIME_CHANNELS = 256
MAX_PERIOD = 10000.0

KeyValue = tuple[Tensor, Tensor]
"""Keys and values ``[B,heads,S,head_dim]`` of a context."""
ContextMask = Tensor | Sequence[Tensor | None] | None
"""``bool[B,1,1,S]``, False at unseen context: one for all blocks, or one per block; None if everything is seen."""


@dataclass(frozen=True)
class TransformerSpec:
    """Layers, heads and head dimension; the width is heads x head dimension."""

    num_layers: int
    num_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """D."""
        return self.num_heads * self.head_dim


class TimestepEmbedding(nn.Module):
    """Two layers on cosines and sines."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(TIME_CHANNELS, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, waves: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(waves)))


class TimestepEncoder(nn.Module):
    """Encodes an integer time as a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(width)

    def forward(self, bucket: Tensor) -> Tensor:
        """Map ``int64[...]`` to ``[...,D]``: ``cos, sin`` of ``t * 10000^(-i / 127)``, i from 0 to 127, then the MLP.

        In float32 and the reference's order of operations: at angles of a thousand, rounding shows.
        """
        half = TIME_CHANNELS // 2
        exponent = -math.log(MAX_PERIOD) * torch.arange(half, dtype=torch.float32, device=bucket.device)
        angle = bucket.float()[..., None] * torch.exp(exponent / (half - 1))
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return self.timestep_embedder(waves.to(self.timestep_embedder.linear_1.weight.dtype))


class AdaLayerNorm(nn.Module):
    """Layer norm with scale and shift computed from the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return ``norm(x) (1 + scale) + shift``, ``[B,L,D]``; ``time`` is ``silu`` of ``[B,D]`` or ``[B,L,D]``."""
        scale, shift = per_token(self.linear(time)).chunk(2, dim=-1)
        return F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS) * (1.0 + scale) + shift


class CrossAttention(nn.Module):
    """Multi-head attention to a context of another width, or to the sequence itself."""

    def __init__(self, spec: TransformerSpec, context_width: int) -> None:
        super().__init__()
        self.num_heads = spec.num_heads
        self.to_q = nn.Linear(spec.width, spec.width)
        self.to_k = nn.Linear(context_width, spec.width)
        self.to_v = nn.Linear(context_width, spec.width)
        self.to_out = nn.ModuleList([nn.Linear(spec.width, spec.width)])

    def key_value(self, context: Tensor) -> KeyValue:
        """Return the keys and values of a context ``[B,S,C]``."""
        return self._heads(self.to_k(context)), self._heads(self.to_v(context))

    def forward(self, x: Tensor, known: KeyValue, mask: Tensor | None) -> Tensor:
        """Map ``[B,L,D]`` to ``[B,L,D]``; ``mask bool``, broadcastable to ``[B,heads,L,S]``, is False at padding."""
        out = attention(self._heads(self.to_q(x)), *known, mask)
        return self.to_out[0](out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class GeluProjection(nn.Module):
    """A linear layer and the tanh approximation of GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """MLP with a hidden size of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # "1" is the name of the omitted dropout.
        self.net = nn.ModuleDict({"0": GeluProjection(width, 4 * width), "2": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        return self.net["2"](self.net["0"](x))


class DitBlock(nn.Module):
    """Attention after an adaptive norm, MLP after a norm without parameters."""

    def __init__(self, spec: TransformerSpec, context_width: int) -> None:
        super().__init__()
        self.norm1 = AdaLayerNorm(spec.width)
        self.attn1 = CrossAttention(spec, context_width)
        self.ff = FeedForward(spec.width)

    def keys_values(self, context: Tensor) -> KeyValue:
        """Return the keys and values of a context ``[B,S,C]``."""
        return self.attn1.key_value(context)

    def forward(self, x: Tensor, time: Tensor, known: KeyValue | None, mask: Tensor | None) -> Tensor:
        """Map ``[B,L,D]`` to ``[B,L,D]``, attending to ``known``, or to ``x`` if that is None."""
        normed = self.norm1(x, time)
        x = x + self.attn1(normed, self.attn1.key_value(normed) if known is None else known, mask)
        return x + self.ff(F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS))


class DiffusionTransformer(nn.Module):
    """Blocks that alternately attend to a context and to the sequence, and an output modulated by the time."""

    def __init__(self, spec: TransformerSpec, context_width: int, output_width: int) -> None:
        super().__init__()
        self.spec = spec
        self.gradient_checkpointing = False
        self.timestep_encoder = TimestepEncoder(spec.width)
        self.transformer_blocks = nn.ModuleList(
            DitBlock(spec, spec.width if i % 2 else context_width) for i in range(spec.num_layers)
        )
        self.proj_out_1 = nn.Linear(spec.width, 2 * spec.width)
        self.proj_out_2 = nn.Linear(spec.width, output_width)

    def key_values(self, context: Tensor) -> list[KeyValue | None]:
        """Return each block's keys and values of a context ``[B,S,C]``, which serve every denoising step."""
        blocks = cast("Iterable[DitBlock]", self.transformer_blocks)
        return [None if i % 2 else block.keys_values(context) for i, block in enumerate(blocks)]

    def forward(self, x: Tensor, bucket: Tensor, known: list[KeyValue | None], mask: ContextMask) -> Tensor:
        """Return ``[B,L,O]`` for ``x [B,L,D]``; ``bucket`` is the time ``int64[B]``, or ``int64[B,L]`` per token."""
        masks = [mask] * len(known) if mask is None or isinstance(mask, Tensor) else mask
        time = F.silu(self.timestep_encoder(bucket))
        for block, pair, of_block in zip(self.transformer_blocks, known, masks, strict=True):
            seen = None if pair is None else of_block
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, time, pair, seen, use_reentrant=False)
            else:
                x = block(x, time, pair, seen)
        shift, scale = per_token(self.proj_out_1(time)).chunk(2, dim=-1)
        return self.proj_out_2(F.layer_norm(x, x.shape[-1:], eps=OUTPUT_NORM_EPS) * (1.0 + scale) + shift)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch; norms start independent of the time."""
        init_linears(self, generator, residual=("to_out.0", "net.2"), blocks=self.spec.num_layers)
        for block in cast("Iterable[DitBlock]", self.transformer_blocks):
            nn.init.zeros_(block.norm1.linear.weight)
        nn.init.zeros_(self.proj_out_1.weight)


class SelfAttentionBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.attn1 = CrossAttention(spec, spec.width)
        self.norm3 = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.ff = FeedForward(spec.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attn1(normed, self.attn1.key_value(normed), mask)
        return x + self.ff(self.norm3(x))


class SelfAttentionTransformer(nn.Module):
    """Blocks of bidirectional self-attention."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.gradient_checkpointing = False
        self.transformer_blocks = nn.ModuleList(SelfAttentionBlock(spec) for _ in range(spec.num_layers))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map ``[B,S,D]`` to ``[B,S,D]``; ``mask bool[B,1,1,S]`` is False at padding."""
        for block in self.transformer_blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return x

    def init_weights(self, generator: torch.Generator) -> None:
        init_linears(self, generator, residual=("to_out.0", "net.2"), blocks=self.spec.num_layers)
        for block in cast("Iterable[SelfAttentionBlock]", self.transformer_blocks):
            for norm in (block.norm1, block.norm3):
                nn.init.ones_(norm.weight)
                nn.init.zeros_(norm.bias)
