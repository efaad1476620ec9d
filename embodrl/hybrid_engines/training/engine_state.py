"""An engine's state: its names and shapes, whether a saved one fits, and what a process holds of it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.base import Counters, EngineState, FileFacts
from embodrl.hybrid_engines.training.sharding import held, whole

if TYPE_CHECKING:
    from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine

EngineT = TypeVar("EngineT", bound="PolicyTrainEngine")

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
FLOAT32_BYTES = 4
MASTER = "master"
"""What the optimizer keeps of weights in half precision besides: they in float32."""
HAS_MOMENTS = "has_moments"
HINT = "resume with the model settings that the checkpoint was made with"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class StateShapes:
    """What a saved state must have.

    Attributes:
        policy: shapes of all weights and saved buffers.
        trained: shapes of the parameters that train.
        reference: shapes of the reference's own weights; empty without a reference.
        num_bytes: that the state takes once every weight has been trained.
    """

    policy: Shapes
    trained: Shapes
    reference: Shapes
    num_bytes: int

    @classmethod
    def of(
        cls,
        policy: nn.Module,
        trained: Mapping[str, nn.Parameter],
        reference: Mapping[str, Tensor] | None = None,
        masters: Iterable[str] = (),
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
        return cls(_shapes(weights), _shapes(trained), _shapes(reference or {}), num_bytes)


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


class HeldState(Generic[EngineT]):
    """State of an engine as this process holds it: weights, moments of the optimizer, reference and counters.

    Args:
        engine: engine whose state it is.
    """

    def __init__(self, engine: EngineT) -> None:
        self.engine = engine

    @property
    def is_shared(self) -> bool:
        """Tell whether other processes have the rest."""
        return self.engine.is_shared

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that train, by name."""
        return {name: p for name, p in self.engine.policy.named_parameters() if p in self.engine.leaves}

    def kept_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the keys of what the optimizer keeps of a parameter."""
        return (*ADAM_STATE, MASTER) if parameter in self.engine.masters else ADAM_STATE

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Return a moment or the float32 copy of a parameter, as it is held."""
        if key == MASTER:
            return self.engine.masters[parameter].detach()
        return self.engine.optimizer.state[self.engine.leaves[parameter]][key]

    def shards(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the state as they are held, without copies."""
        self.engine.onload()
        moments = {
            f"{key}.{name}": self.moment(parameter, key)
            for name, parameter in self.trained().items()
            # A weight that was never stepped has no moments.
            if self.engine.leaves[parameter] in self.engine.optimizer.state
            for key in self.kept_of(parameter)
        }
        found = {"policy": dict(self.engine.policy.state_dict()), "optimizer": moments}
        reference = self.engine.reference_weights()
        return found | ({"reference": reference} if reference else {})

    def counters(self) -> Counters:
        """Return the part of the state that can be written as JSON."""
        stepped = any(self.engine.leaves[p] in self.engine.optimizer.state for p in self.trained().values())
        counts = {"version": self.engine.version, "nonfinite_in_row": self.engine.nonfinite_in_row}
        return counts | {HAS_MOMENTS: int(stepped)}

    def inventory(self) -> dict[str, dict[str, int]]:
        """Return the bytes of every tensor of the state, in one piece; may be a collective call."""
        return {
            section: {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
            for section, tensors in self.shards().items()
        }

    def parts(self, section: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors of the state as they are held, without copies; {} of a section that does not exist."""
        self.engine.onload()
        if section == "optimizer":
            trained = self.trained()
            places = {name: name.partition(".") for name in names}
            return {name: self.moment(trained[owner], key) for name, (key, _, owner) in places.items()}
        held = dict(self.engine.policy.state_dict()) if section == "policy" else self.engine.reference_weights()
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
        masters = [name for name, parameter in trained.items() if parameter in self.engine.masters]
        return StateShapes.of(self.engine.policy, trained, self.engine.reference_weights(), masters)

    def load(self, saved: EngineState) -> None:
        """See ``TrainEngine.load_state_dict``."""
        check_fit(saved.tensors, self.shapes(), saved.state)
        self.start_load()
        for section, tensors in saved.tensors.items():
            self.put(section, tensors)
        self.set_counters(saved.state)

    def start_load(self) -> None:
        """Forget the moments."""
        self.engine.onload()
        # Moments that the saved state lacks must not stay.
        self.engine.optimizer.state.clear()

    @torch.no_grad()
    def put(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors of a checked state, the policy first; what the engine has no use for is skipped."""
        if section == "optimizer":
            trained = self.trained()
            for name, tensor in tensors.items():
                key, _, owner = name.partition(".")
                parameter = trained[owner]
                leaf = self.engine.leaves[parameter]
                # ``step`` is a number, whole in every process.
                part = tensor if key == "step" else self._part(tensor, parameter)
                if key != MASTER:
                    # Moments have the precision of what the optimizer changes, whatever they were saved in.
                    dtype = part.dtype if key == "step" else leaf.dtype
                    # A copy: the optimizer changes it in place, and the saved tensor is the caller's.
                    self.engine.optimizer.state[leaf][key] = part.to(leaf.device, dtype, copy=True)
                elif parameter in self.engine.masters:
                    leaf.copy_(part)
            return
        targets = dict(self.engine.policy.state_dict()) if section == "policy" else self.engine.reference_weights()
        for name in targets.keys() & tensors.keys():
            self._assign(targets[name], tensors[name])
        # Until the saved float32 copies arrive with the section "optimizer", if there are any.
        if section == "policy":
            self._take_masters(tensors)

    def room(self, section: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return where this process's parts of a checked state are to be written; see ``load_parts``.

        Args:
            section: section of the state.
            saved: shapes and dtypes of whole tensors.
        """
        if section == "optimizer":
            trained = self.trained()
            saved = {name: tensor for name, tensor in saved.items() if self._reads(name, trained)}
            for name, tensor in saved.items():
                key, _, owner = name.partition(".")
                if key == MASTER:
                    continue
                leaf = self.engine.leaves[trained[owner]]
                shape = tensor.shape if key == "step" else leaf.shape
                self.engine.optimizer.state[leaf][key] = torch.zeros(shape, dtype=tensor.dtype, device=leaf.device)
        return self.parts(section, saved)

    def _reads(self, name: str, trained: Mapping[str, nn.Parameter]) -> bool:
        # A float32 copy is of no use where the weight itself now trains in float32.
        key, _, owner = name.partition(".")
        return key != MASTER or trained[owner] in self.engine.masters

    def load_parts(self, section: str, parts: Mapping[str, Tensor]) -> None:
        """Use what was written into the tensors of ``room``; here they are the state itself."""
        if section == "policy":
            self._take_masters(parts)
        elif section == "optimizer":  # moments that were saved without float32 copies are in half precision
            for leaf, state in self.engine.optimizer.state.items():
                state |= {key: moment.to(leaf.dtype) for key, moment in state.items() if key != "step"}

    @torch.no_grad()
    def _take_masters(self, names: Container[str]) -> None:
        """Let the copies of weights that were loaded be these."""
        for name, parameter in self.trained().items():
            if name in names and parameter in self.engine.masters:
                self.engine.masters[parameter].copy_(held(parameter))

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return the part of a whole tensor that this process holds of ``like``."""
        return whole

    def _assign(self, target: Tensor, whole: Tensor) -> None:
        target.copy_(whole)

    def set_counters(self, state: Mapping[str, int]) -> None:
        """Continue counting from a saved state."""
        self.engine.version = int(state["version"])
        self.engine.nonfinite_in_row = int(state["nonfinite_in_row"])

    def num_bytes(self) -> int:
        """See ``TrainEngine.state_num_bytes``."""
        return self.shapes().num_bytes

    def save(self, directory: Path) -> FileFacts:
        """See ``TrainEngine.save_shards``."""
        from embodrl.hybrid_engines.training.sharded_checkpoint import save_state  # imports torch's compiler

        return save_state(self, directory)

    def read(self, directory: Path, counters: Mapping[str, int]) -> None:
        """See ``TrainEngine.load_shards``."""
        from embodrl.hybrid_engines.training.sharded_checkpoint import load_state

        load_state(self, directory, counters)
