"""Sharding of a policy over processes (FSDP2 by block), and access to a process's part of a tensor.

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
"""Mesh dimensions: data parallel, which FSDP shards over, and tensor parallel."""
OTHER_FORWARDS = ("keys_values",)
"""Methods besides ``forward`` by which a block is run."""
FLOAT32_PARTS = ("value_head", "noise_head")
"""Groups that always compute in float32."""


class Forward(nn.Module):
    """A forward pass through the policy, as a module whose outputs FSDP can see."""

    def __init__(self, policy: VLAPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, compute: Callable[[VLAPolicy], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
        """Return copies of the results of ``compute``."""
        # FSDP warns about views: an in-place operation on one would lose its hooks.
        return tuple(None if tensor is None else tensor.clone() for tensor in compute(self.policy))


def blocks_of(policy: VLAPolicy) -> list[nn.Module]:
    """Return the transformer blocks of a policy: the modules in module lists that have several linear layers.

    Blocks that never run are excluded: FSDP would wait for their gradients.
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
    """Shard a policy over ``mesh[DP]``, block by block; return the module to run forward passes with.

    Gradients are summed, not averaged. The policy is identical in all processes; its parameters are replaced by
    DTensors. ``config`` sets the gather dtype, and when gathered weights are freed.

    Raises:
        EmbodrlError: trained weights have several dtypes, which FSDP does not support.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    in_float32 = {id(p) for name, part in policy.parts().items() if name in FLOAT32_PARTS for p in part.parameters()}
    types = {p.dtype for p in policy.parameters() if p.requires_grad and id(p) not in in_float32}
    if len(types) > 1:
        raise EmbodrlError(
            f"trained weights have the types {' and '.join(sorted(map(str, types)))}, but FSDP supports one type",
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
            # Separate groups, since a group is gathered in one dtype.
            fully_shard(part, reshard_after_forward=False, mp_policy=same, **settings)
    module = Forward(policy)
    # The backward pass needs the root's weights again right after the forward pass.
    fully_shard(module, reshard_after_forward=False, mp_policy=low, **settings)
    for part in fsdp_modules(module):
        # Losses are already divided by the counts of the whole minibatch, so gradients of the shares add up.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    # The first forward pass would replace the tensors that the optimizer is about to hold; and a head whose output no
    # loss reads would never be gathered, which gradient accumulation does not expect.
    cast(FSDPModule, module).unshard()
    for part in fsdp_modules(module):
        part.unshard()
        part.reshard()
    return module


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return all modules whose weights form a sharding group."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is sharded over processes."""
    return hasattr(tensor, "device_mesh")


def held(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor: the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, without gradient; a collective call if it is sharded."""
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
    """Wrap a process's part as a DTensor sharded like ``spec``."""
    if not is_sharded(spec):
        return local
    return type(spec).from_local(
        local, spec.device_mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride()
    )


def part_of(full: Tensor, spec: Tensor) -> Tensor:
    """Return this process's part of ``full`` if sharded like ``spec``. No communication."""
    if not is_sharded(spec):
        return full
    mesh = spec.device_mesh
    # FSDP shards the dimensions left by tensor parallelism, the last dimension of the mesh.
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
    """Return the number of processes that hold the same part of a tensor."""
    if not is_sharded(tensor):
        return world_size
    cut = 1
    for dimension, placement in enumerate(tensor.placements):
        cut *= tensor.device_mesh.size(dimension) if _is_cut(placement) else 1
    return world_size // cut


def _is_cut(placement: Placement) -> bool:
    # FSDP over tensor parallelism shards with a private torch class, recognised by name only.
    return placement.is_shard() or type(placement).__name__ == "_StridedShard"
