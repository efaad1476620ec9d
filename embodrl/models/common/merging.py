"""Weights of linear layers with their low-rank adapters merged."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from embodrl.storage.files import Deferred

ADAPTER = "default"


def adapter_factors(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return the factors ``down [rank,in]`` and ``up [out,rank]``, scaled in ``up``; None without an adapter."""
    if not hasattr(layer, "lora_A"):
        return None
    adapted: Any = layer
    return adapted.lora_A[ADAPTER].weight, adapted.lora_B[ADAPTER].weight * adapted.scaling[ADAPTER]


def linear_weight(layer: nn.Module, rows: slice = slice(None)) -> Tensor:
    """Return rows of a linear layer's effective weight, adapter included, with gradients and the more precise dtype."""
    weight = cast(Tensor, layer.weight)[rows]
    factors = adapter_factors(layer)
    # W + scale * up @ down; the scale is already in the second factor.
    return weight if factors is None else weight + factors[1][rows] @ factors[0]


def merged_state_dict(module: nn.Module, deferred: bool = False) -> dict[str, Tensor]:
    """Return ``state_dict()`` under plain layer names with adapters merged; the module is unchanged.

    Merged weights are new CPU tensors in the more precise dtype of weight and adapter: in bfloat16, weights of 0.02
    would lose two thirds of the elements of a product of std 3e-5. ``deferred`` merges each weight when it is written;
    all at once in float32 take twice the memory of a bf16 network.
    """
    merge = _merged_later if deferred else _merged
    adapted = {name: part for name, part in module.named_modules() if adapter_factors(part) is not None}
    inside = {f"{name}.{key}" for name, part in adapted.items() for key in part.state_dict()}
    plain: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        owner, inner, leaf = name.rpartition(".base_layer.")
        if inner and owner in adapted:
            plain[f"{owner}.{leaf}"] = merge(adapted[owner]) if leaf == "weight" else tensor
        elif name not in inside:
            plain[name] = tensor
    return plain


@torch.no_grad()
def _merged(layer: nn.Module) -> Tensor:
    return linear_weight(layer).cpu()


def _merged_later(layer: nn.Module) -> Tensor:
    weight = cast(Tensor, layer.weight)
    factors = adapter_factors(layer)
    assert factors is not None
    dtype = torch.promote_types(weight.dtype, factors[0].dtype)
    return Deferred.of(weight.shape, dtype, lambda: _merged(layer))
