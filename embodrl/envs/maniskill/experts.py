"""Experts for the ManiSkill tasks, in pd_ee_delta_pose: proportional control through a few waypoints.

They depend only on the current state (a phase may advance, never the clock), so that they recover from perturbations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.experts.base import CLOSED, OPEN, ROTATION_STEP_RAD, Expert, reach

if TYPE_CHECKING:
    from torch import Tensor

Vector = NDArray[np.float32]


class Pose(Protocol):
    """Poses of N environments."""

    p: Tensor  # position, [N,3], m

    def to_transformation_matrix(self) -> Tensor:
        """Return ``[N,4,4]``."""
        ...


class Actor(Protocol):
    """A ManiSkill body in N environments."""

    pose: Pose
    angular_velocity: Tensor  # [N,3], rad/s


class ExpertAgent(Protocol):
    """The robot."""

    tcp: Actor

    def is_grasping(self, object: Actor) -> Tensor:
        """Return ``bool[N]``."""
        ...


class ExpertTask(Protocol):
    """A ManiSkill environment as seen by the experts; each task has the attributes its expert needs."""

    agent: ExpertAgent
    obj: Actor
    goal_region: Actor
    goal_site: Actor
    cubeA: Actor
    cubeB: Actor
    cube: Actor
    ball: Actor
    bin: Actor
    l_shape_tool: Actor
    peg: Actor
    peg_head_pose: Pose
    box_hole_pose: Pose


def position(thing: Actor) -> Vector:
    """Return the position ``float32[3]``, m."""
    result: Vector = thing.pose.p[0].cpu().numpy().astype(np.float32)
    return result


def offset(point: Vector, x: float = 0.0, y: float = 0.0, z: float = 0.0) -> Vector:
    """Return a point moved by the given metres."""
    return point + np.array([x, y, z], np.float32)


class SlideCube(Expert):
    """PushCube (``direction`` +1) and PullCube (-1): put the closed gripper behind the cube and push."""

    behind_m = 0.055
    height_m = 0.02
    clear_m = 0.09

    def __init__(self, direction: float) -> None:
        self.direction = direction

    def act(self, env: ExpertTask) -> Vector:
        tcp = position(env.agent.tcp)
        cube = position(env.obj)
        goal = position(env.goal_region)
        start = offset(cube, x=-self.direction * self.behind_m)
        start[2] = self.height_m
        # Distance from the tool to its place behind the cube, along the cube's path.
        ahead = self.direction * (tcp[0] - start[0])
        aligned = abs(tcp[1] - cube[1]) < 0.015
        if ahead > 0.03 and not (aligned and tcp[2] < 0.045 and ahead < self.behind_m):
            over = start.copy()
            over[2] = self.clear_m
            return reach(tcp, over, CLOSED)
        if not aligned or tcp[2] > 0.035:
            return reach(tcp, start, CLOSED)
        return reach(tcp, np.array([goal[0], cube[1], self.height_m], np.float32), CLOSED)


class PickCube(Expert):
    """Grasp a cube, an attribute of the environment, and move it to a target."""

    approach_m = 0.08

    def __init__(self, cube: str = "cube") -> None:
        self.cube = cube
        self.closing = 0

    def act(self, env: ExpertTask) -> Vector:
        tcp = position(env.agent.tcp)
        cube = position(getattr(env, self.cube))
        if bool(env.agent.is_grasping(getattr(env, self.cube))[0]):
            return self.carry(env, tcp, cube)
        return self.grasp(env, tcp, cube)

    def grasp(self, env: ExpertTask, tcp: Vector, cube: Vector) -> Vector:
        """Return the action that approaches and grasps the cube."""
        if np.linalg.norm(tcp[:2] - cube[:2]) > 0.015:
            self.closing = 0
            height = max(cube[2] + self.approach_m, 0.0) if np.linalg.norm(tcp[:2] - cube[:2]) > 0.03 else tcp[2]
            return reach(tcp, np.array([cube[0], cube[1], height], np.float32), OPEN)
        if tcp[2] - cube[2] > 0.01 and self.closing == 0:
            return reach(tcp, cube, OPEN)
        self.closing = (self.closing + 1) % 6
        return reach(tcp, cube, CLOSED)

    def carry(self, env: ExpertTask, tcp: Vector, cube: Vector) -> Vector:
        """Return the action with the cube in hand."""
        return reach(tcp, tcp + position(env.goal_site) - cube, CLOSED)


class StackCube(PickCube):
    """Stack cube A on cube B and release it."""

    aligned_rad = 0.4

    def __init__(self) -> None:
        super().__init__("cubeA")

    def act(self, env: ExpertTask) -> Vector:
        tcp = position(env.agent.tcp)
        top = position(env.cubeA)
        base = position(env.cubeB)
        if np.linalg.norm(top[:2] - base[:2]) < 0.02 and abs(top[2] - base[2] - 0.04) < 0.006:
            return reach(tcp, offset(tcp, z=0.02), OPEN)
        return super().act(env)

    def grasp(self, env: ExpertTask, tcp: Vector, cube: Vector) -> Vector:
        """Turn the gripper if it would hold the cube by its edges, where it slips on the way."""
        turn_rad = self._misalignment(env)
        if abs(turn_rad) > self.aligned_rad and self.closing == 0:
            over = offset(cube, z=self.approach_m)
            action = reach(tcp, over, OPEN)
        else:
            action = super().grasp(env, tcp, cube)
        # A negative turn needs a positive action: ManiSkill scales rotations by the lower bound.
        excess_rad = np.sign(turn_rad) * max(abs(turn_rad) - self.aligned_rad / 2, 0.0)
        action[5] = np.clip(-2 * excess_rad / ROTATION_STEP_RAD, -1, 1)
        return action

    def _misalignment(self, env: ExpertTask) -> float:
        """Return the gripper's rotation about the vertical that aligns it with two faces: at most +-45 degrees."""
        cube = env.cubeA.pose.to_transformation_matrix()[0, :3, 0].cpu().numpy()
        fingers = env.agent.tcp.pose.to_transformation_matrix()[0, :3, 1].cpu().numpy()
        angle = float(np.arctan2(cube[1], cube[0]) - np.arctan2(fingers[1], fingers[0]))
        return (angle + np.pi / 4) % (np.pi / 2) - np.pi / 4

    def carry(self, env: ExpertTask, tcp: Vector, cube: Vector) -> Vector:
        base = position(env.cubeB)
        apart = float(np.linalg.norm(cube[:2] - base[:2]))
        if apart > 0.012:
            height = base[2] + 0.09
            target = np.array([base[0], base[1], height], np.float32)
            if apart > 0.05 and cube[2] < base[2] + 0.06:
                target[:2] = cube[:2]
            return reach(tcp, tcp + target - cube, CLOSED)
        return reach(tcp, tcp + offset(base, z=0.04) - cube, CLOSED)


