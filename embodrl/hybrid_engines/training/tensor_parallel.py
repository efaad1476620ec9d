"""Tensor parallelism of the decoder layers of Llama, Qwen3 and Gemma, by DTensor plans.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019: the input
projections of attention and MLP are sharded by columns, the output projections by rows, and each block needs two sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from embodrl.errors import EmbodrlError

MLP = {"mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel, "mlp.down_proj": RowwiseParallel}
ATTENTION = {"self_attn.q_proj": ColwiseParallel, "self_attn.o_proj": RowwiseParallel}
KEYS_VALUES = ("self_attn.k_proj", "self_attn.v_proj")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


class _SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        # A copy: the sum is made in place, and autograd may use the gradient elsewhere.
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)  # pyright: ignore[reportAttributeAccessIssue]
        return total, None


def decoder_layers(policy: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with grouped-query attention and a gated MLP, by name."""
    wanted = (*ATTENTION, *KEYS_VALUES, *MLP)
    return {
        name: module
        for name, module in policy.named_modules()
        if all(isinstance(_get(module, part), nn.Linear) for part in wanted)
    }


def cut_layers(policy: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Shard the decoder layers of a policy in place over a one-dimensional mesh; everything else stays whole.

    Returns:
        names of the whole parameters of whose gradient each process has a part: per-head norms, and keys and values
        shared by all heads.

    Raises:
        EmbodrlError: the policy has no such layers, they have adapters, or their heads cannot be divided evenly.
    """
    layers = decoder_layers(policy)
    if not layers:
        raise EmbodrlError(
            f"{type(policy).__name__} has no plain decoder layers that tensor parallelism can shard",
            "set actor.tensor_parallel_size=1; it does not support low-rank adapters",
            code="tensor-parallel-policy",
        )
    partial: list[str] = []
    for name, layer in layers.items():
        plan: dict[str, ParallelStyle] = {part: style() for part, style in (ATTENTION | MLP).items()}
        shared = _check_heads(name, layer, mesh.size())
        whole = [*KEYS_VALUES] if shared else []
        if not shared:
            plan |= {part: ColwiseParallel() for part in KEYS_VALUES}
        group = mesh.get_group()
        # Keys and values shared by all heads stay whole: a process sees only the gradient of its own heads.
        for part in whole:
            layer.get_submodule(part).register_forward_pre_hook(
                lambda _, inputs, group=group: (_SumGradient.apply(inputs[0], group), *inputs[1:])
            )
        parallelize_module(layer, mesh, plan)
        norms = [part for part in HEAD_NORMS if _get(layer, part) is not None]
        for part in (*whole, *norms):
            partial += [f"{name}.{part}.{leaf}" for leaf, _ in layer.get_submodule(part).named_parameters()]
    return partial


def _check_heads(name: str, layer: nn.Module, size: int) -> bool:
    """Return whether all heads share one pair of keys and values."""
    attention: Any = layer.get_submodule("self_attn")
    heads = attention.q_proj.out_features // attention.head_dim
    groups = attention.k_proj.out_features // attention.head_dim
    if heads % size or (groups > 1 and groups % size):
        count, what = (heads, "heads") if heads % size else (groups, "key-value heads")
        raise EmbodrlError(
            f"{name} has {count} {what} for {size} processes: {count} / {size} leaves {count % size}",
            f"set actor.tensor_parallel_size to a divisor of {count}",
            code="tensor-parallel-size",
        )
    return groups == 1


def _get(module: nn.Module, path: str) -> nn.Module | None:
    found: object = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None
