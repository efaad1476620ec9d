"""Experts for the ManiSkill tasks with a peg, a tool or a bin, in the style of ``experts``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.experts.base import CLOSED, OPEN, POSITION_STEP_M, ROTATION_STEP_RAD, Expert, reach
from embodrl.envs.maniskill.experts import Actor, ExpertTask, PickCube, Pose, Vector, offset, position

Matrix = NDArray[np.float64]


def _matrix(pose: Pose) -> Matrix:
    return pose.to_transformation_matrix()[0].cpu().numpy().astype(np.float64)


def _turned(action: Vector, rotation_rad: NDArray[np.floating], gain: float = 1.0) -> Vector:
    """Add a rotation vector ``[3]`` with opposite sign: ManiSkill scales rotations by the lower bound."""
    action[3:6] = np.clip(-gain * rotation_rad / ROTATION_STEP_RAD, -1, 1)
    return action


class HoldBar(Expert):
    """Grasp a bar from above at a point along its axis, fingers across it; subclasses define the rest.

    ``bar`` is an attribute of the environment, whose x axis is the bar's; it is held ``along_m`` from its origin.
    """

    approach_m = 0.07

    def __init__(self, bar: str, along_m: float) -> None:
        self.bar = bar
        self.along_m = along_m
        self.closing = 0

    def act(self, env: ExpertTask) -> Vector:
        bar: Actor = getattr(env, self.bar)
        tcp = position(env.agent.tcp)
        pose = _matrix(bar.pose)
        if bool(env.agent.is_grasping(bar)[0]):
            return self.use(env, tcp, pose)
        grip = (pose[:3, 3] + self.along_m * pose[:3, 0]).astype(np.float32)
        fingers = _matrix(env.agent.tcp.pose)[:3, 1]
        apart = float(np.linalg.norm(tcp[:2] - grip[:2]))
        turn_rad = _across(fingers, pose[:3, 0])
        if apart > 0.012 or abs(turn_rad) > 0.1:
            self.closing = 0
            height = grip[2] + self.approach_m if apart > 0.03 or abs(turn_rad) > 0.1 else max(tcp[2], grip[2])
            action = reach(tcp, np.array([grip[0], grip[1], height], np.float32), OPEN)
        elif tcp[2] - grip[2] > 0.01 and self.closing == 0:
            action = reach(tcp, grip, OPEN)
        else:
            self.closing = (self.closing + 1) % 8
            action = reach(tcp, grip, CLOSED)
        return _turned(action, np.array([0.0, 0.0, turn_rad]), gain=1.5)

    def use(self, env: ExpertTask, tcp: Vector, pose: Matrix) -> Vector:
        """Return the action with the bar, whose pose is ``float64[4,4]``, in hand."""
        raise NotImplementedError


def _across(fingers: NDArray[np.floating], axis: NDArray[np.floating]) -> float:
    """Return the turn about the vertical, in rad, that puts the fingers across an axis: at most +-90 degrees."""
    angle = np.arctan2(axis[1], axis[0]) + np.pi / 2 - np.arctan2(fingers[1], fingers[0])
    return float((angle + np.pi / 2) % np.pi - np.pi / 2)


class InsertPeg(HoldBar):
    """Hold the peg by its tail, align its head with the hole, and push it in."""

    before_m = 0.05
    sideways_m = 0.002
    aligned_rad = 0.02

    def __init__(self) -> None:
        super().__init__("peg", -0.06)
        self.inserting = False

    def use(self, env: ExpertTask, tcp: Vector, pose: Matrix) -> Vector:
        hole = _matrix(env.box_hole_pose)
        head = _matrix(env.peg_head_pose)
        half_length_m = float(np.linalg.norm(head[:3, 3] - pose[:3, 3]))
        seen = hole[:3, :3].T @ (head[:3, 3] - hole[:3, 3])  # relative to the hole: along it, sideways, up
        turn_rad = np.cross(head[:3, 0], hole[:3, 0])
        entrance = -half_length_m  # the box is as deep as the peg is long
        # Once under way, tolerances are wider.
        slack = 3.0 if self.inserting else 1.0
        self.inserting = bool(
            np.abs(seen[1:]).max() < slack * self.sideways_m and np.linalg.norm(turn_rad) < slack * self.aligned_rad
        )
        wanted = np.array([entrance - self.before_m, 0.0, 0.0])
        if self.inserting:
            wanted[0] = min(seen[0] + 0.03, 0.01)
        elif seen[0] > entrance - 0.01:  # next to the hole: move back first
            wanted[1:] = seen[1:]
        elif seen[2] < -0.03:  # still lying: lift first
            wanted[:2] = np.minimum(seen[0], wanted[0]), seen[1]
        move = hole[:3, :3] @ (wanted - seen)
        far = max(np.abs(seen[1:]).max() / 0.02, 1.0)  # near the hole, push harder against friction
        return _turned(reach(tcp, tcp + move.astype(np.float32), CLOSED, gain=1.0 + 1.5 / far), turn_rad)


class PokeCube(HoldBar):
    """Hold the peg by its tail and push the cube with its head."""

    def __init__(self) -> None:
        super().__init__("peg", -0.085)

    def use(self, env: ExpertTask, tcp: Vector, pose: Matrix) -> Vector:
        cube = position(env.cube)
        goal = position(env.goal_region)
        head = pose[:3, 3] + 0.12 * pose[:3, 0]
        turn_rad = np.array([0.0, 0.0, -np.arctan2(pose[1, 0], pose[0, 0])])
        target = np.array([head[0], cube[1], 0.03])
        behind = cube[0] - head[0]
        if abs(head[1] - cube[1]) > 0.008 and behind > 0.01:
            target[0] = min(head[0], cube[0] - 0.05)
        elif np.linalg.norm(cube[:2] - goal[:2]) < 0.035:
            target = head  # the robot must be still
        else:
            target[0] = head[0] + max(goal[0] - 0.02 - cube[0], 0.02) + max(behind - 0.03, 0.0)
        return _turned(reach(tcp, tcp + (target - head).astype(np.float32), CLOSED, gain=1.0), turn_rad)


class PullWithTool(HoldBar):
    """Put the hook of an L-shaped tool behind the cube and pull."""

    hook_m = 0.15
    """From the tool's origin to the inner face of the hook."""
    beside_m = 0.065
    above_m = 0.16

    def __init__(self) -> None:
        super().__init__("l_shape_tool", 0.03)
        self.hooked = False

    def use(self, env: ExpertTask, tcp: Vector, pose: Matrix) -> Vector:
        cube = position(env.cube)
        tool = pose[:3, 3]
        turn_rad = np.cross(pose[:3, 0], [1.0, 0.0, 0.0])  # the far end sags
        place = np.array([cube[0] - self.hook_m + 0.04, cube[1] - self.beside_m, 0.027])
        apart = float(np.linalg.norm(tool[:2] - place[:2]))
        slipped = cube[0] > tool[0] + self.hook_m or abs(cube[1] - self.beside_m - tool[1]) > 0.05
        self.hooked = (self.hooked and not slipped) or (apart < 0.02 and tool[2] < 0.034)
        if self.hooked:
            target = np.array([tool[0] - 0.06, tool[1], 0.027])
        elif apart < 0.015:
            target = place
        else:
            target = np.array([*(tool[:2] if tool[2] < 0.12 else place[:2]), self.above_m])
        return _turned(reach(tcp, tcp + (target - tool).astype(np.float32), CLOSED, gain=1.5), turn_rad)


