"""Privileged task state for baselines: pose and size of the object, and its goal."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.libero.experts import ObjectGeometry

Floats = NDArray[np.float64]

DIM = 26
"""See ``FullState.read``; the same for every task."""


class FullState:
    """Reads the object and the goal of a task of ``scene``; of several goals, the first unreached one.

    A goal on one thing only, such as an open drawer or a burning stove, has it as object and as goal. The scene's
    environment must be the active one in each call.
    """

    def __init__(self, scene: Any) -> None:
        self._env = scene.env
        self._arm = scene.arm
        self._model = scene.model
        names = scene.env.sim.model
        self._fingers = [names.get_joint_qvel_addr(name) for name in scene.env.robots[0].gripper.joints]
        self._goals = [tuple(goal) for goal in scene.env.parsed_problem["goal_state"]]
        self._bodies = {
            goal[1]: ObjectGeometry(self._model, int(scene.env.obj_body_id[goal[1]]))
            for goal in self._goals
            if goal[1] not in scene.env.object_sites_dict
        }
        self._jacobian = np.zeros((3, self._model.nv))

    def read(self, data: Any) -> NDArray[np.float32]:
        """Return ``float32[DIM]``.

        Velocity of the fingertips (3, m/s) and of both fingers (2, m/s); from the fingertips to the object's origin (3,
        m), to the lower and the upper corner of the axis-aligned box around it (6, m) and to the goal (3, m); from the
        object's origin to the goal (3, m); the object's rotation as the first two columns of its matrix (6).
        """
        _, target, *places = self._goal()
        tip = data.site_xpos[self._arm.site]
        origin, rotation = self._pose(data, target)
        goal = self._pose(data, places[0])[0] if places else origin
        box = origin if target not in self._bodies else self._bodies[target].points(data)
        box = np.atleast_2d(box)
        parts = (
            self._velocity(data),
            origin - tip,
            box.min(axis=0) - tip,
            box.max(axis=0) - tip,
            goal - tip,
            goal - origin,
            rotation[:, :2].T.ravel(),
        )
        return np.concatenate(parts).astype(np.float32)

    def _goal(self) -> tuple[str, ...]:
        if len(self._goals) == 1:
            return self._goals[0]
        open_goals = (goal for goal in self._goals if not self._env._eval_predicate(goal))
        return next(open_goals, self._goals[-1])

    def _pose(self, data: Any, name: str) -> tuple[Floats, Floats]:
        """Return the origin (m) and the rotation matrix of an object or a region."""
        if name in self._env.object_sites_dict:
            site = self._env.sim.model.site_name2id(name)
            return data.site_xpos[site].copy(), data.site_xmat[site].reshape(3, 3)
        body = int(self._env.obj_body_id[name])
        return data.xpos[body].copy(), data.xmat[body].reshape(3, 3)

    def _velocity(self, data: Any) -> Floats:
        self._arm.mujoco.mj_jacSite(self._model, data, self._jacobian, None, self._arm.site)
        return np.concatenate([self._jacobian @ data.qvel, data.qvel[self._fingers]])
