"""Experts for LIBERO's pick-and-place tasks, with access to the simulation state.

An expert depends only on the current state (a phase may advance, never the clock), so that it recovers from
perturbations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.libero.controller import POSITION_STEP_M, ROTATION_STEP_RAD

Floats = NDArray[np.float64]

OPEN = -1.0
CLOSED = 1.0
WIDEST_M = 0.07
"""Maximum width that fits into the open gripper, with some margin."""
CLOSING_STEPS = 9
"""The gripper closes by a quarter of its range per step."""
PALM_M = 0.09
"""From the fingertips up to the hand, which is wider than the fingers."""
# From MuJoCo's mjtGeom.
SPHERE = 2
CAPSULE = 3
CYLINDER = 5
BOX = 6
MESH = 7


class ObjectGeometry:
    """Collision geometry of the object in a MuJoCo model that one of its bodies, by id, belongs to."""

    def __init__(self, model: Any, body: int) -> None:
        owners = model.body_rootid[model.geom_bodyid] == model.body_rootid[body]
        self.geoms = [int(geom) for geom in np.flatnonzero(owners & (model.geom_contype > 0))]
        self._corners = [_corners(model, geom) for geom in self.geoms]

    def points(self, data: Any) -> Floats:
        """Return points on its surface in the world frame, ``[N,3]``, m."""
        return np.concatenate(
            [
                corners @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom]
                for geom, corners in zip(self.geoms, self._corners, strict=True)
            ]
        )


def _corners(model: Any, geom: int) -> Floats:
    """Return points in a geom's own frame whose convex hull contains it, ``[N,3]``."""
    kind = int(model.geom_type[geom])
    size = model.geom_size[geom]
    if kind == MESH:
        mesh = int(model.geom_dataid[geom])
        first = int(model.mesh_vertadr[mesh])
        count = int(model.mesh_vertnum[mesh])
        vertices = np.asarray(model.mesh_vert[first : first + count], np.float64)
        return vertices[:: max(1, count // 200)]
    if kind in (CYLINDER, CAPSULE):
        angle = np.linspace(0, 2 * np.pi, 16, endpoint=False)
        ring = np.stack([size[0] * np.cos(angle), size[0] * np.sin(angle)], 1)
        half = size[1] + (size[0] if kind == CAPSULE else 0.0)
        return np.concatenate([np.column_stack([ring, np.full(16, z)]) for z in (-half, half)])
    half = np.full(3, size[0]) if kind == SPHERE else np.asarray(size)
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
    return signs * half


class Surroundings:
    """Height map of everything but the robot and the geoms ``without``, from boxes around the geoms.

    Made from the MuJoCo model and data at the beginning of an episode.
    """

    def __init__(self, model: Any, data: Any, without: set[int]) -> None:
        low: list[Floats] = []
        high: list[Floats] = []
        for geom in np.flatnonzero(model.geom_contype > 0).tolist():
            if geom in without or int(model.geom_type[geom]) not in (BOX, MESH, CYLINDER, SPHERE, CAPSULE):
                continue
            points = _corners(model, geom) @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom]
            low.append(points.min(axis=0))
            high.append(points.max(axis=0))
        self._low = np.stack(low)
        self._high = np.stack(high)

    def height(self, points: Floats, margin_m: float) -> float:
        """Return the greatest height within a margin of points ``[N,2]``."""
        over = (points[:, None] > self._low[:, :2] - margin_m) & (points[:, None] < self._high[:, :2] + margin_m)
        inside = over.all(axis=2).any(axis=0)
        return float(self._high[inside, 2].max()) if inside.any() else -np.inf


class PickAndPlace:
    """Grasp an object from above, by its narrowest width or its rim, carry it over obstacles, and release it.

    The episode of ``sim`` has just begun; ``target`` and ``place`` name object and region (or object) of the task's
    goal.
    """

    wall_m = 0.004

    def __init__(self, sim: Any, target: str, place: str) -> None:
        scene = sim.scene
        self._env = scene.env
        self._arm = scene.arm
        self._model = scene.model
        data = sim.data._data
        self.name = target
        self.place = place
        self._main = int(self._env.obj_body_id[target])
        self.body = ObjectGeometry(self._model, self._main)
        names = self._env.sim.model
        self._fingers = [names.body_name2id(f"gripper0_{side}finger") for side in ("left", "right")]
        robot = {
            geom
            for geom in range(self._model.ngeom)
            if names.body_id2name(int(self._model.geom_bodyid[geom])).startswith(("robot0", "gripper0", "mount0"))
        }
        self.around = Surroundings(self._model, data, robot | set(self.body.geoms))
        self.closing = 0
        self.held: Floats | None = None
        self.yaw_rad = 0.0
        self.grip = np.zeros(3)
        self._choose_grip(data)

    # -- grasp selection
    # ------------------------------------------------------------------------------------------------

    def _choose_grip(self, data: Any) -> None:
        """Choose the fingertip position relative to the object's origin, and the direction of the fingers."""
        points = self.body.points(data)
        origin = data.xpos[self._main].copy()
        top = points[:, 2].max()
        bottom = points[:, 2].min()
        finger_rad = self._finger_angle(data)
        best = np.inf
        for turn_rad in np.linspace(-np.pi / 2, np.pi / 2, 13)[:-1]:
            angle = finger_rad + turn_rad
            along = np.array([np.cos(angle), np.sin(angle)])
            reach_m = points[:, :2] @ along
            width = float(reach_m.max() - reach_m.min())
            middle = points[:, :2].mean(axis=0)
            middle = middle + ((reach_m.max() + reach_m.min()) / 2 - middle @ along) * along
            if width < WIDEST_M:
                options = [(middle, 0.0)]
            else:  # by the rim, on either side
                radius = width / 2 - self.wall_m
                options = [(middle + radius * along, 0.3), (middle - radius * along, 0.3)]
            depth = min(0.03, 0.6 * (top - bottom))
            for place, cost in options:
                cost += 0.4 * abs(turn_rad) + 5.0 * self._obstruction(place, along, float(top - depth))
                if cost < best:
                    best = cost
                    self.grip = np.array([*place, top - depth]) - origin
                    self.yaw_rad = turn_rad + finger_rad

    def _obstruction(self, place: Floats, along: Floats, tip_m: float) -> float:
        """Return by how much open fingers and hand would collide, in m."""
        tips = np.stack([place + 0.05 * along, place - 0.05 * along])
        hand = np.stack([place + offset * along for offset in np.linspace(-0.1, 0.1, 5)])
        in_fingers = self.around.height(tips, 0.012) - tip_m
        in_hand = self.around.height(hand, 0.03) - (tip_m + PALM_M)
        return max(in_fingers, 0.0) + max(in_hand, 0.0)

    def _finger_angle(self, data: Any) -> float:
        left, right = (data.xpos[finger] for finger in self._fingers)
        return float(np.arctan2(*(left - right)[[1, 0]]))

    # -- control
    # --------------------------------------------------------------------------------------------------------

    def act(self, data: Any) -> NDArray[np.float32]:
        """Return the next action ``float32[7]``."""
        tip = data.site_xpos[self._arm.site].copy()
        origin = data.xpos[self._main]
        if self.held is not None:
            if np.linalg.norm(origin - tip - self.held) < 0.04:
                return self._carry(data, tip, origin)
            self.held = None
            self.closing = 0
            self._choose_grip(data)
        return self._grasp(data, tip, origin + self.grip)

    def _grasp(self, data: Any, tip: Floats, grip: Floats) -> NDArray[np.float32]:
        apart = float(np.linalg.norm(tip[:2] - grip[:2]))
        turn_rad = self._turn(data)
        if self.closing:
            self.closing += 1
            if self.closing > CLOSING_STEPS:
                self.held = data.xpos[self._main] - tip
            return self._move(data, tip, grip, CLOSED)
        if apart < 0.01 and abs(turn_rad) < 0.1:
            if tip[2] - grip[2] < 0.008:
                self.closing = 1
            return self._move(data, tip, grip, OPEN)
        over = max(grip[2] + 0.06, self._clearance(tip, grip, 0.05) + 0.03) if apart > 0.04 else max(tip[2], grip[2])
        return self._move(data, tip, self._by_way_of(tip, grip, over), OPEN)

    def _carry(self, data: Any, tip: Floats, origin: Floats) -> NDArray[np.float32]:
        points = self.body.points(data)
        goal, floor = self._goal(data)
        apart = float(np.linalg.norm(origin[:2] - goal[:2]))
        bottom = float(points[:, 2].min())
        move = np.zeros(3)
        move[:2] = goal[:2] - origin[:2]
        if apart < 0.012 and bottom < floor + 0.012:
            self.closing = 0
            self.held = None
            return self._move(data, tip, tip, OPEN)
        if apart < 0.02:
            move[2] = floor - 0.003 - bottom
        else:
            radius = float(np.linalg.norm(points[:, :2] - origin[:2], axis=1).max())
            need = max(self._clearance(origin, goal, radius + 0.01), floor) + 0.03
            move[2] = need - bottom
            if move[2] > 0.02:
                move[:2] *= 0.0 if move[2] > 0.05 else 0.3
        return self._move(data, tip, tip + move, CLOSED)

    def _goal(self, data: Any) -> tuple[Floats, float]:
        """Return the target of the object's origin, and the height of the surface it will stand on, in m."""
        if self.place in self._env.object_sites_dict:
            site = self._env.sim.model.site_name2id(self.place)
            centre = data.site_xpos[site].copy()
            if "contain" in self.place:
                return centre, self.around.height(centre[None, :2], 0.05)
            return centre, self.around.height(centre[None, :2], 0.01)
        centre = data.xpos[int(self._env.obj_body_id[self.place])].copy()
        return centre, centre[2] + 0.01

    def _clearance(self, start: Floats, end: Floats, margin_m: float) -> float:
        """Return the greatest height between two points."""
        part = np.linspace(0, 1, 8)[:, None]
        return self.around.height(start[:2] + part * (end[:2] - start[:2]), margin_m)

    def _by_way_of(self, tip: Floats, grip: Floats, height: float) -> Floats:
        """Return the next point on the way over a place, going up first if needed."""
        if tip[2] < height - 0.04:
            return np.array([*(tip[:2] + 0.2 * (grip[:2] - tip[:2])), height])
        return np.array([*grip[:2], height])

    def _turn(self, data: Any) -> float:
        """Return the remaining rotation of the fingers about the vertical, in rad."""
        return float((self.yaw_rad - self._finger_angle(data) + np.pi / 2) % np.pi - np.pi / 2)

    def _move(self, data: Any, tip: Floats, target: Floats, gripper: float) -> NDArray[np.float32]:
        """Return the action towards a point with the hand upright and turned as chosen."""
        rotation = data.site_xmat[self._arm.site].reshape(3, 3)
        upright = np.cross(rotation[:, 2], [0.0, 0.0, -1.0])  # the site points out of the hand
        turn = upright + np.array([0.0, 0.0, self._turn(data)])
        action = np.zeros(7, np.float32)
        action[:3] = np.clip(1.4 * (target - tip) / POSITION_STEP_M, -1, 1)
        action[3:6] = np.clip(0.6 * turn / ROTATION_STEP_RAD, -1, 1)
        action[6] = gripper
        return action
