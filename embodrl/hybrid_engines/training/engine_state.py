"""A training process's part of an engine's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embodrl.hybrid_engines.base import Counters, EngineState
from embodrl.hybrid_engines.offload import Offload, optimizer_tensors
from embodrl.hybrid_engines.training.optimizer_state import OptimizerState
from embodrl.hybrid_engines.training.optimizers import ROLE, kept_state, make_optimizer
from embodrl.hybrid_engines.training.options import VALUE_GROUP, EngineOptions
from embodrl.hybrid_engines.training.sharding import held, part_of, whole
from embodrl.hybrid_engines.training.side_modules import SideModules
from embodrl.hybrid_engines.training.state_shapes import HAS_MOMENTS, StateShapes, check_fit
from embodrl.models.base import VLAPolicy

SIDE_NONFINITE = "nonfinite_critics"


class HeldState:
    """The state that training changes, as held by this process: weights, optimizer moments, reference and counters.

    Args:
        policy: policy on the device, sharded already if at all; its ``trainable_groups`` train, other weights are
            fixed.
        shares_weights: the rollout uses the same tensors, so they stay on the device.

    Attributes:
        leaves: trained parameter -> tensor that the optimizer updates.
        masters: the leaves that are float32 copies of half-precision weights.
        side: modules that train alongside the policy, or None.
        memory: training-only tensors, which leave the device between updates.
        nonfinite_in_row: consecutive steps whose loss or gradient was not finite.
        is_shared: other processes of the default group hold the rest of the state.
    """

    is_shared = False

    def __init__(
        self, policy: VLAPolicy, options: EngineOptions, device: torch.device | str, shares_weights: bool = False
    ) -> None:
        self.policy = policy
        self.device = torch.device(device)
        self.optim = options.config.optim
        self.shares_weights = shares_weights
        self.version = self.nonfinite_in_row = 0
        groups = policy.trainable_groups()
        self.policy_parameters = [p for name, group in groups.items() if name != VALUE_GROUP for p in group]
        self.value_parameters = list(groups.get(VALUE_GROUP, []))
        self.leaves = self._make_leaves()
        self.masters = self._make_masters()
        # Before the optimizer is built, which must update the float32 copies.
        self.leaves |= self.masters
        self.optimizer = self._build_optimizer()
        self.moments = OptimizerState(policy, self.leaves, self.masters, self.optimizer, kept_state(self.optim))
        self.side: SideModules | None = None
        self.memory = Offload(self.offloadable)

    # -- overridable by backends ---------------------------------------------------------------------------------------

    def _make_leaves(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return the optimizer's tensor of every trained parameter: the same memory."""
        return {p: p for p in (*self.policy_parameters, *self.value_parameters)}

    def _make_masters(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return float32 copies of half-precision trained weights, for the optimizer.

        Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, section 3.1: an update below 2^-9 of a
        bf16 weight rounds to nothing. The weights are rounded from their copies after every step.
        """
        if self.optim.master_weights is False:
            return {}
        halves = [p for p in self.leaves if p.dtype.itemsize < torch.float32.itemsize]
        return {p: nn.Parameter(held(p).detach().float()) for p in halves}

    def _build_optimizer(self) -> torch.optim.Optimizer:
        param_groups: list[dict[str, Any]] = []
        for role, parameters in (("policy", self.policy_parameters), ("value", self.value_parameters)):
            # Biases, norms and layer scales are vectors; decay only shrinks their activations.
            for decay, chosen in (
                (self.optim.weight_decay, [self.leaves[p] for p in parameters if p.ndim > 1]),
                (0.0, [self.leaves[p] for p in parameters if p.ndim <= 1]),
            ):
                if chosen:
                    param_groups.append({"params": chosen, "weight_decay": decay, ROLE: role})
        return make_optimizer(param_groups, self.optim)

    def reference_weights(self) -> dict[str, Tensor]:
        """Return the reference's weights that are not shared with the policy; {} without a reference."""
        return {}

    def offloadable(self) -> Iterator[Tensor]:
        """Yield training-only tensors: moments, gradients, the reference and, unless the rollout uses them, weights."""
        yield from optimizer_tensors(self.optimizer)
        yield from self._kept_of_reference()
        yield from self.masters.values()
        if not self.shares_weights:
            yield from self.policy.parameters()
            yield from self.policy.buffers()
            yield from self.leaves.values()
        if self.side is not None:
            yield from self.side.memory()

    def _kept_of_reference(self) -> Iterable[Tensor]:
        """Return the memory of ``reference_weights``."""
        return self.reference_weights().values()

    # -- changes -------------------------------------------------------------------------------------------------------

    def add_modules(
        self,
        section: str,
        modules: Mapping[str, nn.Module | nn.Parameter],
        policy_parts: Mapping[str, list[nn.Parameter]],
    ) -> SideModules:
        """Train modules, already on the device, alongside the policy; see ``SideModules``."""
        names = {p: name for name, p in self.policy.named_parameters()}
        parts = {part: {names[p]: p for p in found} for part, found in policy_parts.items()}
        self.side = SideModules(section, modules, parts, self.leaves, self.optim)
        return self.side

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.side is not None:
            self.side.optimizer.zero_grad(set_to_none=True)

    # -- state ---------------------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, dict[str, Tensor]]:
        """Return the state's tensors as stored, without copies."""
        self.memory.onload()
        found = {"policy": dict(self.policy.state_dict()), "optimizer": self.moments.tensors()}
        if reference := self.reference_weights():
            found["reference"] = reference
        return found | self._side_tensors()

    def _side_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {} if self.side is None else {self.side.section: self.side.tensors()}

    def counters(self) -> Counters:
        """Return the JSON-serialisable part of the state."""
        stepped = any(self.optimizer.state.get(leaf) for leaf in self.leaves.values())
        counts = {"version": self.version, "nonfinite_in_row": self.nonfinite_in_row, HAS_MOMENTS: int(stepped)}
        return counts if self.side is None else counts | {SIDE_NONFINITE: self.side.nonfinite_in_row}

    def inventory(self) -> dict[str, dict[str, int]]:
        """Return the unsharded size in bytes of every tensor of the state; may be a collective call."""
        return {
            section: {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
            for section, tensors in self.shards().items()
        }

    def parts(self, section: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors of the state as stored, without copies; {} for a missing section."""
        self.memory.onload()
        if section == "optimizer":
            return self.moments.parts(names)
        side_tensors = self._side_tensors()
        if section in side_tensors:
            held = side_tensors[section]
        else:
            held = dict(self.policy.state_dict()) if section == "policy" else self.reference_weights()
        return {name: held[name] for name in names if name in held}

    def gather(self, section: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors of the state; a collective call if they are sharded."""
        return {name: whole(part) for name, part in self.parts(section, names).items()}

    def whole(self) -> EngineState:
        """Return whole weights, optimizer state and counters; a collective call if they are sharded."""
        shards = self.shards()
        tensors = {section: {n: whole(part) for n, part in parts.items()} for section, parts in shards.items()}
        return EngineState(tensors, self.counters())

    def shapes(self) -> StateShapes:
        """Return the expected shapes of a saved state."""
        trained = self.moments.trained
        masters = [name for name, parameter in trained.items() if parameter in self.masters]
        reference = self.reference_weights()
        return StateShapes.of(self.policy, trained, reference, masters, self.side, self.moments.kept)

    def load(self, saved: EngineState) -> None:
        """See ``TrainEngine.load_state_dict``."""
        check_fit(saved.tensors, self.shapes(), saved.state)
        self.start_load()
        for section, tensors in saved.tensors.items():
            self.put(section, tensors)
        self.set_counters(saved.state)

    def start_load(self) -> None:
        """Clear the moments."""
        self.memory.onload()
        # Moments missing in the saved state must not remain.
        self.optimizer.state.clear()
        if self.side is not None:
            self.side.optimizer.state.clear()

    @torch.no_grad()
    def put(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors of a checked state, the policy first; unused entries are skipped."""
        if self.side is not None and section == self.side.section:
            self.side.put(tensors)
            return
        if section == "optimizer":
            self.moments.put(tensors)
            return
        targets = dict(self.policy.state_dict()) if section == "policy" else self.reference_weights()
        for name in targets.keys() & tensors.keys():
            held(targets[name]).copy_(part_of(tensors[name], targets[name]))
        # Until the saved float32 copies arrive with the section "optimizer", if it has any.
        if section == "policy":
            self.moments.take_weights(tensors)

    def room(self, section: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors into which this process's shards of a checked state are loaded; see ``load_parts``."""
        if self.side is not None and section == self.side.section:
            self.side.make_room(saved)
        elif section == "optimizer":
            saved = self.moments.make_room(saved)
        return self.parts(section, saved)

    def load_parts(self, section: str, parts: Mapping[str, Tensor]) -> None:
        """Use the data loaded into the tensors of ``room``; here they are the state itself."""
        if section == "policy":
            self.moments.take_weights(parts)
        elif section == "optimizer":
            self.moments.match_precision()

    def set_counters(self, state: Mapping[str, int]) -> None:
        """Continue the counters of a saved state."""
        self.version = int(state["version"])
        self.nonfinite_in_row = int(state["nonfinite_in_row"])
        if self.side is not None:
            self.side.nonfinite_in_row = int(state.get(SIDE_NONFINITE, 0))
