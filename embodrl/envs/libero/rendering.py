"""MuJoCo's own renderer, one OpenGL context a process, in place of robosuite's."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.libero.meshes import decimate_visuals
from embodrl.errors import MissingDependencyError

# Name in the configuration -> name in LIBERO's scenes.
CAMERAS = {
    "agentview": "agentview",
    "wrist": "robot0_eye_in_hand",
    "frontview": "frontview",
    "birdview": "birdview",
    "sideview": "sideview",
}
_LIBRARIES = {"egl": "libEGL.so.1", "osmesa": "libOSMesa.so.8"}


def choose_backend() -> str:
    """Set MUJOCO_GL, if the user has not, to what this machine has: EGL (GPU or Mesa), else OSMesa.

    Raises:
        MissingDependencyError: there is neither.
    """
    chosen = os.environ.get("MUJOCO_GL") or next((name for name, lib in _LIBRARIES.items() if _loads(lib)), "")
    if not chosen:
        raise MissingDependencyError(
            "MuJoCo has nothing to render with: neither libEGL nor libOSMesa can be loaded",
            "apt install libegl1 libegl-mesa0",
        )
    os.environ["MUJOCO_GL"] = chosen
    os.environ["PYOPENGL_PLATFORM"] = chosen
    return chosen


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@cache
def _context() -> Any:
    """Return this process's OpenGL context, made current."""
    mujoco: Any = import_module("mujoco")
    context = mujoco.GLContext(64, 64)
    context.make_current()
    return context


class Renderer:
    """Draws the states of one model.

    Args:
        model: ``mujoco.MjModel``; changed where ``fast``.
        height, width: pixels of the largest picture.
        fast: lighter meshes, no reflections, no antialiasing: several times faster without a GPU.
    """

    def __init__(self, model: Any, height: int, width: int, fast: bool) -> None:
        mujoco: Any = import_module("mujoco")
        self._mujoco, self._model, self._gl = mujoco, model, _context()
        if fast:
            decimate_visuals(model)
            model.vis.quality.offsamples = 0
        if not model.light_castshadow.any():
            model.vis.quality.shadowsize = 0  # a shadow map of 64 MB that nothing is drawn into
        model.vis.global_.offheight, model.vis.global_.offwidth = height, width
        self._con = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = not fast
        self._options, self._pert = mujoco.MjvOption(), mujoco.MjvPerturb()
        self._options.geomgroup[0] = 0  # collision meshes
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def draw(self, data: Any, camera: int, height: int, width: int) -> NDArray[np.uint8]:
        """Return what a camera sees, ``uint8[H,W,3]``, with the bottom row first, as OpenGL has it."""
        mujoco = self._mujoco
        picture = np.empty((height, width, 3), np.uint8)
        viewport = mujoco.MjrRect(0, 0, width, height)
        self._camera.fixedcamid = camera
        self._gl.make_current()
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._con)
        mujoco.mjv_updateScene(
            self._model, data, self._options, self._pert, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        mujoco.mjr_render(viewport, self._scene, self._con)
        mujoco.mjr_readPixels(picture, None, viewport, self._con)
        return picture

    def close(self) -> None:
        """Free what lies on the graphics side."""
        self._con.free()


def renders_in_software() -> bool:
    """Tell whether the context draws on the CPU (Mesa's llvmpipe or softpipe)."""
    _context()
    gl: Any = import_module("OpenGL.GL")
    name = gl.glGetString(gl.GL_RENDERER)
    return any(software in (name or b"").lower() for software in (b"llvmpipe", b"softpipe", b"swrast"))
