"""Which OpenGL MuJoCo draws with."""

from __future__ import annotations

import ctypes
import os
from importlib import import_module

from embodrl.errors import MissingDependencyError

GL_LIBRARIES = {"egl": "libEGL.so.1", "osmesa": "libOSMesa.so.8"}
GL_HINT = "apt install libegl1 libegl-mesa0 (or libosmesa6, for MUJOCO_GL=osmesa)"
_SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast", "software")


def choose_gl(required: bool = True) -> str:
    """Set MUJOCO_GL, if the user has not, to what this machine has: egl, or else osmesa. Before MuJoCo is imported.

    Returns:
        what was chosen; "" for nothing.

    Raises:
        MissingDependencyError: there is neither, and one is required.
    """
    chosen = os.environ.get("MUJOCO_GL") or next((name for name, lib in GL_LIBRARIES.items() if loads(lib)), "")
    if not chosen and not required:
        return ""
    if not chosen:
        raise MissingDependencyError(
            "MuJoCo can't draw: neither libEGL nor libOSMesa can be loaded", GL_HINT, code="rendering-unavailable"
        )
    os.environ["MUJOCO_GL"] = chosen
    os.environ.setdefault("PYOPENGL_PLATFORM", chosen)
    return chosen


def loads(library: str) -> bool:
    """Tell whether a shared library is there."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def draws_in_software() -> bool:
    """Tell whether the OpenGL context that is current draws on the CPU."""
    gl = import_module("OpenGL.GL")

    name = gl.glGetString(gl.GL_RENDERER)
    return any(part in (name or b"").decode().lower() for part in _SOFTWARE_RENDERERS)
