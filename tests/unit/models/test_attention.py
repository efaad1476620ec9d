"""Attention on a CPU: by formula and by torch's kernel, whole and in blocks, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from embodrl.models.common import attention as module
from embodrl.models.common.attention import attention

BATCH, HEADS, WIDTH, VALUE_WIDTH = 5, 4, 8, 6


def inputs(groups: int, queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    shapes = ((BATCH, queries, HEADS, WIDTH), (BATCH, keys, groups, WIDTH), (BATCH, keys, groups, VALUE_WIDTH))
    tensors = [torch.randn(shape, generator=noise).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]
    return tensors[0], tensors[1], tensors[2]


def masks(kind: str, queries: int, keys: int) -> Tensor | None:
    if kind == "none":
        return None
    shape = {"rows": (BATCH, 1, 1, keys), "all": (1, 1, queries, keys), "flat": (queries, keys)}[kind]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[..., 0] = True
    return mask


def results(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> list[Tensor]:
    out = attention(q, k, v, mask, causal=causal)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), weight)]


@pytest.mark.parametrize("kind", ["none", "causal", "rows", "all", "flat"])
@pytest.mark.parametrize(("groups", "queries", "keys"), [(4, 7, 7), (2, 7, 7), (1, 3, 7), (4, 1, 7)])
def test_attention_is_torchs(kind: str, groups: int, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    causal = kind == "causal"
    if causal and queries != keys:
        pytest.skip("a causal mask is square")
    mask = None if causal else masks(kind, queries, keys)
    tensors = inputs(groups, queries, keys, torch.float32)
    repeated = [x.repeat_interleave(HEADS // groups, 1) for x in tensors[1:]]
    expected = F.scaled_dot_product_attention(tensors[0], *repeated, attn_mask=mask, is_causal=causal)
    weight = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    reference = [expected.detach(), *torch.autograd.grad(expected, tensors, weight)]
    whole = results(*tensors, mask, causal)
    for ours, theirs in zip(whole, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(module, "WHOLE_SCORES", 0)
    monkeypatch.setattr(module, "BLOCK_SCORES", 2 * HEADS * queries * keys)  # blocks of two samples, and a rest
    for ours, theirs in zip(results(*tensors, mask, causal), whole, strict=True):
        assert torch.equal(ours, theirs)


def test_the_type_is_that_of_autocast() -> None:
    q, k, v = inputs(2, 6, 6, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in torch.autograd.grad(out.float().sum(), (q, k, v)))
    torch.testing.assert_close(out.float(), attention(q, k, v), rtol=0.02, atol=0.02)
    assert attention(*(x.bfloat16() for x in (q, k, v))).dtype == torch.bfloat16


def test_no_weights_are_kept_without_gradients() -> None:
    q, k, v = inputs(4, 6, 6, torch.float32)
    assert not attention(q.detach(), k.detach(), v.detach()).requires_grad
    with torch.no_grad():
        found = attention(q, k, v)
    assert found.grad_fn is None
    torch.testing.assert_close(found, attention(q, k, v).detach(), rtol=1e-5, atol=1e-6)
