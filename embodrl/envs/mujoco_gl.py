"""Choice of MuJoCo's OpenGL backend."""

from __future__ import annotations

import ctypes
import os
from importlib import import_module

from embodrl.errors import MissingDependencyError

GL_LIBRARIES = {"egl": "libEGL.so.1", "osmesa": "libOSMesa.so.8"}
GL_HINT = "apt install libegl1 libegl-mesa0 (or libosmesa6, for MUJOCO_GL=osmesa)"
_SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast", "software")


def choose_gl(required: bool = True) -> str:
    """Set MUJOCO_GL, unless the user has, to egl or else osmesa, whichever this machine has; return it, "" for none.

    Call before importing MuJoCo. Raises MissingDependencyError if neither is available and one is required.
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
    """Whether a shared library can be loaded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def draws_in_software() -> bool:
    """Whether the current OpenGL context renders on the CPU."""
    gl = import_module("OpenGL.GL")

    name = gl.glGetString(gl.GL_RENDERER)
    return any(part in (name or b"").decode().lower() for part in _SOFTWARE_RENDERERS)
