"""Element-wise transformer operations with custom backward passes, a few samples at a time.

In plain torch each takes a dozen passes, and as many backward, over activations that exceed a core's cache. GPUs use
plain torch. Shapes: B batch, H heads, S tokens, E head dimension, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 1 << 17
"""Numbers per block: 512 KiB in float32."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``weight * x / rms(x)``, computed in float32, for ``x [...,D]`` and ``weight [D]``.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4; ``eps`` is added to the mean square.
    The default ``dtype`` is the wider one of ``x`` and ``weight``.
    """
    dtype = dtype or torch.promote_types(x.dtype, weight.dtype)
    if x.device.type == "cpu":
        # Rows are views, which need a contiguous tensor.
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
        rows = x.view(-1, x.shape[-1])
        d_out = gradients[0].reshape(-1, x.shape[-1])
        d_x = torch.empty_like(rows)
        # float32: thousands of rows are summed.
        d_weight = torch.zeros(len(weight))
        wide_weight = weight.float()
        for part in _blocks(rows):
            normed = rows[part] * scale[part]
            d_normed = d_out[part].float()
            d_weight += (d_normed * normed).sum(0)
            d_normed = d_normed * wide_weight
            # d_x = scale (w d_out - x_hat mean(w d_out x_hat)), where x_hat is the row divided by its root mean square.
            d_normed.sub_(normed.mul_((d_normed * normed).mean(-1, keepdim=True)))
            d_x[part] = d_normed.mul_(scale[part])
        return d_x.view(x.shape), d_weight.to(weight.dtype), None, None


def split_heads(
    x: Tensor, head_dim: int, counts: tuple[int, ...], rope: tuple[Tensor, Tensor] | None = None, turned: int = 0
) -> tuple[Tensor, ...]:
    """Split one fused projection into queries, keys and values, each ``[B,H_i,S,E]``.

    Rotary parts rotate coordinate i with coordinate i + E/2 (Su et al., "RoFormer", 2021), in float32.

    Args:
        x: ``[B,S,sum(H_i)*E]``.
        head_dim: E.
        counts: the H_i.
        rope: cosines and sines ``[B,S,E]`` with equal halves; B may be 1.
        turned: number of leading parts to rotate.
    """
    cos = sin = None
    if rope is not None:
        cos, sin = (part.float()[:, None] for part in rope)
        # With the sign folded into the sines, a rotated head is x cos + roll(x) sin.
        sin = torch.cat((-sin[..., : head_dim // 2], sin[..., head_dim // 2 :]), dim=-1)
    if x.device.type == "cpu":
        return _SplitHeads.apply(x, cos, sin, head_dim, counts, turned)
    parts = x.unflatten(-1, (-1, head_dim)).transpose(1, 2).split(counts, dim=1)
    if cos is None or sin is None:
        return parts
    shift = head_dim // 2
    turns = [torch.addcmul(part * cos, part.roll(shift, dims=-1), sin).to(x.dtype) for part in parts[:turned]]
    return (*turns, *parts[turned:])


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor | None, sin: Tensor | None, head_dim: int, counts: tuple[int, ...], turned: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.turned = turned
        ctx.shape = x.shape
        heads = x.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        outputs = tuple(x.new_empty(len(x), count, x.shape[1], head_dim) for count in counts)
        parts = heads.split(counts, dim=1)
        _rotate(parts[:turned], outputs[:turned], cos, sin)
        for part, output in zip(parts[turned:], outputs[turned:], strict=True):
            output.copy_(part)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        d_x = gradients[0].new_empty(ctx.shape)
        heads = d_x.unflatten(-1, (-1, gradients[0].shape[-1])).transpose(1, 2)
        parts = heads.split([part.shape[1] for part in gradients], dim=1)
        turned = ctx.turned
        _rotate(gradients[:turned], parts[:turned], cos, None if sin is None else -sin)  # inverse rotation
        for part, gradient in zip(parts[turned:], gradients[turned:], strict=True):
            part.copy_(gradient)
        return d_x, None, None, None, None, None


def _rotate(sources: Sequence[Tensor], targets: Sequence[Tensor], cos: Tensor | None, sin: Tensor | None) -> None:
    """Write heads ``[B,H,S,E]``, rotated, into tensors of the same shapes."""
    for source, target in zip(sources, targets, strict=True):
        assert cos is not None and sin is not None
        half = source.shape[-1] // 2
        # One buffer for all blocks, so it stays in the cache.
        buffers = torch.empty(2, _block_size(source), *source.shape[1:])
        for part in _blocks(source):
            x, out = buffers[:, : len(source[part])]
            x.copy_(source[part])
            c, s = (cos, sin) if len(cos) == 1 else (cos[part], sin[part])
            torch.mul(x, c, out=out)
            out[..., :half].addcmul_(x[..., half:], s[..., :half])
            out[..., half:].addcmul_(x[..., :half], s[..., half:])
            target[part] = out


def swiglu(both: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` ``[...,M]`` of ``[...,2M]`` (Shazeer, "GLU Variants Improve Transformer", 2020)."""
    if both.device.type == "cpu":
        return _SwiGlu.apply(both)
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        out = torch.empty(gate.shape, dtype=gate.dtype)
        for part in _blocks(gate):
            torch.mul(F.silu(gate[part]), up[part], out=out[part])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        d_both = torch.empty_like(both)
        gate, up = both.chunk(2, dim=-1)
        d_gate, d_up = d_both.chunk(2, dim=-1)
        for part in _blocks(gate):
            d_out = gradients[0][part]
            torch.mul(d_out, F.silu(gate[part]), out=d_up[part])
            torch.ops.aten.silu_backward(d_out * up[part], gate[part], grad_input=d_gate[part])
        return d_both


def _blocks(x: Tensor) -> Iterator[slice]:
    size = _block_size(x)
    return (slice(start, start + size) for start in range(0, len(x), size))


def _block_size(x: Tensor) -> int:
    return max(1, BLOCK * len(x) // max(1, x.numel()))
