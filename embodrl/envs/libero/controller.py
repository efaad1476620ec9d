"""robosuite's operational space controller for the Panda as configured by LIBERO, reduced to what a step needs.

Khatib, "A unified approach for motion and force control of robot manipulators" (1987), with the gains of robosuite's
``osc_pose.json``. robosuite recomputes the whole forward dynamics up to three times per physics step; the controller's
inputs (poses, Jacobian, inertia, bias forces) follow from positions and velocities alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.mujoco.types import MjData, MjModel

Floats = NDArray[np.float64]

# Of a full action, per control step.
POSITION_STEP_M = 0.05
ROTATION_STEP_RAD = 0.5
STIFFNESS = 150.0
GRIPPER_SPEED = 0.01  # of its range, per physics step


@dataclass
class Kinematics:
    """State of the arm: end effector in the world frame (m, rad), joints, Jacobian and inertia."""

    position: Floats
    rotation: Floats
    velocity: Floats
    angular_velocity: Floats
    joint_position: Floats
    joint_velocity: Floats
    jacobian: Floats
    inertia: Floats


class ArmModel:
    """Indices and measurements of arm and gripper in the MuJoCo model of a robosuite Panda with OSC_POSE."""

    def __init__(self, env: Any) -> None:
        robot = env.robots[0]
        self.mujoco = import_module("mujoco")
        self.control = import_module("robosuite.utils.control_utils")
        self.transform = import_module("robosuite.utils.transform_utils")
        self.model: MjModel = env.sim.model._model
        names = env.sim.model
        self.site = names.site_name2id(robot.controller.eef_name)
        self.hand = names.body_name2id(robot.robot_model.eef_name)
        self.qpos = np.asarray(robot.controller.qpos_index)
        self.dofs = np.asarray(robot.controller.qvel_index)
        self.actuators = np.asarray(robot._ref_joint_actuator_indexes)
        self.torque_low, self.torque_high = (np.array(limit) for limit in robot.torque_limits)
        self.gripper_qpos = np.asarray(robot._ref_gripper_joint_pos_indexes)
        self.gripper_actuators = np.array([names.actuator_name2id(name) for name in robot.gripper.actuators])
        limits = self.model.actuator_ctrlrange[self.gripper_actuators]
        self.gripper_centre = limits.mean(axis=1)
        self.gripper_half = (limits[:, 1] - limits[:, 0]) / 2
        self._jacobian = np.zeros((6, self.model.nv))
        self._inertia = np.zeros((self.model.nv, self.model.nv))

    def measure(self, data: MjData) -> Kinematics:
        """Return the kinematics of ``data``, whose positions and velocities must be propagated."""
        self.mujoco.mj_jacSite(self.model, data, self._jacobian[:3], self._jacobian[3:], self.site)
        self.mujoco.mj_fullM(self.model, self._inertia, data.qM)
        jacobian = self._jacobian.take(self.dofs, axis=1)
        joint_velocity = data.qvel[self.dofs]
        velocity = jacobian @ joint_velocity
        return Kinematics(
            position=data.site_xpos[self.site].copy(),
            rotation=data.site_xmat[self.site].reshape(3, 3).copy(),
            velocity=velocity[:3],
            angular_velocity=velocity[3:],
            joint_position=data.qpos[self.qpos],
            joint_velocity=joint_velocity,
            jacobian=jacobian,
            inertia=np.ascontiguousarray(self._inertia[np.ix_(self.dofs, self.dofs)]),
        )


class OscController:
    """Goals and gripper command of one environment; ``rest`` is the kinematics of the default posture."""

    def __init__(self, arm: ArmModel, rest: Kinematics) -> None:
        self._arm = arm
        self._rest = rest
        self.reset()

    def reset(self) -> None:
        """Begin an episode with the goal at the default posture and the gripper half open."""
        self.goal_position = self._rest.position.copy()
        self.goal_rotation = self._rest.rotation.copy()
        self.gripper = np.zeros(2)
        # robosuite's first command of an episode still sees the posture before the initial state was set.
        self.stale = True

    def set_goal(self, action: Floats, data: MjData) -> Kinematics:
        """Set the goal from ``float64[7]`` in [-1, 1]: translation, rotation vector, gripper (-1 opens, 1 closes).

        Returns the kinematics that the goal is relative to.
        """
        now = self._rest if self.stale else self._arm.measure(data)
        delta = np.clip(action[:6], -1, 1)
        rotation = delta[3:] * ROTATION_STEP_RAD
        if rotation.any():  # otherwise keep the last goal
            transform = self._arm.transform
            turn = transform.quat2mat(transform.axisangle2quat(rotation))
            self.goal_rotation = turn @ now.rotation
        self.goal_position = now.position + delta[:3] * POSITION_STEP_M
        return now

    def apply(self, now: Kinematics, gripper: float, data: MjData) -> None:
        """Write the controls of one physics step to ``data``."""
        arm = self._arm
        control = self._arm.control
        damping = 2 * math.sqrt(STIFFNESS)
        force = STIFFNESS * (self.goal_position - now.position) - damping * now.velocity
        error = control.orientation_error(self.goal_rotation, now.rotation)
        torque = STIFFNESS * error - damping * now.angular_velocity
        jacobian = now.jacobian
        _, by_position, by_rotation, nullspace = control.opspace_matrices(
            now.inertia, jacobian, jacobian[:3], jacobian[3:]
        )
        wrench = np.concatenate([by_position @ force, by_rotation @ torque])
        torques = jacobian.T @ wrench + data.qfrc_bias[arm.dofs]
        torques += control.nullspace_torques(
            now.inertia, nullspace, self._rest.joint_position, now.joint_position, now.joint_velocity
        )
        data.ctrl[arm.actuators] = np.clip(torques, arm.torque_low, arm.torque_high)
        self.gripper = np.clip(self.gripper + np.array([-1.0, 1.0]) * GRIPPER_SPEED * np.sign(gripper), -1, 1)
        data.ctrl[arm.gripper_actuators] = arm.gripper_centre + arm.gripper_half * self.gripper
        self.stale = False

    def get_state(self) -> dict[str, object]:
        return {
            "goal_position": self.goal_position,
            "goal_rotation": self.goal_rotation,
            "gripper": self.gripper,
            "stale": self.stale,
        }

    def set_state(self, state: Mapping[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
