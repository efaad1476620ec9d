"""Safetensors files that another program may have written or damaged. Torch is imported only to read tensors of torch.

Whatever is wrong with a file is an ``OSError``, so that callers have one kind of error to give a code and a hint.
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
    """Open a file whose tensors are read one by one.

    Args:
        path: of the file, or a link to it.
        framework: pt or np.
        device: of the tensors of torch.

    Yields:
        a reader; see ``safetensors.safe_open``.

    Raises:
        OSError: it is missing, no regular file, or damaged; also what the block finds damaged.
    """
    check_regular_file(path)  # the library would wait for the writer of a pipe
    try:
        with safe_open(path, framework=framework, device=device) as reader:
            yield reader
    except SafetensorError as error:
        raise _damaged(path, error) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file, on the CPU; raises as ``open_tensors``."""
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    return _load(path, load_file)


def load_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """Return all arrays of a file; raises as ``open_tensors``."""
    from safetensors.numpy import load_file

    return _load(path, load_file)


def _load(path: Path, load: Callable[[Path], _T]) -> _T:
    check_regular_file(path)
    try:
        return load(path)
    # A type that the library does not know raises one of the others.
    except (SafetensorError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> OSError:
    return OSError(errno.EINVAL, f"it is not an intact safetensors file: {error}", str(path))
