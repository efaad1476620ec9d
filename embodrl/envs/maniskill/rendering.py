"""Rendering ManiSkill on a CPU: choice of the Vulkan device, and lighter meshes.

SAPIEN renders through Vulkan; without a GPU that is Mesa's lavapipe. Its cost grows with the number of triangles: a
Panda has about 135 000 visual ones and the stock ground 20 000, which is nearly all of the time of a 64 x 64 frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.maniskill.types import Batched, BatchedEntity, BatchedSensor
from embodrl.envs.mesh_cache import cached, simplifier
from embodrl.errors import MissingDependencyError

if TYPE_CHECKING:
    import sapien

GROUND_WIDTH_M = 100.0
GROUND_ALTITUDE_M = -0.9196429
GROUND_TEXTURE_SQUARE_M = 4.0
MIN_PART_TRIANGLES = 12
REDUCTION = 0.95
"""Fraction of the triangles that fast rendering drops."""
REFLECTION_TABLE = "BRDFLUT"
"""Name by which SAPIEN's shaders sample the table of environment reflections (split-sum BRDF integrals)."""

# Vertices, triangles and vertex normals.
Mesh = tuple[NDArray[np.float32], NDArray[np.uint32], NDArray[np.float32]]
_decimated: dict[tuple[str, int, float], Mesh] = {}


def render_device_name(render_backend: str) -> str:
    """Return the name of the Vulkan device for ``sapien.Device``, given ``render_backend`` auto, cpu or gpu.

    Raises MissingDependencyError if no Vulkan device of that kind can render.
    """
    import sapien

    if render_backend in ("auto", "gpu"):
        try:
            if sapien.Device("cuda").can_render():
                return "cuda"
        except RuntimeError:
            if render_backend == "gpu":
                raise MissingDependencyError(
                    "env.render_backend is gpu, but SAPIEN finds no CUDA device that can render",
                    "install the NVIDIA driver with Vulkan support, or set env.render_backend=cpu",
                    code="rendering-unavailable",
                ) from None
    for index in range(8):
        try:
            device = sapien.Device(f"pci:{index}")
        except RuntimeError:
            continue
        if device.can_render():
            return f"pci:{index}"
    raise MissingDependencyError(
        "no Vulkan device can render",
        "install a Vulkan CPU driver (Debian/Ubuntu: mesa-vulkan-drivers 23 or newer); see `embodrl doctor`",
        code="rendering-unavailable",
    )


def reduction_of(render_detail: str, mesh_decimation: float | str | None, device: str) -> float:
    """Return the fraction of the robot's visual triangles to drop; 0 also keeps the stock ground.

    ``mesh_decimation`` auto or None leaves it to ``render_detail`` (full, fast or auto) and the device.
    """
    if mesh_decimation not in (None, "auto"):
        return float(mesh_decimation)
    fast = render_detail == "fast" or (render_detail == "auto" and device != "cuda")
    return REDUCTION if fast else 0.0


def omit_reflection_table(system: sapien.render.RenderSystem, sensors: Iterable[BatchedSensor]) -> None:
    """Give cameras a one-texel reflection table, for which SAPIEN would integrate one of 512 x 512 texels.

    On a CPU that takes 6 s in every process, at its first image. The table only weights light from an environment map;
    without a map that light is 0 and the images are bit-identical. Scenes with a map keep SAPIEN's table.
    """
    import sapien

    if system.cubemap is not None:
        return
    table = sapien.render.RenderTexture(np.zeros((1, 1, 2), np.float32), dim=2, format="R32G32Sfloat")
    for sensor in sensors:
        for camera in sensor.camera._render_cameras:
            camera.set_texture(REFLECTION_TABLE, table)


def accept_pci_devices() -> None:
    """Make ManiSkill accept ``pci:<id>`` as render backend: its parser splits the name at the colon."""
    from mani_skill.envs.utils.system import backend

    original = backend.parse_backend_device_id
    if getattr(original, "accepts_pci", False):
        return

    def parse_backend_device_id(name: str) -> object:
        return (name, None) if name.startswith("pci:") else original(name)

    parse_backend_device_id.accepts_pci = True  # type: ignore[attr-defined]
    backend.parse_backend_device_id = parse_backend_device_id


def decimate(vertices: NDArray[np.float32], triangles: NDArray[np.uint32], reduction: float) -> Mesh:
    """Simplify a mesh by quadric error (Garland and Heckbert, 1997).

    Args:
        vertices: ``float32[N,3]``.
        triangles: ``uint32[M,3]``.
        reduction: fraction of the triangles to drop, in [0, 1).

    Returns:
        vertices ``[N',3]``, triangles ``[M',3]`` and area-weighted vertex normals ``[N',3]``.
    """
    fast_simplification, version = simplifier("embodrl[maniskill]")
    return cached(
        f"maniskill 1, {reduction} {MIN_PART_TRIANGLES}, {version}",
        (vertices, triangles),
        lambda: _decimate(vertices, triangles, reduction, fast_simplification),
    )


