"""Element-wise parts against torch's own operations: values, gradients, types, whole and in blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from embodrl.models.common import fused
from embodrl.models.common.fused import rms_norm, split_heads, swiglu

EPS = 1e-5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS))


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def check(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    wanted = theirs(*inputs)
    weight = torch.linspace(-1, 1, wanted.numel()).view(wanted.shape)
    found = ours(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    pairs = zip(torch.autograd.grad(found, inputs, weight), torch.autograd.grad(wanted, inputs, weight), strict=True)
    for mine, reference in pairs:
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


@pytest.fixture(params=[1 << 17, 1, 100], ids=["whole", "one", "some"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "BLOCK", request.param)


def test_norm() -> None:
    inputs = (draw(5, 7, 12), draw(12, seed=1))
    check(lambda x, weight: rms_norm(x, weight, EPS), plain_norm, inputs)
    check(
        lambda x, weight: rms_norm(x.transpose(0, 1), weight, EPS),
        lambda x, w: plain_norm(x.transpose(0, 1), w),
        inputs,
    )


@pytest.mark.parametrize("batch", [1, 5])
def test_heads(batch: int) -> None:
    angle = torch.rand(batch, 7, 4, generator=torch.Generator().manual_seed(2)) * 6
    rope = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()

    def plain(x: Tensor, place: int, turned: int) -> Tensor:
        part = x.unflatten(-1, (-1, 8)).transpose(1, 2).split((3, 2, 2), dim=1)[place]
        return plain_rotation(part, *rope) if place < turned else part

    for turned in (0, 1, 2):
        given = rope if turned else None
        for place in range(3):
            check(
                lambda x, i=place, n=turned, rope=given: split_heads(x, 8, (3, 2, 2), rope, n)[i],
                lambda x, i=place, n=turned: plain(x, i, n),
                (draw(5, 7, 56),),
            )
        check(
            lambda x, n=turned, rope=given: torch.cat(split_heads(x, 8, (3, 2, 2), rope, n), dim=1),
            lambda x, n=turned: torch.cat([plain(x, i, n) for i in range(3)], dim=1),
            (draw(5, 7, 56),),
        )


def test_gated_unit() -> None:
    check(swiglu, lambda both: F.silu(both[..., :12]) * both[..., 12:], (draw(5, 7, 24),))


def test_types() -> None:
    x, weight = draw(2, 3, 8).detach(), torch.ones(8)
    assert rms_norm(x.bfloat16(), weight, EPS).dtype == torch.float32
    assert rms_norm(x.bfloat16(), weight.bfloat16(), EPS).dtype == torch.bfloat16
    assert rms_norm(x, weight, EPS, torch.bfloat16).dtype == torch.bfloat16
    narrow, angles = x.bfloat16(), torch.rand(1, 3, 4)
    assert split_heads(narrow, 4, (2,), (angles, angles), 1)[0].dtype == swiglu(narrow).dtype == torch.bfloat16
    torch.testing.assert_close(
        rms_norm(x, weight, EPS, torch.bfloat16).float(), plain_norm(x, weight), rtol=0.01, atol=0.01
    )
