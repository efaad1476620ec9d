"""Official initial states, shipped as pickled arrays: read without executing the pickles."""

from __future__ import annotations

import codecs
import hashlib
import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import EnvError

# All that a plain float array needs; anything else is rejected.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        if name == "_reconstruct":
            return np.ndarray((0,)).__reduce__()[0]
        return codecs.encode if name == "encode" else getattr(np, name)


def read_init_states(path: Path, sha256: str) -> NDArray[np.float64]:
    """Return the initial states of a task, ``float64[N, 1 + nq + nv]``: time, positions, velocities.

    ``path`` is a ``.pruned_init`` file of LIBERO, a zip with one pickled array, opened only if its SHA-256 matches.
    Raises EnvError if the file is missing, not the official one, or holds anything but a float array.
    """
    hint = "reinstall LIBERO: embodrl env install libero --force"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EnvError(f"initial states not found: {error}", hint, code="libero-init-states") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise EnvError(
            f"{path} is not the official file of initial states: its checksum differs", hint, code="libero-init-states"
        )
    return parse_init_states(data, str(path))


def parse_init_states(data: bytes, name: str) -> NDArray[np.float64]:
    """Parse the bytes of such a file; see ``read_init_states``."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (member,) = [entry for entry in archive.namelist() if entry.endswith("/data.pkl")]
            states = _ArrayUnpickler(io.BytesIO(archive.read(member))).load()
    except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, KeyError, EOFError) as error:
        raise EnvError(
            f"{name} is not a file of initial states: {error}", "use the official file", code="libero-init-states"
        ) from error
    if not isinstance(states, np.ndarray) or states.ndim != 2 or states.dtype != np.float64:
        raise EnvError(f"{name} holds no array of initial states", "use the official file", code="libero-init-states")
    return np.ascontiguousarray(states)
