"""Scaled dot-product attention in the fastest form for the device.

Vaswani et al., "Attention Is All You Need", 2017. Shapes: B batch, H heads, Q queries, S keys, E head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMPLEMENTATION = "embodrl"
WHOLE_SCORES = 1 << 21
"""Maximum number of scores computed at once on a CPU: 8 MiB in float32."""
BLOCK_SCORES = 1 << 19
"""Scores per block above that limit."""


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return ``softmax(q k^T / sqrt(E)) v`` as ``[B,H,Q,F]``, in the dtype chosen by autocast.

    Args:
        q: ``[B,H,Q,E]``.
        k: ``[B,G,S,E]``, where G divides H.
        v: ``[B,G,S,F]``; normally F = E.
        mask: ``bool``, broadcastable to ``[B,H,Q,S]``; True where the query may see the key.
        causal: a query sees no later key; requires Q = S and no mask.
    """
    kind = q.device.type
    if kind != "cpu":
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1]
        )
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    q = q * q.shape[-1] ** -0.5
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q = q.to(dtype)
        k = k.to(dtype)
        v = v.to(dtype)
    bias = None
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    with torch.autocast(kind, enabled=False):
        if not torch.is_grad_enabled():  # decoding keeps keys in its own layout, which a copy would lose
            return _attend(q, k, v, bias)
        return _BlockwiseAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), bias)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Gradient-free ``_BlockwiseAttention.forward``."""
    batch, heads, length, width = q.shape
    rows = q.reshape(batch, k.shape[1], -1, width)
    scores = torch.matmul(rows, k.transpose(-1, -2)).view(batch, heads, length, -1)
    if bias is not None:
        scores = scores + bias
    weights = scores.softmax(dim=-1).view(*rows.shape[:3], -1)
    return torch.matmul(weights, v).view(batch, heads, length, -1)


class _BlockwiseAttention(torch.autograd.Function):
    """Attention over a few samples at a time, for scores that would not fit in a core's cache.

    At 121 tokens forward and backward take 0.7 of the time of whole products, bit-exact; torch's fused kernel takes
    twice that time.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Compute attention; ``q [B,H,Q,E]`` is already scaled, ``bias`` is broadcastable to scores ``[B,H,Q,S]``."""
        batch, heads, length, width = q.shape
        groups = k.shape[1]
        keep = any(ctx.needs_input_grad)
        # Heads that share keys become rows of one product, so keys need not be repeated.
        q = q.reshape(batch * groups, -1, width)
        k = k.flatten(0, 1)
        v = v.flatten(0, 1)
        out = v.new_empty(len(q), q.shape[1], v.shape[-1])
        kept = []
        for samples, rows in _blocks(batch, groups, q.shape[1] * k.shape[1]):
            scores = torch.bmm(q[rows], k[rows].transpose(-1, -2))
            if bias is not None:
                scores.view(-1, heads, length, k.shape[1]).add_(bias if len(bias) == 1 else bias[samples])
            weights = scores.softmax(dim=-1)  # bf16 is computed in float32 and rounded once
            torch.bmm(weights, v[rows], out=out[rows])
            if keep:
                kept.append(weights)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.batch = batch
        ctx.heads = heads
        return out.view(batch, heads, length, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *kept = ctx.saved_tensors
        d_out = gradients[0].reshape(*q.shape[:2], -1)
        d_q = torch.empty_like(q)
        d_k = torch.empty_like(k)
        d_v = torch.empty_like(v)
        start = 0
        for weights in kept:
            rows = slice(start, start + len(weights))
            start += len(weights)
            torch.bmm(weights.transpose(-1, -2), d_out[rows], out=d_v[rows])
            d_weights = torch.bmm(d_out[rows], v[rows].transpose(-1, -2))
            d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            torch.bmm(d_scores, k[rows], out=d_q[rows])
            torch.bmm(d_scores.transpose(-1, -2), q[rows], out=d_k[rows])
        batch = ctx.batch
        heads = ctx.heads
        d_q = d_q.view(batch, heads, -1, q.shape[-1])
        return d_q, d_k.view(batch, -1, *k.shape[1:]), d_v.view(batch, -1, *v.shape[1:]), None


def _blocks(batch: int, groups: int, scores: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of samples and of their rows; a sample's ``groups``, of ``scores`` each, are consecutive rows."""
    total = batch * groups * scores
    size = batch if total <= WHOLE_SCORES else max(1, BLOCK_SCORES // (groups * scores))
    for start in range(0, batch, size):
        yield slice(start, start + size), slice(start * groups, (start + size) * groups)


def with_attention(**settings: Any) -> dict[str, Any]:
    """Return ``settings`` of a transformers configuration, extended to select ``attention``."""
    from transformers import AttentionInterface  # 2.5 s in every process: only when building such a model

    AttentionInterface.register(IMPLEMENTATION, _transformers_attention)
    return {"attn_implementation": IMPLEMENTATION, **settings}


def _transformers_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **unused: Any
) -> tuple[Tensor, None]:
    """Adapt ``attention`` to transformers; without a mask, causal unless the model's configuration says otherwise."""
    causal = attention_mask is None and getattr(module.config, "is_causal", True)
    out = attention(query, key, value, attention_mask, causal=causal)
    return out.transpose(1, 2).contiguous(), None