class PlaceSphere(PickCube):
    """Drop a ball into a bin from just above it."""

    centred_m = 0.004

    def __init__(self) -> None:
        super().__init__("obj")

    def act(self, env: ExpertTask) -> Vector:
        tcp = position(env.agent.tcp)
        ball = position(env.obj)
        bin_ = position(env.bin)
        apart = float(np.linalg.norm(ball[:2] - bin_[:2]))
        if apart < 0.01 and ball[2] < bin_[2] + (0.044 if apart < self.centred_m else 0.03):
            return reach(tcp, offset(tcp, z=0.01), OPEN)  # it drops into the bin
        return super().act(env)

    def carry(self, env: ExpertTask, tcp: Vector, cube: Vector) -> Vector:
        bin_ = position(env.bin)
        apart = float(np.linalg.norm(cube[:2] - bin_[:2]))
        target = offset(bin_, z=0.04 if apart < 2 * self.centred_m else 0.07)
        if apart > 0.04 and cube[2] < bin_[2] + 0.05:
            target[:2] = cube[:2]
        return reach(tcp, tcp + target - cube, CLOSED, gain=1.2)


class RollBall(Expert):
    """Get behind the ball, as seen from the goal, and push it; the robot's base looks along -y."""

    behind_m = 0.1
    height_m = 0.035
    speed = 0.8

    def __init__(self) -> None:
        self.line: tuple[NDArray[np.floating], NDArray[np.floating]] | None = None

    def act(self, env: ExpertTask) -> Vector:
        tcp, ball, goal = (position(thing) for thing in (env.agent.tcp, env.ball, env.goal_region))
        if self.line is not None:
            return self._strike(tcp, *self.line)
        way = (goal - ball)[:2] / np.linalg.norm((goal - ball)[:2])
        start = np.array([*(ball[:2] - self.behind_m * way), self.height_m], np.float32)
        apart = float(np.linalg.norm(tcp[:2] - start[:2]))
        above = float(tcp[2] - self.height_m)
        fingers = _matrix(env.agent.tcp.pose)[:3, 1]
        turn_rad = np.array(
            [0.0, 0.0, _across(fingers, np.array([*way, 0.0]))]
        )  # the ball slips off a finger's flat side
        if apart < 0.004 and above < 0.01 and abs(turn_rad[2]) < 0.03:
            self.line = ball[:2].copy(), way
            return self._strike(tcp, *self.line)
        if apart > 0.03:
            start[2] = 0.13
        action = self._in_base(np.clip(2.5 * (start - tcp) / POSITION_STEP_M, -1, 1))
        return _turned(action, turn_rad)

    def _strike(self, tcp: Vector, ball: NDArray[np.floating], way: NDArray[np.floating]) -> Vector:
        """Return the action along the line through the ball's initial position, up to that position."""
        side = np.array([-way[1], way[0]])
        short = tcp[:2] - ball
        speed = self.speed if short @ way < 0.0 else 0.0
        push = speed * way - 10.0 * (short @ side) * side
        return self._in_base(np.array([*push, (self.height_m - tcp[2]) / POSITION_STEP_M]))

    def _in_base(self, move: NDArray[np.floating]) -> Vector:
        """Convert a world-frame move ``[3]`` to the base frame: the base's x axis is -y, its y axis is x."""
        return np.array([-move[1], move[0], move[2], 0, 0, 0, CLOSED], np.float32)


EXPERTS: dict[str, Callable[[], Expert]] = {
    "PegInsertionSide-v1": InsertPeg,
    "PokeCube-v1": PokeCube,
    "PullCubeTool-v1": PullWithTool,
    "RollBall-v1": RollBall,
    "PlaceSphere-v1": PlaceSphere,
}
