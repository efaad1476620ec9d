"""ManiSkill's ``pd_ee_delta_pose`` for one scene on a CPU, without torch.

ManiSkill computes a control step's drive targets with some sixty batched torch operations on single rows, several times
the cost of PhysX's step itself. This is the same arithmetic on plain numbers, with the same inverse kinematics; scenes
on a GPU keep ManiSkill's own.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.maniskill.types import BaseEnv, Controller, GripperController
from embodrl.errors import EnvError

FRAME = "root_translation:root_aligned_body_rotation"
MAX_IK_ITERATIONS = 100
"""Solver settings of ManiSkill."""

Quaternion = tuple[float, float, float, float]


def quaternion_from_euler(x: float, y: float, z: float) -> Quaternion:
    """Return the quaternion (w, x, y, z) of the rotation matrix R_x(x) R_y(y) R_z(z); angles in radians."""
    cx = math.cos(x / 2)
    sx = math.sin(x / 2)
    cy = math.cos(y / 2)
    sy = math.sin(y / 2)
    cz = math.cos(z / 2)
    sz = math.sin(z / 2)
    return (
        cx * cy * cz - sx * sy * sz,
        sx * cy * cz + cx * sy * sz,
        cx * sy * cz - sx * cy * sz,
        cx * cy * sz + sx * sy * cz,
    )


def quaternion_multiply(a: Quaternion, b: Quaternion) -> Quaternion:
    """Return the Hamilton product of two quaternions (w, x, y, z)."""
    aw, ax, ay, az = a
    bw, bx, by, bz = b
    return (
        aw * bw - ax * bx - ay * by - az * bz,
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
    )


class EndEffectorController:
    """Sets the drive targets of a Panda's arm and gripper from an action ``[x, y, z, rx, ry, rz, gripper]``.

    The target pose is the tool's current pose in the robot's base frame, moved by the position part and turned about
    the axes of that frame by the rotation part; damped inverse kinematics (CLIK) converts it to joint angles. If it
    does not converge, the arm stays where it is. Raises EnvError if the controllers of ``env``, one CPU scene in
    control mode ``pd_ee_delta_pose``, differ from the ones reproduced here.
    """

    def __init__(self, env: BaseEnv) -> None:
        self._env = env
        controllers = env.agent.controller.controllers
        arm = controllers["arm"]
        gripper = controllers["gripper"]
        _check(arm, gripper)
        kinematics = arm.kinematics
        self._robot = arm.articulation._objs[0]
        self._root = arm.root_link._objs[0]
        self._tool = kinematics.end_link._objs[0]
        self._model = kinematics.pmodel
        self._tool_index = kinematics.end_link_idx
        self._model_joints = kinematics.pmodel_active_joint_indices.numpy()
        self._arm_of_model = kinematics.pmodel_controlled_joint_indices.numpy()
        self._movable = kinematics.qmask.numpy().astype(np.int32)
        self._arm_joints = [joint._objs[0] for joint in arm.joints]
        self._arm_indices = arm.active_joint_indices.numpy()
        self._gripper_joints = [joint._objs[0] for joint in gripper.joints]
        self._position_scale, self._position_middle = _scale(arm, 0)
        self._rotation_scale = float(arm.config.rot_lower)
        self._gripper_scale, self._gripper_middle = _scale(gripper, 0)

    def step(self, action: NDArray[np.float32]) -> None:
        """Execute ``action float32[7]`` in [-1, 1] (clipped) for one control step; EnvError if it contains NaN."""
        env = self._env
        self.set_action(action)
        env._before_control_step()
        for _ in range(env._sim_steps_per_control):
            env._before_simulation_step()
            env.scene.px.step()
            env._after_simulation_step()
        env._after_control_step()

    def set_action(self, action: NDArray[np.float32]) -> None:
        """Set the drive targets; see ``step``."""
        values = [float(value) for value in action]
        if any(math.isnan(value) for value in values):
            raise EnvError(
                f"an action contains NaN: {values}",
                "look for NaN in the policy's outputs or its weights",
                code="actions-not-finite",
            )
        targets = self._arm_targets(values)
        for joint, target in zip(self._arm_joints, targets, strict=True):
            joint.set_drive_target(target)
        target = self._gripper_middle + self._gripper_scale * min(max(values[6], -1.0), 1.0)
        for joint in self._gripper_joints:
            joint.set_drive_target(target)

    def _arm_targets(self, values: list[float]) -> NDArray[np.float32]:
        import sapien

        tool = self._root.entity_pose.inv() * self._tool.entity_pose
        scale = self._position_scale
        middle = self._position_middle
        position = [at + middle + scale * min(max(value, -1.0), 1.0) for at, value in zip(tool.p, values, strict=False)]
        # Limit the rotation by its length to keep its axis.
        length = math.sqrt(values[3] ** 2 + values[4] ** 2 + values[5] ** 2)
        shrink = self._rotation_scale / max(length, 1.0)
        turn = quaternion_from_euler(values[3] * shrink, values[4] * shrink, values[5] * shrink)
        w, x, y, z = (float(value) for value in tool.q)
        rotation = quaternion_multiply(turn, (w, x, y, z))
        qpos = self._robot.qpos
        result, success, _ = self._model.compute_inverse_kinematics(
            self._tool_index,
            sapien.Pose(position, rotation),
            initial_qpos=qpos[self._model_joints],
            active_qmask=self._movable,
            max_iterations=MAX_IK_ITERATIONS,
        )
        return result[self._arm_of_model] if success else qpos[self._arm_indices]


def _check(arm: Controller, gripper: GripperController) -> None:
    from mani_skill.agents.controllers import PDEEPoseController, PDJointPosMimicController

    config = arm.config
    same = (
        type(arm) is PDEEPoseController
        and type(gripper) is PDJointPosMimicController
        and config.frame == FRAME
        and config.use_delta
        and config.normalize_action
        and not (config.use_target or config.interpolate)
        and gripper.config.normalize_action
        and not (gripper.config.use_delta or gripper.config.interpolate)
        and len(gripper.control_joint_indices) == 1
        and bool((gripper._multiplier == 1).all() and (gripper._offset == 0).all())
    )
    if not same:
        raise EnvError(
            "the robot's controllers are not the Panda's pd_ee_delta_pose as of mani_skill 3.0.1",
            "install mani_skill==3.0.1",
            code="maniskill-version",
        )


def _scale(controller: Controller, dimension: int) -> tuple[float, float]:
    """Return half the width and the middle of an action dimension's range."""
    low = float(controller.action_space_low[dimension])
    high = float(controller.action_space_high[dimension])
    return (high - low) / 2, (high + low) / 2
