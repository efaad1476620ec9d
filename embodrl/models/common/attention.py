"""Scaled dot-product attention in the form that is fastest on the device at hand.

Vaswani et al., "Attention Is All You Need", 2017. Shapes: B batch, H heads, Q queries, S keys, E head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

IMPLEMENTATION = "embodrl"


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return ``softmax(q k^T / sqrt(E)) v`` as ``[B,H,Q,E]``.

    On CPU it is written as matrix products: for sequences of about a hundred tokens the backward pass of torch's fused
    kernel takes several times as long.

    Args:
        q: ``[B,H,Q,E]``.
        k: ``[B,G,S,E]``, where G divides H.
        v: as ``k``.
        mask: ``bool``, broadcastable to ``[B,H,Q,S]``; True where the query may see the key.
        causal: a query sees no later key; only with Q = S and without a mask.
    """
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1]
        )
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    # Heads that share keys become rows of one product, so that the keys need not be repeated.
    rows = (q * width**-0.5).reshape(batch, groups, heads // groups * length, width)
    scores = torch.matmul(rows, k.transpose(-1, -2)).view(batch, heads, length, -1)
    if causal:
        mask = torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores + torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype).view(*rows.shape[:3], -1)
    return torch.matmul(weights, v).view(batch, heads, length, -1)


def with_attention(**settings: Any) -> dict[str, Any]:
    """Return arguments of a transformers configuration: ``settings``, and the choice of ``attention``."""
    return {"attn_implementation": IMPLEMENTATION, **settings}


def _transformers_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **unused: Any
) -> tuple[Tensor, None]:
    """Adapt ``attention`` to transformers; without a mask the model is causal, unless its configuration denies it."""
    causal = attention_mask is None and getattr(module.config, "is_causal", True)
    out = attention(query, key, value, attention_mask, causal=causal)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _transformers_attention)
