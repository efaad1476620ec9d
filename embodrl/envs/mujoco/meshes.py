"""Lighter meshes for MuJoCo's renderer; collisions use the simulated model, which stays as it is."""

from __future__ import annotations

import copy
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.mesh_cache import cached, simplifier
from embodrl.envs.mujoco.types import MjModel

REDUCTION = 0.9
MIN_FACES = 1000  # smaller meshes are left alone
KEPT_FACES = 600  # minimum number of faces kept
KEPT_TEXTURED = 2000  # for textured meshes, whose seams would tear
CREASE_COSINE = 0.7  # faces that differ by more than 45 degrees meet in a visible edge
_MESH_GEOM = 7  # mjGEOM_MESH
_ALGORITHM = f"mujoco 1, {REDUCTION} {KEPT_FACES} {KEPT_TEXTURED} {CREASE_COSINE}"

_Reduced = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]


def lighten_meshes(model: MjModel, hidden_groups: tuple[int, ...] = ()) -> MjModel:
    """Return a copy of an ``MjModel`` with lighter large visible meshes, for an OpenGL context only.

    Meshes of geoms in ``hidden_groups`` are kept. Raises MissingDependencyError without fast_simplification.
    """
    shown = (model.geom_type == _MESH_GEOM) & ~np.isin(model.geom_group, hidden_groups)
    textured = {int(model.geom_dataid[geom]) for geom in np.flatnonzero(shown).tolist() if _has_texture(model, geom)}
    light = copy.copy(model)
    for mesh in sorted(set(model.geom_dataid[shown].tolist())):
        if model.mesh_facenum[mesh] >= MIN_FACES:
            _reduce(light, mesh, mesh in textured)
    return light


def _has_texture(model: MjModel, geom: int) -> bool:
    material = int(model.geom_matid[geom])
    return material >= 0 and bool((np.atleast_1d(model.mat_texid[material]) >= 0).any())


def _reduce(model: MjModel, mesh: int, textured: bool) -> None:
    first = int(model.mesh_faceadr[mesh])
    count = int(model.mesh_facenum[mesh])
    vertex = int(model.mesh_vertadr[mesh])
    num_vertices = int(model.mesh_vertnum[mesh])
    normal = int(model.mesh_normaladr[mesh])
    num_normals = int(model.mesh_normalnum[mesh])
    texcoord = int(model.mesh_texcoordadr[mesh])
    num_texcoords = int(model.mesh_texcoordnum[mesh])
    faces = model.mesh_face[first : first + count]
    corners = model.mesh_vert[vertex : vertex + num_vertices][faces.ravel()]
    uv = np.zeros((0, 2), np.float32)
    if textured and texcoord >= 0:
        index = model.mesh_facetexcoord[first : first + count].ravel()
        uv = model.mesh_texcoord[texcoord : texcoord + num_texcoords][index]
    points, normals, points_uv, triangles = lighter(corners, uv)
    has_room = len(points) <= num_vertices and len(normals) <= num_normals and len(triangles) < count
    if not has_room or len(points_uv) > max(num_texcoords, 0):
        return
    stop = first + len(triangles)
    model.mesh_vert[vertex : vertex + len(points)] = points
    model.mesh_normal[normal : normal + len(normals)] = normals
    model.mesh_face[first:stop] = triangles
    model.mesh_facenormal[first:stop] = np.arange(len(normals)).reshape(-1, 3)
    if len(points_uv):
        model.mesh_texcoord[texcoord : texcoord + len(points)] = points_uv
        model.mesh_facetexcoord[first:stop] = triangles
    elif texcoord >= 0:
        model.mesh_facetexcoord[first:stop] = 0
    model.mesh_facenum[mesh] = len(triangles)


def lighter(corners: NDArray[np.float32], uv: NDArray[np.float32]) -> _Reduced:
    """Return vertices, corner normals, texture coordinates and triangles of a lighter mesh.

    Args:
        corners: ``float32[3F,3]``, three per triangle.
        uv: ``float32[3F,2]``; corners are one vertex where position and texture agree, so that seams are preserved. If
            empty, so are the returned texture coordinates.
    """
    simplify, version = simplifier("embodrl[metaworld]")
    return cached(f"{_ALGORITHM}, {version}", (corners, uv), lambda: _lighter(corners, uv, simplify))


def _lighter(corners: NDArray[np.float32], uv: NDArray[np.float32], fast_simplification: ModuleType) -> _Reduced:
    has_uv = len(uv) > 0
    keys = np.concatenate([corners, uv], axis=1) if has_uv else corners
    unique, index = np.unique(keys, axis=0, return_inverse=True)
    points = np.ascontiguousarray(unique[:, :3])
    faces = np.ascontiguousarray(index.reshape(-1, 3).astype(np.int32))
    kept = KEPT_TEXTURED if has_uv else KEPT_FACES
    target = 1 - min(max(kept, (1 - REDUCTION) * len(faces)) / len(faces), 1)
    _, _, collapses = fast_simplification.simplify(points, faces, target, return_collapses=True)
    points, faces, origin = fast_simplification.replay_simplification(points, faces, collapses)
    points_uv = np.zeros((len(points) if has_uv else 0, 2), np.float32)
    if has_uv:
        points_uv[origin[::-1]] = unique[::-1, 3:]  # of the first vertex merged into each
    return points.astype(np.float32), corner_normals(points, faces), points_uv, faces.astype(np.int32)


def corner_normals(points: NDArray[np.float32], faces: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return a normal for each corner of each triangle, ``float32[3F,3]``: smooth, but not across creases."""
    a, b, c = (points[faces[:, corner]].astype(np.float64) for corner in range(3))
    weighted = np.cross(b - a, c - a)  # longer for larger triangles
    unit = weighted / np.maximum(np.linalg.norm(weighted, axis=1, keepdims=True), 1e-12)
    _, place = np.unique(points, axis=0, return_inverse=True)  # vertices split by a texture seam share a position
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
