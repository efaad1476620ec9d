"""Safetensors files of unknown origin. Imports torch only to read torch tensors.

Every defect of a file raises ``OSError``, so that callers have a single error to add a code and a hint to.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from embodrl.fields import check_regular_file

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")


@contextmanager
def open_tensors(path: Path, framework: str = "pt", device: str = "cpu") -> Iterator[Any]:
    """Yield a reader (see ``safetensors.safe_open``) of a file or link, to read tensors one by one.

    Args:
        path: file path.
        framework: ``pt`` or ``np``.
        device: device of torch tensors.

    Raises:
        OSError: the file is missing, damaged or not a regular file, or the block finds it damaged.
    """
    check_regular_file(path)  # opening a pipe would block until it has a writer
    try:
        with safe_open(path, framework=framework, device=device) as reader:
            yield reader
    except SafetensorError as error:
        raise _damaged(path, error) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file on the CPU; raises like ``open_tensors``."""
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    return _load(path, load_file)


def load_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """Return all arrays of a file; raises like ``open_tensors``."""
    from safetensors.numpy import load_file

    return _load(path, load_file)


def _load(path: Path, load: Callable[[Path], _T]) -> _T:
    check_regular_file(path)
    try:
        return load(path)
    # A dtype unknown to the library raises one of the others.
    except (SafetensorError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> OSError:
    return OSError(errno.EINVAL, f"it is not an intact safetensors file: {error}", str(path))
