"""Protocols for the parts of MuJoCo's model and data that embodrl uses, since mujoco has no type stubs.

MuJoCo's own ``MjModel`` and ``MjData`` conform, as do the wrappers of robosuite and Gymnasium.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Ints = NDArray[np.int32]


class Quality(Protocol):
    """Buffer sizes of an OpenGL context."""

    shadowsize: int
    offsamples: int


class GlobalVisual(Protocol):
    """Size of the off-screen buffer (pixels), and the free camera's field of view (degrees)."""

    offheight: int
    offwidth: int
    fovy: float


class Visual(Protocol):
    """Rendering options of a model."""

    quality: Quality
    global_: GlobalVisual


class Physics(Protocol):
    """Options of the simulation."""

    timestep: float  # seconds


class Named(Protocol):
    """An element of a model."""

    name: str


class MjModel(Protocol):
    """A compiled model."""

    nq: int
    nv: int
    ncam: int
    vis: Visual
    opt: Physics
    light_castshadow: NDArray[np.bool_]
    cam_fovy: Floats
    actuator_ctrlrange: Floats
    body_pos: Floats
    body_quat: Floats
    geom_type: Ints
    geom_group: Ints
    geom_dataid: Ints
    geom_matid: Ints
    mat_texid: Ints
    mesh_faceadr: Ints
    mesh_facenum: Ints
    mesh_vertadr: Ints
    mesh_vertnum: Ints
    mesh_normaladr: Ints
    mesh_normalnum: Ints
    mesh_texcoordadr: Ints
    mesh_texcoordnum: Ints
    mesh_face: Ints
    mesh_facenormal: Ints
    mesh_facetexcoord: Ints
    mesh_vert: Floats32
    mesh_normal: Floats32
    mesh_texcoord: Floats32

    def camera(self, index: int, /) -> Named:
        """Return the camera with that id."""
        ...


class WarningCount(Protocol):
    """Number of times a warning was raised."""

    number: int


class MjData(Protocol):
    """The state of a simulation."""

    qpos: Floats
    qvel: Floats
    qM: Floats
    qfrc_bias: Floats
    ctrl: Floats
    site_xpos: Floats
    site_xmat: Floats
    xquat: Floats
    warning: Sequence[WarningCount]


class GLContext(Protocol):
    """An OpenGL context."""

    def make_current(self) -> None:
        """Make the context current for this thread."""
        ...
