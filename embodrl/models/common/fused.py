"""Element-wise parts of transformers with their own backward passes, a few samples at a time.

Written with torch's operations each of them is a dozen passes over activations that leave the cache of a core, and as
many again backward. On a GPU they are left to torch. Shapes: B batch, H heads, S tokens, E head dimension, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 1 << 17
"""Numbers of a block: 512 KiB in float32."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``weight * x / rms(x)``, computed in float32.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.

    Args:
        x: ``[...,D]``.
        weight: ``[D]``.
        eps: added to the mean square.
        dtype: of the result; None for the wider of those of ``x`` and the weight.
    """
    dtype = dtype or torch.promote_types(x.dtype, weight.dtype)
    if x.device.type == "cpu":
        return _RmsNorm.apply(x.contiguous(), weight, eps, dtype)
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)).to(dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=dtype)
        scale = torch.empty(len(rows), 1)
        wide_weight = weight.float()
        for part in _blocks(rows):
            wide = rows[part].float()
            scale[part] = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            out[part] = (wide * scale[part]).mul_(wide_weight)
        ctx.save_for_backward(x, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        rows, d_out = x.view(-1, x.shape[-1]), gradients[0].reshape(-1, x.shape[-1])
        d_x = torch.empty_like(rows)
        d_weight = torch.zeros(len(weight))
        wide_weight = weight.float()
        for part in _blocks(rows):
            normed = rows[part] * scale[part]
            d_normed = d_out[part].float()
            d_weight += (d_normed * normed).sum(0)
            d_normed = d_normed * wide_weight
            d_normed.sub_(normed.mul_((d_normed * normed).mean(-1, keepdim=True)))
            d_x[part] = d_normed.mul_(scale[part])
        return d_x.view(x.shape), d_weight.to(weight.dtype), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn coordinate i with coordinate i + E/2 (Su et al., "RoFormer", 2021), computed in float32.

    Args:
        x: ``[B,H,S,E]``.
        cos: ``[B,S,E]``, both halves equal; B may be 1.
        sin: as ``cos``.
    """
    signed = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), dim=-1).float()[:, None]
    cos = cos.float()[:, None]
    if x.device.type == "cpu":
        return _Rotate.apply(x, cos, signed)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed).to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, -sin), None, None  # the turn back


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    for part in _blocks(x):
        wide = x[part].float()
        factors = (cos, sin) if len(cos) == 1 else (cos[part], sin[part])
        out[part] = (wide * factors[0]).addcmul_(wide.roll(x.shape[-1] // 2, dims=-1), factors[1])
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` (Shazeer, "GLU Variants Improve Transformer", 2020), ``[...,M]`` as the inputs."""
    if gate.device.type == "cpu":
        return _SwiGlu.apply(gate, up)
    return F.silu(gate) * up


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty(gate.shape, dtype=gate.dtype)
        for part in _blocks(gate):
            torch.mul(F.silu(gate[part]), up[part], out=out[part])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        # Side by side, as the product that has made both wants its gradient.
        both = torch.empty(*gate.shape[:-1], 2, gate.shape[-1], dtype=gate.dtype)
        d_gate, d_up = both.unbind(-2)
        for part in _blocks(gate):
            d_out = gradients[0][part]
            torch.mul(d_out, F.silu(gate[part]), out=d_up[part])
            d_gate[part] = torch.ops.aten.silu_backward(d_out * up[part], gate[part])
        return d_gate, d_up


def _blocks(x: Tensor) -> Iterator[slice]:
    """Yield parts of the first dimension."""
    size = max(1, BLOCK * len(x) // max(1, x.numel()))
    return (slice(start, start + size) for start in range(0, len(x), size))
