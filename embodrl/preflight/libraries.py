"""Shared libraries that the simulators' Python packages need but do not ship.

Standard library only: the set-up runs this file before anything is installed.
"""

from __future__ import annotations

import ctypes

# Library -> its Debian and Ubuntu package.
LIBRARIES = {
    "libvulkan.so.1": "libvulkan1",  # sapien
    "libX11.so.6": "libx11-6",  # sapien
    "libGL.so.1": "libgl1",  # opencv, which mani_skill imports
    "libgthread-2.0.so.0": "libglib2.0-0",  # opencv
}
# MuJoCo's renderers; checked if EMBODRL_LIBERO=1.
LIBERO_LIBRARIES = {
    "libEGL.so.1": "libegl1",
    "libEGL_mesa.so.0": "libegl-mesa0",
}


def missing_libraries(libraries: dict[str, str] = LIBRARIES) -> dict[str, str]:
    """Return library -> package for libraries that can't be loaded."""
    missing: dict[str, str] = {}
    for library, package in libraries.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing[library] = package
    return missing
