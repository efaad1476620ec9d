"""Training in several processes that each hold a shard of the weights (FSDP2), optionally with tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from embodrl.config.schema import Config
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.policy_engine import Leaves, Outputs
from embodrl.hybrid_engines.training.sharding import (
    TP,
    fsdp_modules,
    held,
    like,
    num_copies,
    shard_policy,
    whole,
)
from embodrl.hybrid_engines.training.shares import SharedState, SharedTrainEngine
from embodrl.hybrid_engines.training.tensor_parallel import cut_layers
from embodrl.models.base import VLAPolicy


class FsdpState(SharedState):
    """State with tensors sharded over processes."""

    def _make_leaves(self) -> dict[nn.Parameter, nn.Parameter]:
        # AdamW is element-wise, so plain tensors of the shards suffice, along whichever dimension they are sharded.
        trained = (*self.policy_parameters, *self.value_parameters)
        return {p: nn.Parameter(held(p).detach()) for p in trained}

    def reference_weights(self) -> dict[str, Tensor]:
        if self.reference is None:
            return {}
        names = {id(p): name for name, p in self.policy.named_parameters()}
        pairs = zip(self.policy_parameters, self.reference, strict=True)
        return {names[id(p)]: like(kept, p) for p, kept in pairs}

    def clear_gradients(self) -> None:
        super().clear_gradients()
        # The optimizers clear only the leaves' gradients; the parameters' gradients would accumulate over the steps.
        for parameter in self.leaves:
            parameter.grad = None


class FsdpTrainEngine(SharedTrainEngine[FsdpState]):
    """AdamW on this process's shard of the weights.

    The policy, whole and identical in all processes, is sharded in place, and only to be used by the engine from then
    on. The mesh has the dimensions ``dp`` and ``tp``.
    """

    def __init__(self, policy: VLAPolicy, options: EngineOptions, mesh: DeviceMesh) -> None:
        self.tensor_group = mesh.get_group(TP)
        # Tensor parallelism first: FSDP shards its remaining dimensions.
        partial = set(cut_layers(policy, mesh[TP])) if mesh[TP].size() > 1 else set[str]()
        self.module = shard_policy(policy, mesh, options.config.fsdp)
        self.partial = [p for name, p in policy.named_parameters() if name in partial]
        self.policy_trains = True
        super().__init__(FsdpState(policy, options, policy.device), options, mesh)

    def run(self, compute: Callable[[VLAPolicy], Outputs]) -> Outputs:
        # Through the module, whose hooks gather the weights.
        outputs = self.module(compute)
        if not torch.is_grad_enabled():
            # Without a backward pass nothing else frees the gathered weights, and they would be reused.
            for part in fsdp_modules(self.module):
                part.reshard()
        return outputs

    def _let_policy_train(self, train_policy: bool) -> None:
        self.policy_trains = train_policy

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _before_backward(self, last: bool) -> None:
        root = cast(FSDPModule, self.module)
        # Without a reduction every process accumulates whole gradients: less communication, more memory.
        root.set_requires_gradient_sync(last or self.config.fsdp.reduce_every_micro_batch)

    def _collect_policy(self, parameters: Sequence[nn.Parameter] | None) -> Leaves:
        chosen = self.state.leaves.keys() if parameters is None else parameters
        # While only the critic trains: without gradients AdamW changes neither weights nor moments.
        held_still = set[nn.Parameter]() if self.policy_trains else set(self.state.policy_parameters)
        # The tensor group's processes each hold a part of these gradients, see ``cut_layers``.
        partial = set(self.partial)
        leaves: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in chosen:
            leaf = leaves[parameter] = self.state.leaves.get(parameter, parameter)
            if leaf is parameter:
                continue  # of a module alongside the policy
            gradient = None if parameter in held_still else parameter.grad
            if gradient is not None and parameter in partial:
                dist.all_reduce(held(gradient), group=self.tensor_group)
            # The leaf may be a float32 copy of a half-precision weight.
            leaf.grad = None if gradient is None else held(gradient).to(leaf.dtype)
        return leaves

    def _num_copies(self, parameter: nn.Parameter) -> int:
        return num_copies(parameter, dist.get_world_size())

    def weights(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's whole tensors, gathered one by one: a collective call."""
        for name, tensor in super().weights(wanted):
            yield name, whole(tensor)


def make_fsdp(policy: VLAPolicy, config: Config, mesh: DeviceMesh) -> FsdpTrainEngine:
    """Return the engine of one training process."""
    return FsdpTrainEngine(policy, EngineOptions.of(config), mesh)
