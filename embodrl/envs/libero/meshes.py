"""Fewer triangles for MuJoCo's renderer, written into the compiled model; what collides stays as it is."""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

REDUCTION = 0.9
MIN_FACES = 1000  # a mesh with fewer is left alone
KEPT_FACES = 600  # and this many stay at least
KEPT_TEXTURED = 2000  # of those with a picture on them, whose seams would tear
CREASE_COSINE = 0.7  # faces that differ by more than 45 degrees meet in an edge that shows
_MESH_GEOM = 7  # mjGEOM_MESH

_Reduced = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32] | None, NDArray[np.int32]]
_done: dict[bytes, _Reduced] = {}


def decimate_visuals(model: Any) -> int:
    """Reduce the meshes that are only drawn; return how many triangles are left of all that are drawn.

    A mesh shared with a geom that collides is left alone. Works on ``mujoco.MjModel`` in place, before a renderer
    uploads it. Results are kept by content, since the robot is the same in every scene.
    """
    is_mesh = model.geom_type == _MESH_GEOM
    collides = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    solid = set(model.geom_dataid[is_mesh & collides].tolist())
    drawn = set(model.geom_dataid[is_mesh & ~collides].tolist()) - solid
    visual = np.flatnonzero(is_mesh & ~collides).tolist()
    textured = {int(model.geom_dataid[geom]) for geom in visual if _has_texture(model, geom)}
    for mesh in sorted(drawn):
        if model.mesh_facenum[mesh] >= MIN_FACES:
            _reduce(model, mesh, mesh in textured)
    return int(sum(model.mesh_facenum[mesh] for mesh in drawn))


def _has_texture(model: Any, geom: int) -> bool:
    material = int(model.geom_matid[geom])
    return material >= 0 and bool((np.atleast_1d(model.mat_texid[material]) >= 0).any())


def _reduce(model: Any, mesh: int, textured: bool) -> None:
    first, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
    vertex, num_vertices = int(model.mesh_vertadr[mesh]), int(model.mesh_vertnum[mesh])
    normal, num_normals = int(model.mesh_normaladr[mesh]), int(model.mesh_normalnum[mesh])
    texcoord, num_texcoords = int(model.mesh_texcoordadr[mesh]), int(model.mesh_texcoordnum[mesh])
    faces = model.mesh_face[first : first + count]
    corners = model.mesh_vert[vertex : vertex + num_vertices][faces.ravel()]
    uv = None
    if textured and texcoord >= 0:
        index = model.mesh_facetexcoord[first : first + count].ravel()
        uv = model.mesh_texcoord[texcoord : texcoord + num_texcoords][index]
    key = hashlib.sha256(corners.tobytes() + (b"" if uv is None else uv.tobytes())).digest()
    if key not in _done:
        _done[key] = simplify(corners, uv)
    points, normals, points_uv, triangles = _done[key]
    has_room = len(points) <= num_vertices and len(normals) <= num_normals and len(triangles) < count
    if not has_room or (points_uv is not None and len(points) > num_texcoords):
        return
    stop = first + len(triangles)
    model.mesh_vert[vertex : vertex + len(points)] = points
    model.mesh_normal[normal : normal + len(normals)] = normals
    model.mesh_face[first:stop] = triangles
    model.mesh_facenormal[first:stop] = np.arange(len(normals)).reshape(-1, 3)
    if points_uv is not None:
        model.mesh_texcoord[texcoord : texcoord + len(points)] = points_uv
        model.mesh_facetexcoord[first:stop] = triangles
    elif texcoord >= 0:
        model.mesh_facetexcoord[first:stop] = 0
    model.mesh_facenum[mesh] = len(triangles)


def simplify(corners: NDArray[np.float32], uv: NDArray[np.float32] | None) -> _Reduced:
    """Return vertices, normals of corners, texture coordinates and triangles of a lighter mesh.

    Args:
        corners: ``float32[3F,3]``, three a triangle.
        uv: ``float32[3F,2]``; corners are one vertex where position and texture agree, so that seams stay seams.
    """
    fast_simplification: Any = import_module("fast_simplification")
    keys = corners if uv is None else np.concatenate([corners, uv], axis=1)
    unique, index = np.unique(keys, axis=0, return_inverse=True)
    points = np.ascontiguousarray(unique[:, :3])
    faces = np.ascontiguousarray(index.reshape(-1, 3).astype(np.int32))
    kept = KEPT_FACES if uv is None else KEPT_TEXTURED
    target = 1 - min(max(kept, (1 - REDUCTION) * len(faces)) / len(faces), 1)
    _, _, collapses = fast_simplification.simplify(points, faces, target, return_collapses=True)
    points, faces, origin = fast_simplification.replay_simplification(points, faces, collapses)
    points_uv = None
    if uv is not None:
        points_uv = np.zeros((len(points), 2), np.float32)
        points_uv[origin[::-1]] = unique[::-1, 3:]  # of the first vertex that went into each
    return points.astype(np.float32), corner_normals(points, faces), points_uv, faces.astype(np.int32)


def corner_normals(points: NDArray[np.float32], faces: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return a normal for each corner of each triangle, ``float32[3F,3]``: smooth, but not over creases."""
    a, b, c = (points[faces[:, corner]].astype(np.float64) for corner in range(3))
    weighted = np.cross(b - a, c - a)  # longer for larger triangles
    unit = weighted / np.maximum(np.linalg.norm(weighted, axis=1, keepdims=True), 1e-12)
    _, place = np.unique(points, axis=0, return_inverse=True)  # vertices that a texture seam split are one place
    corners = place.reshape(-1)[faces.ravel()]
    order = np.argsort(corners, kind="stable")
    normals = np.zeros((len(corners), 3))
    borders = np.flatnonzero(np.diff(corners[order])) + 1
    for around in np.split(order, borders):
        triangles = around // 3
        alike = unit[triangles] @ unit[triangles].T > CREASE_COSINE
        normals[around] = alike @ weighted[triangles]
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    return normals.astype(np.float32)
