"""The names and shapes of an engine's state, and whether a saved one fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from embodrl.errors import CheckpointError

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
FLOAT32_BYTES = 4
MASTER = "master"
"""What the optimizer keeps of weights in half precision besides: they in float32."""
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
        kept = [*weights.values(), *(reference or {}).values(), *moments, *moments]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept)
        num_bytes += sum(3 * FLOAT32_BYTES * trained[name].numel() for name in names)
        return cls(_shapes(weights), _shapes(trained), _shapes(reference or {}), num_bytes)


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_fit(saved: Mapping[str, Mapping[str, Tensor]], shapes: StateShapes) -> None:
    """Refuse a state of another policy.

    Raises:
        CheckpointError: names or shapes differ.
    """
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
    bucket, filled = list[str](), 0
    for name, size in sizes.items():
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += size
    if bucket:
        yield bucket


def num_bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the bytes of tensors, by name; of sharded ones, those of the whole."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