def _decimate(
    vertices: NDArray[np.float32], triangles: NDArray[np.uint32], reduction: float, fast_simplification: ModuleType
) -> tuple[NDArray[np.float32], NDArray[np.uint32], NDArray[np.float32]]:
    # Seams split vertices by normal and texture; the simplifier would tear the mesh there.
    unique, inverse = np.unique(np.round(vertices, 6), axis=0, return_inverse=True)
    faces = inverse.reshape(-1)[triangles.astype(np.int64)].reshape(-1, 3)
    faces = faces[(faces[:, 0] != faces[:, 1]) & (faces[:, 1] != faces[:, 2]) & (faces[:, 2] != faces[:, 0])]
    if len(faces) * (1 - reduction) >= MIN_PART_TRIANGLES:
        points = unique.astype(np.float32)
        indices = faces.astype(np.int32)
        unique, faces = fast_simplification.simplify(points, indices, target_reduction=reduction)
    faces = np.asarray(faces, dtype=np.uint32)
    points = np.asarray(unique, dtype=np.float32)
    corners = points[faces.astype(np.int64)]
    face_normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normals = np.zeros_like(points)
    for corner in range(3):
        np.add.at(normals, faces[:, corner], face_normals)
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    return points, faces, normals.astype(np.float32)


def _light_shapes(
    shape: sapien.render.RenderShape, reduction: float, min_triangles: int
) -> list[sapien.render.RenderShapeTriangleMesh] | None:
    """Return decimated stand-ins for a triangle mesh, or None if it is already small."""
    import sapien

    if not isinstance(shape, sapien.render.RenderShapeTriangleMesh):
        return None
    parts = shape.parts
    if sum(len(part.triangles) for part in parts) < min_triangles:
        return None
    result = []
    for index, part in enumerate(parts):
        key = (shape.filename, index, reduction)
        if key not in _decimated:
            _decimated[key] = decimate(part.vertices, part.triangles, reduction)
        points, faces, normals = _decimated[key]
        light = sapien.render.RenderShapeTriangleMesh(
            vertices=points * np.asarray(shape.scale, dtype=np.float32),
            triangles=faces,
            normals=normals,
            uvs=np.zeros((len(points), 2), dtype=np.float32),
            material=part.material,
        )
        light.local_pose = shape.local_pose
        result.append(light)
    return result


def render_body(entity: sapien.Entity) -> sapien.render.RenderBodyComponent | None:
    """Return the render body of an entity; None if it has none."""
    import sapien

    body = entity.find_component_by_type(sapien.render.RenderBodyComponent)
    return body if isinstance(body, sapien.render.RenderBodyComponent) else None


def _replace_body(
    entity: sapien.Entity, old: sapien.render.RenderBodyComponent, shapes: Sequence[sapien.render.RenderShape]
) -> None:
    import sapien

    body = sapien.render.RenderBodyComponent()
    for shape in shapes:
        body.attach(shape)
    body.name = old.name
    entity.remove_component(old)
    entity.add_component(body)


def decimate_robot(links: Sequence[Batched], reduction: float, min_triangles: int = 500) -> int:
    """Replace the visual meshes of a robot's ``Link`` objects by decimated ones; return the number of replaced bodies.

    Collision meshes and meshes smaller than ``min_triangles`` are kept; ``reduction`` is the fraction of triangles to
    drop.
    """

    swapped = 0
    for link in links:
        for physx_link in link._objs:
            entity = physx_link.entity
            body = render_body(entity)
            if body is None:
                continue
            light = [(_light_shapes(shape, reduction, min_triangles), shape) for shape in body.render_shapes]
            if all(stand_ins is None for stand_ins, _ in light):
                continue
            shapes = [
                s for stand_ins, shape in light for s in (stand_ins if stand_ins is not None else [shape.clone()])
            ]
            _replace_body(entity, body, shapes)
            swapped += 1
    return swapped


def simplify_ground(ground: BatchedEntity) -> None:
    """Render the chequered ground with 2 triangles instead of 20 000; the image is the same."""
    import sapien

    half = GROUND_WIDTH_M / 2
    corners = np.array([[-half, -half], [half, -half], [half, half], [-half, half]], dtype=np.float32)
    for entity in ground._objs:
        body = render_body(entity)
        if body is None:
            continue
        material = body.render_shapes[0].parts[0].material
        # The stock texture coordinates, evaluated at the corners: they are linear in x and y.
        uvs = (corners * (GROUND_WIDTH_M / GROUND_TEXTURE_SQUARE_M) + half) / GROUND_WIDTH_M
        quad = sapien.render.RenderShapeTriangleMesh(
            vertices=np.concatenate([corners, np.full((4, 1), GROUND_ALTITUDE_M, dtype=np.float32)], axis=1),
            triangles=np.array([[0, 1, 2], [0, 2, 3]], dtype=np.uint32),
            normals=np.tile(np.array([0, 0, 1], dtype=np.float32), (4, 1)),
            uvs=uvs,
            material=material,
        )
        _replace_body(entity, body, [quad])
