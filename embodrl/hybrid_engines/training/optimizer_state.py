"""The optimizer's state of the trained weights, under the names of a saved state."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor, nn

from embodrl.hybrid_engines.training.optimizers import KeptState
from embodrl.hybrid_engines.training.sharding import held, like, part_of
from embodrl.hybrid_engines.training.state_shapes import MASTER


class OptimizerState:
    """Moments, and float32 copies of half-precision weights; names are ``exp_avg.NAME``, ``master.NAME``, ...

    Args:
        policy: provides the names; weights may be sharded.
        leaves: trained parameter -> tensor that the optimizer updates.
        masters: the leaves that are float32 copies, by parameter.
        kept: what the optimizer keeps of each weight.
    """

    def __init__(
        self,
        policy: nn.Module,
        leaves: Mapping[nn.Parameter, nn.Parameter],
        masters: Mapping[nn.Parameter, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        kept: KeptState,
    ) -> None:
        self.trained = {name: p for name, p in policy.named_parameters() if p in leaves}
        self._leaves = leaves
        self._masters = masters
        self._optimizer = optimizer
        self.kept = kept

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors as stored, without copies; weights that were never stepped have none."""
        # An optimizer that keeps nothing does not tell which weights it has stepped, and the float32 copies matter.
        stepped = [
            name for name, p in self.trained.items() if not self.kept.keys or self._leaves[p] in self._optimizer.state
        ]
        return self.parts(f"{key}.{name}" for name in stepped for key in self._keys(self.trained[name]))

    def _keys(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return (*self.kept.keys, MASTER) if parameter in self._masters else self.kept.keys

    def parts(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors as stored, without copies."""
        return {name: self._part(name) for name in names}

    def _part(self, name: str) -> Tensor:
        key, _, owner = name.partition(".")
        parameter = self.trained[owner]
        if key == MASTER:
            return like(self._masters[parameter].detach(), parameter)
        moment = self._optimizer.state[self._leaves[parameter]][key]
        return moment if key in self.kept.numbers else like(moment, parameter)

    @torch.no_grad()
    def round_weights(self) -> None:
        """Round the half-precision weights from their float32 copies, after a step."""
        for parameter, master in self._masters.items():
            held(parameter).copy_(master)

    @torch.no_grad()
    def take_weights(self, names: Container[str]) -> None:
        """Copy loaded weights to their float32 copies."""
        for name, parameter in self.trained.items():
            if name in names and parameter in self._masters:
                self._masters[parameter].copy_(held(parameter))

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors of a checked state."""
        for name, tensor in tensors.items():
            key, _, owner = name.partition(".")
            parameter = self.trained[owner]
            leaf = self._leaves[parameter]
            # A number is whole in every process.
            part = tensor if key in self.kept.numbers else part_of(tensor, parameter)
            if key != MASTER:
                # Moments take the precision of the optimizer's tensors, whatever they were saved in.
                dtype = part.dtype if key in self.kept.numbers else leaf.dtype
                # A copy: the optimizer updates it in place, and the saved tensor belongs to the caller.
                self._optimizer.state[leaf][key] = part.to(leaf.device, dtype, copy=True)
            elif parameter in self._masters:
                leaf.copy_(part)

    def make_room(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Allocate moments for loading; return the shapes and dtypes by name of the entries of ``saved`` used here."""
        # A float32 copy is useless if the weight itself now trains in float32.
        used = {name: tensor for name, tensor in saved.items() if self._reads(name)}
        for name, tensor in used.items():
            key, _, owner = name.partition(".")
            if key != MASTER:
                leaf = self._leaves[self.trained[owner]]
                shape = tensor.shape if key in self.kept.numbers else leaf.shape
                self._optimizer.state[leaf][key] = torch.zeros(shape, dtype=tensor.dtype, device=leaf.device)
        return used

    def _reads(self, name: str) -> bool:
        key, _, owner = name.partition(".")
        return key != MASTER or self.trained[owner] in self._masters

    def match_precision(self) -> None:
        """Convert loaded moments to the leaves' precision: without float32 copies they were saved in half precision."""
        for leaf, state in self._optimizer.state.items():
            state |= {key: moment.to(leaf.dtype) for key, moment in state.items() if key not in self.kept.numbers}
