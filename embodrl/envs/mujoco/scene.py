"""Shared by the MuJoCo simulators: cameras, and rendering that is fast on a CPU. Shapes: H x W image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.mujoco.meshes import lighten_meshes
from embodrl.envs.mujoco.types import GLContext, MjData, MjModel
from embodrl.envs.mujoco_gl import draws_in_software
from embodrl.envs.stepping import CameraSettings
from embodrl.errors import EnvError


@cache
def is_fast(detail: str) -> bool:
    """Resolve ``auto`` for this machine: fast if OpenGL renders on the CPU. Creates a context to find out."""
    if detail != "auto":
        return detail == "fast"
    _shared_context().make_current()
    return draws_in_software()


def simplify(model: MjModel) -> None:
    """Turn off shadow maps and anti-aliasing, the largest rendering costs on a CPU. Call before a context is made."""
    model.vis.quality.shadowsize = 0
    model.vis.quality.offsamples = 0


@cache
def _shared_context() -> GLContext:
    """Return this process's OpenGL context, in which all scenes have their own buffers and meshes."""
    mujoco = import_module("mujoco")
    context: GLContext = mujoco.GLContext(64, 64)
    context.make_current()
    return context


@dataclass(frozen=True)
class SceneCamera:
    """Camera of an image.

    Attributes:
        view: ``MjvCamera``.
        fov_deg: field of view of a free camera, since MuJoCo's model has a single one for all of them; None for the
            model's.
    """

    view: object
    fov_deg: float | None = None


class SceneRenderer:
    """Renders models that differ only in positions, such as the simulators of one task.

    Args:
        model: one of the models; its ``vis`` is changed.
        height, width: size of the largest image, in pixels.
        detail: ``full`` renders as MuJoCo does, ``fast`` with fewer triangles, without shadows, reflections and
            anti-aliasing; ``auto`` is fast with CPU rendering.
        hidden_groups: groups of invisible geoms.
    """

    def __init__(
        self, model: MjModel, height: int, width: int, detail: str, hidden_groups: tuple[int, ...] = ()
    ) -> None:
        self._mujoco = import_module("mujoco")
        self._gl = _shared_context()
        fast = is_fast(detail)
        if fast:
            simplify(model)
        elif not model.light_castshadow.any():
            model.vis.quality.shadowsize = 0  # an unused shadow map of 64 MB
        model.vis.global_.offheight = height
        model.vis.global_.offwidth = width
        self._gl.make_current()
        drawn = lighten_meshes(model, hidden_groups) if fast else model
        self._context = self._mujoco.MjrContext(drawn, self._mujoco.mjtFontScale.mjFONTSCALE_100.value)
        self._scene = self._mujoco.MjvScene(model, maxgeom=10_000)
        self._option = self._mujoco.MjvOption()
        for group in hidden_groups:
            self._option.geomgroup[group] = 0
        if fast:
            self._scene.flags[self._mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            self._scene.flags[self._mujoco.mjtRndFlag.mjRND_REFLECTION] = 0

    def draw(self, model: MjModel, data: MjData, camera: SceneCamera, height: int, width: int) -> NDArray[np.uint8]:
        """Return ``uint8[H,W,3]``, upright."""
        mujoco = self._mujoco
        self._gl.make_current()
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        own_fov_deg = model.vis.global_.fovy
        if camera.fov_deg is not None:
            model.vis.global_.fovy = camera.fov_deg
        mujoco.mjv_updateScene(model, data, self._option, None, camera.view, everything, self._scene)
        model.vis.global_.fovy = own_fov_deg
        view = mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(view, self._scene, self._context)
        picture = np.empty((height, width, 3), np.uint8)
        mujoco.mjr_readPixels(picture, None, view, self._context)
        return picture[::-1]

    def close(self) -> None:
        self._gl.make_current()
        self._context.free()


def make_camera(model: MjModel, settings: CameraSettings) -> SceneCamera:
    """Return the camera of ``{name, fov_rad, eye, target}``: one of the model's, or a free camera if a pose is given.

    Raises EnvError if the model has no camera of that name, and no pose is given.
    """
    fov_rad = settings.get("fov_rad")
    eye = settings.get("eye")
    target = settings.get("target")
    fov_deg = None if fov_rad is None else math.degrees(fov_rad)
    if eye is None or target is None:
        return named_camera(model, settings["name"], fov_deg)
    mujoco = import_module("mujoco")
    camera = mujoco.MjvCamera()
    look = np.subtract(target, eye)
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    camera.lookat[:] = target
    camera.distance = float(np.linalg.norm(look))
    camera.azimuth = math.degrees(math.atan2(look[1], look[0]))
    camera.elevation = math.degrees(math.asin(look[2] / camera.distance))
    return SceneCamera(camera, fov_deg)


def named_camera(model: MjModel, name: str, fov_deg: float | None = None) -> SceneCamera:
    """Return one of the model's cameras, setting its field of view in the model; EnvError if there is none."""
    mujoco = import_module("mujoco")
    known = [model.camera(index).name for index in range(model.ncam)]
    if name not in known:
        raise EnvError(
            f"the scene has no camera '{name}'",
            f"name one of {', '.join(known)}, or set eye and target in env.cameras",
            code="camera-unknown",
        )
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
    camera.fixedcamid = known.index(name)
    if fov_deg is not None:
        model.cam_fovy[camera.fixedcamid] = fov_deg
    return SceneCamera(camera)
