"""Llama beside transformers': names, hidden states, gradients, and outputs of the last tokens alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from embodrl.models.common import llama
from embodrl.models.common.llama import Llama, LlamaSpec, causal_mask, token_positions

BATCH, LENGTH, WIDTH = 3, 9, 24


def build(groups: int = 2, causal: bool = True) -> tuple[Llama, LlamaForCausalLM]:
    spec = LlamaSpec(40, WIDTH, 40, 3, 4, groups)
    reference = LlamaForCausalLM(spec.public(causal)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    ours = Llama(spec, causal)
    ours.load_state_dict(reference.state_dict())
    return ours, reference


def embeddings() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def padded() -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, 1:3], mask[1, 4] = 0, 0
    return mask


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("groups", "kind"), [(4, "causal"), (2, "causal"), (1, "padded"), (2, "all")])
def test_it_is_the_one_of_transformers(
    groups: int, kind: str, fused: bool, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "FUSE_BELOW_WIDTH", 1000 if fused else 0)
    ours, reference = build(groups, kind != "all")
    x = embeddings()
    mask = positions = bias = None
    if kind == "padded":
        mask = causal_mask(padded())
        positions = token_positions(padded())
    elif kind == "all":
        mask = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    if mask is not None:
        bias = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf).expand(-1, -1, LENGTH, -1)
    wanted = reference.model(inputs_embeds=x, attention_mask=bias, position_ids=positions, use_cache=False)
    wanted = wanted.last_hidden_state[:, first:]
    found = ours.model(x, mask, positions, first)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weight = torch.linspace(-1, 1, wanted.numel()).view(wanted.shape)
    parameters, named = dict(ours.model.layers.named_parameters()), dict(reference.model.layers.named_parameters())
    gradients = torch.autograd.grad(found, [x, *parameters.values()], weight)
    references = torch.autograd.grad(wanted, [x, *(named[name] for name in parameters)], weight)
    for name, mine, theirs in zip(["x", *parameters], gradients, references, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_recomputed_activations_give_the_same_gradients() -> None:
    ours, _ = build()
    plain = torch.autograd.grad(ours.model(embeddings(), first=4).sum(), list(ours.model.layers.parameters()))
    ours.model.gradient_checkpointing = True
    again = torch.autograd.grad(ours.model(embeddings(), first=4).sum(), list(ours.model.layers.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_bfloat16_is_close_to_float32() -> None:
    ours, _ = build()
    exact = ours.model(embeddings())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = ours.model(embeddings())
    assert narrow.dtype == torch.float32
    assert (narrow - exact).norm() < 0.02 * exact.norm()
