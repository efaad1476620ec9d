"""Data passed between nodes: values, metrics, and their descriptions in messages. Imports no torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any, cast

Metrics = dict[str, float | None]


def outcome_of(result: object) -> tuple[object, Metrics]:
    """Split a node's return value (``value``, ``(value, metrics)`` or None) into value and metrics.

    Raises:
        TypeError: the metrics are not numbers by name, or use a reserved name.
    """
    pair = cast(tuple[object, ...], result) if isinstance(result, tuple) else ()
    if len(pair) != 2 or not isinstance(pair[1], dict):
        return cast(Any, result), {}
    value, metrics = pair
    found: Metrics = {}
    for name, number in cast(dict[object, object], metrics).items():
        if not isinstance(name, str) or not (number is None or isinstance(number, Real)):
            raise TypeError(f"the metric {name!r}, which is {described(number)}")
        if name == "iteration":
            raise TypeError("a metric called 'iteration', a name reserved for the run")
        found[name] = number if number is None or isinstance(number, int | float) else float(number)
    return value, found


def shared(value: Any) -> Any:
    """Return a shallow copy of a batch, anything else itself."""
    return value.replace() if _is_batch(value) else value


def described(value: Any) -> str:
    """Return the type of a value and, for tensors and containers of tensors, dtypes and shapes."""
    if _is_batch(value):
        columns = ", ".join(f"{'/'.join(path)} {_tensor(tensor)}" for path, tensor in value.leaves())
        return f"{type(value).__name__} {list(value.batch_size)} with {columns or 'no columns'}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {_tensor(value)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return f"{type(value).__name__} with {', '.join(f'{name} {described(part)}' for name, part in fields)}"
    if isinstance(value, Mapping):
        parts = [f"{name}: {described(part)}" for name, part in cast(Mapping[Any, Any], value).items()]
        return f"{type(cast(Any, value)).__name__} {{{', '.join(parts)}}}"
    if isinstance(value, list | tuple):
        items = cast(list[Any] | tuple[Any, ...], value)
        return f"{type(items).__name__} of {len(items)}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return type(value).__name__


def _is_batch(value: object) -> bool:
    # A batch can only exist if its module has been imported.
    module = sys.modules.get("embodrl.data.batch")
    return module is not None and isinstance(value, module.Batch)


def _tensor(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
