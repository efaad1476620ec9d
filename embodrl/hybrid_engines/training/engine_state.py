"""An engine's state: its names and shapes, whether a saved one fits, and what a process holds of it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.base import Counters, EngineState, FileFacts
from embodrl.hybrid_engines.offload import Offload, optimizer_tensors
from embodrl.hybrid_engines.training.adamw import fused_adamw
from embodrl.hybrid_engines.training.options import VALUE_GROUP, EngineOptions
from embodrl.hybrid_engines.training.sharding import held, whole
from embodrl.hybrid_engines.training.side_modules import ADAM_STATE, HINT, SideModules, check_side
from embodrl.models.base import VLAPolicy

FLOAT32_BYTES = 4
MASTER = "master"
"""What the optimizer keeps of weights in half precision besides: they in float32."""
HAS_MOMENTS = "has_moments"
SIDE_NONFINITE = "nonfinite_critics"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class StateShapes:
    """What a saved state must have.

    Attributes:
        policy: shapes of all weights and saved buffers.
        trained: shapes of the parameters that train.
        reference: shapes of the reference's own weights; empty without a reference.
        num_bytes: that the state takes once every weight has been trained.
        side: shapes of the weights of modules beside the policy, by section.
        side_trained: names of what trains with them, by section.
    """

    policy: Shapes
    trained: Shapes
    reference: Shapes
    num_bytes: int
    side: dict[str, Shapes] = field(default_factory=dict[str, Shapes])
    side_trained: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    @property
    def sections(self) -> tuple[str, ...]:
        """The names of the sections."""
        return ("policy", "optimizer", *(["reference"] if self.reference else []), *self.side)

    @classmethod
    def of(
        cls,
        policy: nn.Module,
        trained: Mapping[str, nn.Parameter],
        reference: Mapping[str, Tensor] | None = None,
        masters: Iterable[str] = (),
        side: SideModules | None = None,
    ) -> Self:
        """Return the shapes of a policy's state; those of sharded tensors are of the whole.

        Of ``masters``, among ``trained``, there are a float32 copy and moments in float32.
        """
        weights = dict(policy.state_dict())
        names = set(masters)
        moments = [p for name, p in trained.items() if name not in names]
        # Moments count twice: exp_avg and exp_avg_sq.
        kept = [*weights.values(), *(reference or {}).values(), *moments, *moments]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept)
        # 3: the float32 copy and its two moments.
        num_bytes += sum(3 * FLOAT32_BYTES * trained[name].numel() for name in names)
        shapes = (_shapes(weights), _shapes(trained), _shapes(reference or {}))
        if side is None:
            return cls(*shapes, num_bytes)
        beside = {side.section: _shapes(side.weights())}
        return cls(*shapes, num_bytes + side.num_bytes(), beside, {side.section: list(side.trained())})


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_fit(
    saved: Mapping[str, Mapping[str, Tensor]], shapes: StateShapes, counters: Mapping[str, int] | None = None
) -> None:
    """Refuse a state of another policy, or one that has lost its moments.

    Args:
        saved: tensors by section and name.
        shapes: what it must have.
        counters: saved with it; those of earlier versions do not tell whether there were moments.

    Raises:
        CheckpointError: names or shapes differ.
    """
    if (counters or {}).get(HAS_MOMENTS) and not saved.get("optimizer"):
        message = "the checkpoint's optimizer state is empty, and weights had been trained: they would lose momentum"
        raise CheckpointError(message, "use an earlier checkpoint", code="checkpoint-damaged")
    _check_weights(saved.get("policy", {}), shapes.policy)
    if shapes.reference:
        _check_reference(saved.get("reference"), shapes.reference)
    for section, weights in shapes.side.items():
        check_side(saved.get(section, {}), weights, shapes.side_trained[section])
    moments = dict(saved.get("optimizer", {}))
    for name, shape in shapes.trained.items():
        found = [t for key in ADAM_STATE if (t := moments.pop(f"{key}.{name}", None)) is not None]
        copy = moments.pop(f"{MASTER}.{name}", None)
        if not found:
            continue  # not trained yet when the checkpoint was made
        if copy is not None:
            found.append(copy)
        # The first one is ``step``, a scalar.
        if len(found) < len(ADAM_STATE) or any(tuple(tensor.shape) != shape for tensor in found[1:]):
            raise CheckpointError(
                f"the checkpoint's optimizer state does not fit '{name}'", HINT, code="checkpoint-mismatch"
            )
    if moments:
        raise CheckpointError(
            f"the checkpoint's optimizer state has unknown names, e.g. '{min(moments)}'",
            HINT,
            code="checkpoint-mismatch",
        )


def _check_weights(saved: Mapping[str, Tensor], shapes: Shapes) -> None:
    problems = [f"'{name}' is missing" for name in shapes if name not in saved]
    problems += [f"'{name}' is unknown" for name in saved if name not in shapes]
    problems += [
        f"'{name}' is {tuple(tensor.shape)} instead of {shapes[name]}"
        for name, tensor in saved.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"the checkpoint's weights do not fit the policy: {', '.join(problems[:5])}{more}",
            HINT,
            code="checkpoint-mismatch",
        )


def _check_reference(saved: Mapping[str, Tensor] | None, shapes: Shapes) -> None:
    if saved is None or saved.keys() != shapes.keys():
        raise CheckpointError("the checkpoint has no reference policy that fits", HINT, code="checkpoint-mismatch")
    for name, tensor in saved.items():
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                f"the checkpoint's reference policy does not fit '{name}'", HINT, code="checkpoint-mismatch"
            )


def buckets(sizes: Mapping[str, int], bucket_bytes: int) -> Iterator[list[str]]:
    """Yield names in order, about ``bucket_bytes`` at a time."""
    bucket = list[str]()
    filled = 0
    for name, size in sizes.items():
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket = []
            filled = 0
        bucket.append(name)
        filled += size
    if bucket:
        yield bucket


def num_bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the bytes of tensors, by name; of sharded ones, those of the whole."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


class HeldState:
    """What training changes, as this process holds it: weights, moments of the optimizer, reference and counters.

    Args:
        policy: its ``trainable_groups`` train, the rest stays as it is; on the device, and already sharded if it is.
        options: what the run asks for.
        device: that the policy trains on.
        shares_weights: what acts uses the weights themselves, so that they stay on the device.

    Attributes:
        leaves: parameter that trains -> what the optimizer changes.
        masters: those of ``leaves`` that are float32 copies of weights in half precision.
        optimizer: AdamW on the leaves.
        side: modules beside the policy; None: there are none.
        memory: what only training needs, which leaves the device between updates.
        version: completed updates.
        nonfinite_in_row: steps in a row whose loss or gradient was not finite.
        is_shared: other processes of the default group have the rest of the state.
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
        # Before the optimizer is built, which must change the float32 copies.
        self.leaves |= self.masters
        self.optimizer = self._build_optimizer()
        self.side: SideModules | None = None
        self.memory = Offload(self.offloadable)

    # -- what a backend may hold otherwise ----------------------------------------------------------------------------

    def _make_leaves(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return, for every parameter that trains, what the optimizer changes: the same memory."""
        return {p: p for p in (*self.policy_parameters, *self.value_parameters)}

    def _make_masters(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return float32 copies of what trains in half precision: the optimizer changes these.

        Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, section 3.1: an update below 2^-9 of a
        bf16 weight rounds to none. The weights are rounded from their copies after every step.
        """
        if self.optim.master_weights is False:
            return {}
        halves = [p for p in self.leaves if p.dtype.itemsize < torch.float32.itemsize]
        return {p: nn.Parameter(held(p).detach().float()) for p in halves}

    def _build_optimizer(self) -> torch.optim.AdamW:
        param_groups: list[dict[str, object]] = []
        for role, parameters in (("policy", self.policy_parameters), ("value", self.value_parameters)):
            # Biases, norms and layer scales are vectors; decaying them only shrinks activations.
            for decay, chosen in (
                (self.optim.weight_decay, [self.leaves[p] for p in parameters if p.ndim > 1]),
                (0.0, [self.leaves[p] for p in parameters if p.ndim <= 1]),
            ):
                if chosen:
                    param_groups.append({"params": chosen, "weight_decay": decay, "role": role})
        return fused_adamw(param_groups, self.optim.betas, self.optim.eps)

    def reference_weights(self) -> dict[str, Tensor]:
        """Return the weights of the reference that are not the policy's own; {} without a reference."""
        return {}

    def _as_part(self, moment: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return a moment as the part of a whole that the parameter is."""
        return moment

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return the part of a whole tensor that this process holds of ``like``."""
        return whole

    def _assign(self, target: Tensor, whole: Tensor) -> None:
        target.copy_(whole)

    def offloadable(self) -> Iterator[Tensor]:
        """Yield what only training needs: moments, gradients, the reference and, unless it is what acts, weights."""
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

    # -- changes ------------------------------------------------------------------------------------------------------

    def add_modules(
        self,
        section: str,
        modules: Mapping[str, nn.Module | nn.Parameter],
        policy_parts: Mapping[str, list[nn.Parameter]],
    ) -> SideModules:
        """Let modules train beside the policy; see ``SideModules``. They are moved to the device before."""
        names = {p: name for name, p in self.policy.named_parameters()}
        parts = {part: {names[p]: p for p in found} for part, found in policy_parts.items()}
        self.side = SideModules(section, modules, parts, self.leaves, self.optim)
        return self.side

    @torch.no_grad()
    def round_masters(self) -> None:
        """Take the weights in half precision from their float32 copies, after a step."""
        for parameter, master in self.masters.items():
            held(parameter).copy_(master)

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.side is not None:
            self.side.optimizer.zero_grad(set_to_none=True)

    # -- state --------------------------------------------------------------------------------------------------------

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that train, by name."""
        return {name: p for name, p in self.policy.named_parameters() if p in self.leaves}

    def kept_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the keys of what the optimizer keeps of a parameter."""
        return (*ADAM_STATE, MASTER) if parameter in self.masters else ADAM_STATE

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Return a moment or the float32 copy of a parameter, as it is held."""
        if key == MASTER:
            return self._as_part(self.masters[parameter].detach(), parameter)
        moment = self.optimizer.state[self.leaves[parameter]][key]
        return moment if key == "step" else self._as_part(moment, parameter)

    def shards(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the state as they are held, without copies."""
        self.memory.onload()
        moments = {
            f"{key}.{name}": self.moment(parameter, key)
            for name, parameter in self.trained().items()
            # A weight that was never stepped has no moments.
            if self.leaves[parameter] in self.optimizer.state
            for key in self.kept_of(parameter)
        }
        found = {"policy": dict(self.policy.state_dict()), "optimizer": moments}
        if reference := self.reference_weights():
            found["reference"] = reference
        return found | self._side_tensors()

    def _side_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {} if self.side is None else {self.side.section: self.side.tensors(self._as_part)}

    def counters(self) -> Counters:
        """Return the part of the state that can be written as JSON."""
        stepped = any(self.leaves[p] in self.optimizer.state for p in self.trained().values())
        counts = {"version": self.version, "nonfinite_in_row": self.nonfinite_in_row, HAS_MOMENTS: int(stepped)}
        return counts if self.side is None else counts | {SIDE_NONFINITE: self.side.nonfinite_in_row}

    def inventory(self) -> dict[str, dict[str, int]]:
        """Return the bytes of every tensor of the state, in one piece; may be a collective call."""
        return {
            section: {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
            for section, tensors in self.shards().items()
        }

    def parts(self, section: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors of the state as they are held, without copies; {} of a section that does not exist."""
        self.memory.onload()
        if section == "optimizer":
            trained = self.trained()
            places = {name: name.partition(".") for name in names}
            return {name: self.moment(trained[owner], key) for name, (key, _, owner) in places.items()}
        beside = self._side_tensors()
        if section in beside:
            held = beside[section]
        else:
            held = dict(self.policy.state_dict()) if section == "policy" else self.reference_weights()
        return {name: held[name] for name in names if name in held}

    def gather(self, section: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors of the state: a collective call where they are sharded."""
        return {name: whole(part) for name, part in self.parts(section, names).items()}

    def whole(self) -> EngineState:
        """See ``TrainEngine.state_dict``."""
        return EngineState(self.shards(), self.counters())

    def shapes(self) -> StateShapes:
        """Return what a saved state must have."""
        trained = self.trained()
        masters = [name for name, parameter in trained.items() if parameter in self.masters]
        return StateShapes.of(self.policy, trained, self.reference_weights(), masters, self.side)

    def load(self, saved: EngineState) -> None:
        """See ``TrainEngine.load_state_dict``."""
        check_fit(saved.tensors, self.shapes(), saved.state)
        self.start_load()
        for section, tensors in saved.tensors.items():
            self.put(section, tensors)
        self.set_counters(saved.state)

    def start_load(self) -> None:
        """Forget the moments."""
        self.memory.onload()
        # Moments that the saved state lacks must not stay.
        self.optimizer.state.clear()
        if self.side is not None:
            self.side.optimizer.state.clear()

    @torch.no_grad()
    def put(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors of a checked state, the policy first; what the engine has no use for is skipped."""
        if self.side is not None and section == self.side.section:
            self.side.put(tensors, self._part)
            return
        if section == "optimizer":
            self._put_moments(tensors)
            return
        targets = dict(self.policy.state_dict()) if section == "policy" else self.reference_weights()
        for name in targets.keys() & tensors.keys():
            self._assign(targets[name], tensors[name])
        # Until the saved float32 copies arrive with the section "optimizer", if there are any.
        if section == "policy":
            self._take_masters(tensors)

    def _put_moments(self, tensors: Mapping[str, Tensor]) -> None:
        trained = self.trained()
        for name, tensor in tensors.items():
            key, _, owner = name.partition(".")
            parameter = trained[owner]
            leaf = self.leaves[parameter]
            # ``step`` is a number, whole in every process.
            part = tensor if key == "step" else self._part(tensor, parameter)
            if key != MASTER:
                # Moments have the precision of what the optimizer changes, whatever they were saved in.
                dtype = part.dtype if key == "step" else leaf.dtype
                # A copy: the optimizer changes it in place, and the saved tensor is the caller's.
                self.optimizer.state[leaf][key] = part.to(leaf.device, dtype, copy=True)
            elif parameter in self.masters:
                leaf.copy_(part)

    def room(self, section: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return where this process's parts of a checked state are to be written; see ``load_parts``.

        Args:
            section: section of the state.
            saved: shapes and dtypes of whole tensors.
        """
        if self.side is not None and section == self.side.section:
            self.side.make_room(saved)
        elif section == "optimizer":
            trained = self.trained()
            saved = {name: tensor for name, tensor in saved.items() if self._reads(name, trained)}
            for name, tensor in saved.items():
                key, _, owner = name.partition(".")
                if key == MASTER:
                    continue
                leaf = self.leaves[trained[owner]]
                shape = tensor.shape if key == "step" else leaf.shape
                self.optimizer.state[leaf][key] = torch.zeros(shape, dtype=tensor.dtype, device=leaf.device)
        return self.parts(section, saved)

    def _reads(self, name: str, trained: Mapping[str, nn.Parameter]) -> bool:
        # A float32 copy is of no use where the weight itself now trains in float32.
        key, _, owner = name.partition(".")
        return key != MASTER or trained[owner] in self.masters

    def load_parts(self, section: str, parts: Mapping[str, Tensor]) -> None:
        """Use what was written into the tensors of ``room``; here they are the state itself."""
        if section == "policy":
            self._take_masters(parts)
        elif section == "optimizer":  # moments that were saved without float32 copies are in half precision
            for leaf, state in self.optimizer.state.items():
                state |= {key: moment.to(leaf.dtype) for key, moment in state.items() if key != "step"}

    @torch.no_grad()
    def _take_masters(self, names: Container[str]) -> None:
        """Let the copies of weights that were loaded be these."""
        for name, parameter in self.trained().items():
            if name in names and parameter in self.masters:
                self.masters[parameter].copy_(held(parameter))

    def set_counters(self, state: Mapping[str, int]) -> None:
        """Continue counting from a saved state."""
        self.version = int(state["version"])
        self.nonfinite_in_row = int(state["nonfinite_in_row"])
        if self.side is not None:
            self.side.nonfinite_in_row = int(state.get(SIDE_NONFINITE, 0))

    def save(self, directory: Path) -> FileFacts:
        """See ``TrainEngine.save_shards``."""
        from embodrl.hybrid_engines.training.sharded_checkpoint import save_state  # imports torch's compiler

        return save_state(self, directory)

    def read(self, directory: Path, counters: Mapping[str, int]) -> None:
        """See ``TrainEngine.load_shards``."""
        from embodrl.hybrid_engines.training.sharded_checkpoint import load_state

        load_state(self, directory, counters)
