"""What the simulators on MuJoCo share: which OpenGL to draw with, cameras, and pictures that are quick on a CPU.

Legend: H x W image.
"""

from __future__ import annotations

import copy
import ctypes.util
import math
import os
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import EnvError, MissingDependencyError

RENDER_DETAILS = ("auto", "full", "fast")
GL_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
GL_REMEDY = "apt install libegl1 libegl-mesa0 (or libosmesa6, for MUJOCO_GL=osmesa)"
MIN_TRIANGLES = 1000
"""Meshes up to this size are drawn as they are."""
REDUCTION = 0.85
_SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast", "software")


def choose_gl(required: bool = True) -> str:
    """Set MUJOCO_GL, if the user has not, to what this machine has: egl, or else osmesa. Before MuJoCo is imported.

    Returns:
        what was chosen; "" for nothing.

    Raises:
        MissingDependencyError: there is neither, and one is required.
    """
    found = [name for name, library in GL_LIBRARIES.items() if ctypes.util.find_library(library)]
    chosen = os.environ.get("MUJOCO_GL") or next(iter(found), "")
    if not chosen and not required:
        return ""
    if not chosen:
        raise MissingDependencyError("MuJoCo can't draw: neither libEGL nor libOSMesa is installed", GL_REMEDY)
    os.environ["MUJOCO_GL"] = chosen
    os.environ.setdefault("PYOPENGL_PLATFORM", chosen)
    return chosen


def draws_in_software() -> bool:
    """Tell whether the OpenGL context that is current draws on the CPU."""
    gl: Any = import_module("OpenGL.GL")

    name = gl.glGetString(gl.GL_RENDERER)
    return any(part in (name or b"").decode().lower() for part in _SOFTWARE_RENDERERS)


@cache
def is_fast(detail: str) -> bool:
    """Tell what ``auto`` means on this machine: fast where OpenGL draws on the CPU. Makes a context to find out."""
    if detail != "auto":
        return detail == "fast"
    mujoco: Any = import_module("mujoco")

    context = mujoco.GLContext(16, 16)
    context.make_current()
    try:
        return draws_in_software()
    finally:
        context.free()


def simplify(model: Any) -> None:
    """Leave out what costs a CPU most of a picture's time: shadow maps and anti-aliasing. Before a context is made."""
    model.vis.quality.shadowsize = 0
    model.vis.quality.offsamples = 0


def lighten_meshes(model: Any) -> Any:
    """Return a copy of the model, for an OpenGL context only, whose larger meshes have 15 % of their triangles.

    Meshes with texture coordinates stay. Geometry for collisions is read from the model that is simulated.

    Raises:
        MissingDependencyError: fast_simplification is not installed.
    """
    try:
        decimate: Any = import_module("fast_simplification").simplify
    except ImportError as error:
        remedy = "pip install 'embodrl[metaworld]', or set env.render_detail=full"
        raise MissingDependencyError(f"fast_simplification can't be imported: {error}", remedy) from error
    light = copy.copy(model)
    for mesh in range(model.nmesh):
        if model.mesh_facenum[mesh] <= MIN_TRIANGLES or model.mesh_texcoordadr[mesh] >= 0:
            continue
        first_vertex, first_face = int(model.mesh_vertadr[mesh]), int(model.mesh_faceadr[mesh])
        vertices = model.mesh_vert[first_vertex : first_vertex + int(model.mesh_vertnum[mesh])]
        faces = model.mesh_face[first_face : first_face + int(model.mesh_facenum[mesh])]
        # Corners that lie in one place are one point, or the surface would tear along them.
        welded, index = np.unique(vertices, axis=0, return_inverse=True)
        points, triangles = decimate(welded, index[faces].astype(np.int32), target_reduction=REDUCTION)
        if len(points) > min(len(vertices), int(model.mesh_normalnum[mesh])) or not len(triangles):
            continue
        rows = slice(first_face, first_face + len(triangles))
        light.mesh_face[rows] = light.mesh_facenormal[rows] = triangles
        light.mesh_vert[first_vertex : first_vertex + len(points)] = points
        first_normal = int(model.mesh_normaladr[mesh])
        light.mesh_normal[first_normal : first_normal + len(points)] = _vertex_normals(points, triangles)
        light.mesh_facenum[mesh], light.mesh_vertnum[mesh] = len(triangles), len(points)
    return light


def _vertex_normals(points: NDArray[np.float32], triangles: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return ``float32[P,3]``: the mean of the normals of the triangles around a point, weighted by their area."""
    corners = points[triangles]
    normals = np.zeros_like(points)
    cross = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    for corner in range(3):
        np.add.at(normals, triangles[:, corner], cross)
    return normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)


class SceneRenderer:
    """Draws the scenes of models that differ in positions only, such as the simulators of one task.

    Args:
        model: one of them.
        height, width: pixels of the largest picture.
        detail: ``full`` draws as MuJoCo does, ``fast`` with fewer triangles, without shadows, reflections and
            anti-aliasing; ``auto`` is fast where a CPU draws.
    """

    def __init__(self, model: Any, height: int, width: int, detail: str) -> None:
        mujoco: Any = import_module("mujoco")

        self.fast = is_fast(detail)
        self._gl = mujoco.GLContext(width, height)
        self._gl.make_current()
        if self.fast:
            simplify(model)
        drawn = lighten_meshes(model) if self.fast else model
        self._context = mujoco.MjrContext(drawn, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        mujoco.mjr_resizeOffscreen(width, height, self._context)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=10_000)
        self._option = mujoco.MjvOption()
        if self.fast:
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0

    def draw(self, model: Any, data: Any, camera: Any, height: int, width: int) -> NDArray[np.uint8]:
        """Return ``uint8[H,W,3]`` of an ``MjvCamera``."""
        mujoco: Any = import_module("mujoco")

        self._gl.make_current()
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self._option, None, camera, everything, self._scene)
        view = mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(view, self._scene, self._context)
        picture = np.empty((height, width, 3), np.uint8)
        mujoco.mjr_readPixels(picture, None, view, self._context)
        return picture[::-1]

    def close(self) -> None:
        """Free the OpenGL context."""
        self._context.free()
        self._gl.free()


def make_camera(model: Any, settings: dict[str, Any]) -> Any:
    """Return the ``MjvCamera`` of ``{name, fov_rad, eye, target}``: one of the model's, or a free one with a place.

    A field of view is written into the model.

    Raises:
        EnvError: the model has no camera of that name, and no place is given.
    """
    mujoco: Any = import_module("mujoco")

    camera = mujoco.MjvCamera()
    fov_deg = None if settings.get("fov_rad") is None else math.degrees(settings["fov_rad"])
    if settings.get("eye") is not None:
        look = np.subtract(settings["target"], settings["eye"])
        camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        camera.lookat[:] = settings["target"]
        camera.distance = float(np.linalg.norm(look))
        camera.azimuth = math.degrees(math.atan2(look[1], look[0]))
        camera.elevation = math.degrees(math.asin(look[2] / camera.distance))
        if fov_deg is not None:
            model.vis.global_.fovy = fov_deg
        return camera
    known = [model.camera(index).name for index in range(model.ncam)]
    if settings["name"] not in known:
        raise EnvError(
            f"the scene has no camera '{settings['name']}'",
            f"name one of {', '.join(known)}, or give env.cameras eye and target",
        )
    camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
    camera.fixedcamid = known.index(settings["name"])
    if fov_deg is not None:
        model.cam_fovy[camera.fixedcamid] = fov_deg
    return camera
