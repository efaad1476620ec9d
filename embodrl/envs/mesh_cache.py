"""On-disk cache of decimated meshes, keyed by content and shared by all processes of a machine."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import MissingDependencyError, OutputError
from embodrl.processes.codec import decode, encode
from embodrl.storage.atomic import atomic_file

logger = logging.getLogger("embodrl.envs")

_CHECKSUM_BYTES = hashlib.sha256().digest_size

Arrays = tuple[NDArray[np.generic], ...]
A = TypeVar("A", bound=Arrays)
_in_process: dict[str, Arrays] = {}


def cache_directory() -> Path:
    """Return the cache directory: ``$XDG_CACHE_HOME/embodrl/meshes``, or below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "embodrl" / "meshes"


def simplifier(package: str) -> tuple[ModuleType, str]:
    """Return fast_simplification and its version, which is part of the cache key.

    Raises MissingDependencyError naming the pip ``package`` that provides it.
    """
    try:
        return import_module("fast_simplification"), version("fast-simplification")
    except ImportError as error:
        hint = f"pip install '{package}', or set env.render_detail=full"
        raise MissingDependencyError(f"fast_simplification can't be imported: {error}", hint) from error


def cached(algorithm: str, inputs: Sequence[NDArray[np.generic]], compute: Callable[[], A]) -> A:
    """Return ``compute()``, from memory or disk if it was computed for these inputs before.

    A torn or altered file (by its checksum) is recomputed and replaced. If nothing can be stored, the result is the
    same and a warning is logged.

    Args:
        algorithm: the computation with every parameter and a version: part of the key.
        inputs: arrays the result depends on; their bytes, shapes and dtypes are the rest of the key.
        compute: computes the result.
    """
    key = _key(algorithm, inputs)
    if key not in _in_process:
        path = cache_directory() / f"{key[:40]}.mesh"
        found = _read(path)
        if found is None:
            found = compute()
            _write(path, found)
        _in_process[key] = found
    return cast(A, _in_process[key])  # an equal key means an equal function


def _key(algorithm: str, inputs: Sequence[NDArray[np.generic]]) -> str:
    digest = hashlib.sha256(algorithm.encode())
    for array in inputs:
        digest.update(f"|{array.dtype.str}{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _read(path: Path) -> Arrays | None:
    """Return the arrays of an intact file; None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("the mesh cache can't be read; the mesh is recomputed: %s", error)
        return None
    checksum = content[:_CHECKSUM_BYTES]
    payload = content[_CHECKSUM_BYTES:]
    if hashlib.sha256(payload).digest() != checksum:
        logger.warning("%s is damaged; the mesh is recomputed", path)
        return None
    return tuple(decode(payload))


def _write(path: Path, arrays: Arrays) -> None:
    """Write a file atomically; of concurrent writers, one wins, with the same content."""
    payload = encode(list(arrays))
    try:
        with atomic_file(path, concurrent=True) as partial:
            partial.write_bytes(hashlib.sha256(payload).digest() + payload)
    except OutputError as error:
        logger.warning("the mesh can't be cached for later starts: %s", error.message)
