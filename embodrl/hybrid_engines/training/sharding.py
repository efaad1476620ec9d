"""A policy sharded over processes: FSDP2 by block, and what a process holds of a tensor.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023; ``torch.distributed.fsdp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embodrl.config.schema import FsdpConfig
from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy

if TYPE_CHECKING:  # they import torch's compiler: 1.5 s in every process
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

DP = "dp"
TP = "tp"
"""Mesh dimensions: data parallel, which FSDP cuts over, and tensor parallel."""
OTHER_FORWARDS = ("keys_values",)
"""Methods by which a block is run besides ``forward``."""
FLOAT32_PARTS = ("value_head", "noise_head")
"""Groups that compute in float32 whatever the rest does."""


class Forward(nn.Module):
    """A forward pass through the policy, in a module whose outputs FSDP can see.

    Args:
        policy: policy that computes.
    """

    def __init__(self, policy: VLAPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, compute: Callable[[VLAPolicy], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
        """Return copies of what ``compute`` returns."""
        # FSDP warns about views: an in-place operation on one would lose its hooks.
        return tuple(None if tensor is None else tensor.clone() for tensor in compute(self.policy))


def blocks_of(policy: VLAPolicy) -> list[nn.Module]:
    """Return the blocks of the transformers in a policy: what lists of modules with several linear layers hold.

    A block that never runs is none of them: FSDP would wait for its gradients.
    """
    unused = {id(p) for p in policy.unused_parameters()}
    return [
        block
        for blocks in policy.modules()
        if isinstance(blocks, nn.ModuleList)
        for block in blocks
        if sum(isinstance(layer, nn.Linear) for layer in block.modules()) > 1
        and any(id(p) not in unused for p in block.parameters())
    ]


def shard_policy(policy: VLAPolicy, mesh: DeviceMesh, config: FsdpConfig) -> Forward:
    """Cut the weights of a policy over ``mesh[DP]``, block by block; gradients are summed, not averaged.

    Args:
        policy: whole, the same in all processes; its parameters are replaced by DTensors.
        mesh: with the dimension DP, of the device that the policy is on.
        config: what is gathered, and when it is given up.

    Returns:
        The module to run forward passes with.

    Raises:
        EmbodrlError: weights that train have several types, which FSDP does not take.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    apart = {id(p) for name, part in policy.parts().items() if name in FLOAT32_PARTS for p in part.parameters()}
    types = {p.dtype for p in policy.parameters() if p.requires_grad and id(p) not in apart}
    if len(types) > 1:
        raise EmbodrlError(
            f"weights that train are of {' and '.join(sorted(map(str, types)))}, and FSDP takes one type",
            "set actor.param_dtype=fp32 with actor.fsdp.gather_dtype=bf16, or model.trainable=lora",
            code="fsdp-types",
        )
    gathered = torch.bfloat16 if config.gather_dtype == "bf16" else None
    # Inputs are not cast: a rounded residual stream would give the update another distribution than the rollout.
    low = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    same = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    settings: dict[str, Any] = {"mesh": mesh[DP], "offload_policy": offload}
    for block in blocks_of(policy):
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, mp_policy=low, **settings)
        for name in OTHER_FORWARDS:
            if hasattr(block, name):
                register_fsdp_forward_method(block, name)
    for name, part in policy.parts().items():
        if name in FLOAT32_PARTS:
            # Groups of their own, since a group is gathered in one type.
            fully_shard(part, reshard_after_forward=False, mp_policy=same, **settings)
    module = Forward(policy)
    # Weights of the root are needed again right after the forward pass, by the backward pass.
    fully_shard(module, reshard_after_forward=False, mp_policy=low, **settings)
    for part in fsdp_modules(module):
        # Losses are already divided by the counts of the whole minibatch, so gradients of the shares add up.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    # The first forward pass would replace the tensors that the optimizer is about to hold; and a head that no loss
    # reads would never be gathered, which adding up gradients does not expect.
    cast(FSDPModule, module).unshard()
    for part in fsdp_modules(module):
        part.unshard()
        part.reshard()
    return module


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return all modules whose weights are sharded as a group."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether processes hold parts of a tensor."""
    return hasattr(tensor, "device_mesh")


def held(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor: the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor in one piece, without gradient; a collective call where it is sharded."""
    found = tensor.detach()
    if not is_sharded(found):
        return found
    mesh_type = found.device_mesh.device_type
    if found.device.type != mesh_type:  # offloaded: only the device of the mesh can communicate
        found = type(found).from_local(
            found.to_local().to(mesh_type),
            found.device_mesh,
            found.placements,
            run_check=False,
            shape=found.shape,
            stride=found.stride(),
        )
    return found.full_tensor()


def like(local: Tensor, spec: Tensor) -> Tensor:
    """Return what a process holds of a tensor as a part of it, sharded as ``spec`` is."""
    if not is_sharded(spec):
        return local
    return type(spec).from_local(
        local, spec.device_mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride()
    )


def part_of(full: Tensor, spec: Tensor) -> Tensor:
    """Return what this process holds of ``full``, if that is sharded as ``spec`` is. No communication."""
    if not is_sharded(spec):
        return full
    mesh = spec.device_mesh
    # FSDP cuts what tensor parallelism has left, which is the last dimension of the mesh.
    for dimension in reversed(range(mesh.ndim)):
        placement = spec.placements[dimension]
        if _is_cut(placement):
            size = mesh.size(dimension)
            rank = mesh.get_local_rank(dimension)
            dim = cast(Any, placement).dim
            chunks = full.chunk(size, dim=dim)
            full = chunks[rank] if rank < len(chunks) else full.narrow(dim, 0, 0)
    return full


def num_copies(tensor: Tensor, world_size: int) -> int:
    """Return how many processes hold the same part of a tensor."""
    if not is_sharded(tensor):
        return world_size
    cut = 1
    for dimension, placement in enumerate(tensor.placements):
        cut *= tensor.device_mesh.size(dimension) if _is_cut(placement) else 1
    return world_size // cut


def _is_cut(placement: Placement) -> bool:
    # FSDP over tensor parallelism cuts by a private class of torch, which is known by its name only.
    return placement.is_shard() or type(placement).__name__ == "_StridedShard"
