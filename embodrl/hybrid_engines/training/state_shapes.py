"""The shapes of an engine's state, and checks of a saved one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor, nn

from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.training.optimizers import ADAMW, KeptState
from embodrl.hybrid_engines.training.side_modules import HINT, SideModules, check_side

FLOAT32_BYTES = 4
MASTER = "master"
"""Further optimizer state of half-precision weights: the weights in float32."""
HAS_MOMENTS = "has_moments"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class StateShapes:
    """Required contents of a saved state.

    Attributes:
        policy: shapes of all weights and saved buffers.
        trained: shapes of the trained parameters.
        reference: shapes of the reference's own weights; empty without a reference.
        num_bytes: size of the state once every weight has been trained.
        side: shapes of the weights of modules alongside the policy, by section.
        side_trained: names of the parameters trained with them, by section.
        numbers, moments: what the optimizer keeps of a trained parameter: scalars, and tensors of its shape.
    """

    policy: Shapes
    trained: Shapes
    reference: Shapes
    num_bytes: int
    side: dict[str, Shapes] = field(default_factory=dict[str, Shapes])
    side_trained: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    numbers: tuple[str, ...] = ADAMW.numbers
    moments: tuple[str, ...] = ADAMW.moments

    @property
    def sections(self) -> tuple[str, ...]:
        return ("policy", "optimizer", *(["reference"] if self.reference else []), *self.side)

    @classmethod
    def of(
        cls,
        policy: nn.Module,
        trained: Mapping[str, nn.Parameter],
        reference: Mapping[str, Tensor] | None = None,
        masters: Iterable[str] = (),
        side: SideModules | None = None,
        kept: KeptState = ADAMW,
    ) -> Self:
        """Return the shapes of a policy's state; sharded tensors have their whole shapes.

        For ``masters``, a subset of ``trained``, there are a float32 copy and float32 moments.
        """
        weights = dict(policy.state_dict())
        names = set(masters)
        moments = [p for name, p in trained.items() if name not in names] * len(kept.moments)
        tensors = [*weights.values(), *(reference or {}).values(), *moments]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        in_float32 = 1 + len(kept.moments)  # the copy and its moments
        num_bytes += sum(in_float32 * FLOAT32_BYTES * trained[name].numel() for name in names)
        shapes = (_shapes(weights), _shapes(trained), _shapes(reference or {}))
        found = cls(*shapes, num_bytes, numbers=kept.numbers, moments=kept.moments)
        if side is None:
            return found
        side_shapes = {side.section: _shapes(side.weights())}
        side_trained = {side.section: list(side.trained())}
        return replace(found, num_bytes=num_bytes + side.num_bytes(), side=side_shapes, side_trained=side_trained)


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_fit(
    saved: Mapping[str, Mapping[str, Tensor]], shapes: StateShapes, counters: Mapping[str, int] | None = None
) -> None:
    """Reject a state of another policy, or one that has lost its moments.

    ``counters`` of earlier versions do not record whether there were moments.

    Raises:
        CheckpointError: names or shapes differ.
    """
    if (counters or {}).get(HAS_MOMENTS) and not saved.get("optimizer"):
        message = (
            "the checkpoint's optimizer state is empty although weights had been trained: they would lose momentum"
        )
        raise CheckpointError(message, "use an earlier checkpoint", code="checkpoint-damaged")
    _check_weights(saved.get("policy", {}), shapes.policy)
    if shapes.reference:
        _check_reference(saved.get("reference"), shapes.reference)
    for section, weights in shapes.side.items():
        check_side(saved.get(section, {}), weights, shapes.side_trained[section])
    moments = dict(saved.get("optimizer", {}))
    for name, shape in shapes.trained.items():
        keys = (*shapes.numbers, *shapes.moments)
        found = [t for key in keys if (t := moments.pop(f"{key}.{name}", None)) is not None]
        copy = moments.pop(f"{MASTER}.{name}", None)
        if not found and (copy is None or keys):
            continue  # not trained yet when the checkpoint was made
        if copy is not None:
            found.append(copy)
        if len(found) < len(keys) or any(tuple(tensor.shape) != shape for tensor in found[len(shapes.numbers) :]):
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
    """Return the bytes of tensors, by name; sharded ones count whole."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
