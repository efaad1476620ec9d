"""Modules that train alongside the policy: critics, their targets, a temperature."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from embodrl.config.schema import OptimConfig
from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.training.adamw import fused_adamw
from embodrl.hybrid_engines.training.sharding import like, part_of

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
HINT = "resume with the model settings of the checkpoint"

Part: TypeAlias = "nn.Module | nn.Parameter"


class SideModules:
    """Modules with their own optimizer, which may train parts of the policy as well.

    They are small: every training process holds them whole, and their gradients are summed over the processes.

    Args:
        modules: saved by name; parameters that require gradients train.
        policy_parts: parameters of the policy that train with them: part name -> name -> parameter. Their weights are
            saved with the policy.
        leaves: parameter of the policy -> the optimizer's tensor.

    Attributes:
        nonfinite_in_row: consecutive steps whose loss or gradient was not finite.
    """

    def __init__(
        self,
        section: str,
        modules: Mapping[str, Part],
        policy_parts: Mapping[str, Mapping[str, nn.Parameter]],
        leaves: Mapping[nn.Parameter, nn.Parameter],
        optim: OptimConfig,
    ) -> None:
        self.section = section
        self.modules = dict(modules)
        self.nonfinite_in_row = 0
        self._leaves = leaves
        self._parts = {name: _named(name, part) for name, part in modules.items()}
        self._parts = {name: named for name, named in self._parts.items() if _trains(named)}
        self._parts |= {name: {f"{name}.{n}": p for n, p in found.items()} for name, found in policy_parts.items()}
        groups = [{"params": [self.leaf(p) for p in self.parameters(name)], "part": name} for name in self._parts]
        self.optimizer = fused_adamw(groups, optim.betas, optim.eps)

    def leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the optimizer's tensor of a parameter."""
        return self._leaves.get(parameter, parameter)

    def parameters(self, *parts: str) -> list[nn.Parameter]:
        """Return the trained parameters of these parts, or of all."""
        return [p for name in parts or self._parts for p in self._parts[name].values()]

    def own_parameters(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        """Yield the parameters that belong to the modules, not the policy."""
        own = {id(p) for p in self.weights().values()}
        yield from (p for p in parameters if id(p) in own)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by state name."""
        return {name: p for named in self._parts.values() for name, p in named.items()}

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the section's weights, by name."""
        return {name: p for part, module in self.modules.items() for name, p in _named(part, module).items()}

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:
        """Set the rate of each part."""
        for group in self.optimizer.param_groups:
            group["lr"] = rates[group["part"]]

    def memory(self) -> Iterator[Tensor]:
        """Yield weights and moments, for offloading."""
        yield from self.weights().values()
        for state in self.optimizer.state.values():
            yield from (state[key] for key in ADAM_STATE[1:] if key in state)

    # -- state ---------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and moments by name as stored, without copies."""
        kept: dict[str, Tensor] = {name: p.detach() for name, p in self.weights().items()}
        for name, parameter in self.trained().items():
            state = self.optimizer.state.get(self.leaf(parameter), {})
            kept |= {
                f"{key}.{name}": state[key] if key == "step" else like(state[key], parameter)
                for key in ADAM_STATE
                if key in state
            }
        return kept

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors of a checked state, by name."""
        weights, trained = self.weights(), self.trained()
        for name, tensor in tensors.items():
            if name in weights:
                weights[name].copy_(tensor)
                continue
            key, _, owner = name.partition(".")
            leaf = self.leaf(trained[owner])
            part = tensor if key == "step" else part_of(tensor, trained[owner])
            self.optimizer.state[leaf][key] = part.to(leaf.device, copy=True)

    def make_room(self, names: Iterable[str]) -> None:
        """Allocate the moments of these names for loading."""
        trained = self.trained()
        for name in names:
            key, _, owner = name.partition(".")
            if owner in trained and key in ADAM_STATE:
                leaf = self.leaf(trained[owner])
                shape = () if key == "step" else leaf.shape
                dtype = torch.float32 if key == "step" else leaf.dtype
                self.optimizer.state[leaf][key] = torch.zeros(shape, dtype=dtype, device=leaf.device)

    def num_bytes(self) -> int:
        """Return the bytes of the section once every weight has been trained."""
        own = sum(p.numel() * p.element_size() for p in self.weights().values())
        return own + sum(2 * p.numel() * p.element_size() for p in self.trained().values())


def check_side(saved: Mapping[str, Tensor], weights: Mapping[str, tuple[int, ...]], trained: Iterable[str]) -> None:
    """Reject a section of other modules; only names in ``trained`` may have moments.

    Raises:
        CheckpointError: names or shapes differ.
    """
    known = set(trained)
    for name, shape in weights.items():
        if name not in saved or tuple(saved[name].shape) != shape:
            raise _mismatch(name)
    for name, tensor in saved.items():
        key, _, owner = name.partition(".")
        if name in weights:
            continue
        if key not in ADAM_STATE or owner not in known:
            raise _mismatch(name)
        if key != "step" and owner in weights and tuple(tensor.shape) != weights[owner]:
            raise _mismatch(name)


def _mismatch(name: str) -> CheckpointError:
    message = f"the checkpoint's modules alongside the policy do not match: '{name}'"
    return CheckpointError(message, HINT, code="checkpoint-mismatch")


def _named(part: str, module: Part) -> dict[str, nn.Parameter]:
    if isinstance(module, nn.Parameter):
        return {part: module}
    return {f"{part}.{name}": p for name, p in module.named_parameters()}


def _trains(named: Mapping[str, nn.Parameter]) -> bool:
    return any(p.requires_grad for p in named.values())