class LiftPegUpright(Expert):
    """Pinch the peg loosely at its far end, lift so that it turns in the grip, and set it upright.

    The wrist can tilt by only about 55 degrees so low above the table; gravity does the rest.
    """

    grip_m = 0.09
    grip_force = 0.1
    half_length_m = 0.12
    clearance_m = 0.01
    foresight_s = 0.07
    upright_cosine = 0.95

    def __init__(self) -> None:
        self.closing = 0
        self.side = 0.0

    def act(self, env: ExpertTask) -> Vector:
        tcp = position(env.agent.tcp)
        peg = position(env.peg)
        axis = env.peg.pose.to_transformation_matrix()[0, :3, 0].cpu().numpy().astype(np.float32)
        if self.side == 0.0:
            self.side = 1.0 if axis[0] > 0 else -1.0
        axis = axis * self.side
        grip = peg + axis * self.grip_m
        if bool(env.agent.is_grasping(env.peg)[0]):
            spin_rad_s = env.peg.angular_velocity[0].cpu().numpy()
            return self._raise(tcp, peg, axis, axis + self.foresight_s * np.cross(spin_rad_s, axis))
        apart = float(np.linalg.norm(tcp[:2] - grip[:2]))
        if apart > 0.015:
            self.closing = 0
            height = grip[2] + 0.07 if apart > 0.03 else max(tcp[2], grip[2])
            return reach(tcp, np.array([grip[0], grip[1], height], np.float32), OPEN)
        if tcp[2] - grip[2] > 0.01 and self.closing == 0:
            return reach(tcp, grip, OPEN)
        self.closing = (self.closing + 1) % 8
        return reach(tcp, grip, self.grip_force)

    def _raise(self, tcp: Vector, peg: Vector, axis: NDArray[np.floating], lean: NDArray[np.floating]) -> Vector:
        """Return the action with the peg in hand; ``axis`` points to its head, ``lean`` is its predicted direction."""
        above_m = float(tcp[2] - peg[2])
        target = tcp.copy()
        if axis[2] < self.upright_cosine:
            foot = peg - axis * self.half_length_m
            target[:2] += 0.5 * (foot[:2] - tcp[:2]) * max(axis[2], 0.0)
            target[2] = self.half_length_m + self.grip_m + self.clearance_m
            return reach(tcp, target, self.grip_force, gain=1.5)
        # Bring the head over the foot while it comes down.
        target[:2] -= lean[:2] * (self.half_length_m + above_m)
        target[2] = self.half_length_m + above_m - 0.005
        return reach(tcp, target, self.grip_force)


def push_cube() -> Expert:
    """Return an expert for PushCube-v1."""
    return SlideCube(direction=1.0)


def pull_cube() -> Expert:
    """Return an expert for PullCube-v1."""
    return SlideCube(direction=-1.0)


EXPERTS = {
    "PushCube-v1": push_cube,
    "PullCube-v1": pull_cube,
    "PickCube-v1": PickCube,
    "StackCube-v1": StackCube,
    "LiftPegUpright-v1": LiftPegUpright,
}
