"""Interface of scripted experts and their shared proportional controller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

POSITION_STEP_M = 0.1
"""Position change in metres of an action of 1 in pd_ee_delta_pose."""
ROTATION_STEP_RAD = 0.1
"""Rotation in radians of an action of 1; ManiSkill turns in the opposite direction (it scales by the lower bound)."""
OPEN = 1.0
CLOSED = -1.0


class Expert(ABC):
    """Runs one episode of one task with access to the simulator state."""

    @abstractmethod
    def act(self, env: Any) -> NDArray[np.float32]:
        """Return the next action ``float32[7]`` in [-1, 1] for a single ManiSkill environment."""


SHOULDER_M = (-0.615, 0.0, 0.333)
"""Base of the Panda's arm in the world frame of ManiSkill's table-top tasks."""
WRIST_OFFSET_M = (-0.088, 0.2104)
"""From the tool, pointing down, to the wrist: radial and vertical."""
MAX_REACH_M = 0.71
"""From the shoulder to the wrist; 0.719 with the arm stretched."""


def is_reachable(point_m: NDArray[np.floating]) -> bool:
    """Whether the tool, pointing down, can reach ``point_m[3]``; inverse kinematics fails beyond."""
    radius = np.hypot(point_m[0] - SHOULDER_M[0], point_m[1] - SHOULDER_M[1]) + WRIST_OFFSET_M[0]
    height = point_m[2] + WRIST_OFFSET_M[1] - SHOULDER_M[2]
    return bool(np.hypot(radius, height) < MAX_REACH_M)


def reach(
    tcp_m: NDArray[np.float32], target_m: NDArray[np.floating], gripper: float, gain: float = 2.0
) -> NDArray[np.float32]:
    """Return the action that moves the tool centre point ``tcp_m[3]`` towards ``target_m[3]``.

    A gain above 1 compensates for the lag of the arm, within the arm's limits.
    """
    action = np.zeros(7, np.float32)
    step = np.clip(gain * (target_m - tcp_m) / POSITION_STEP_M, -1, 1)
    while np.abs(step).max() > 0.05 and not is_reachable(tcp_m + step * POSITION_STEP_M):
        # Reduce sideways motion first: the tool may still be lifted or lowered at the limit of its reach.
        step[: 2 if np.abs(step[:2]).max() > 0.05 else 3] *= 0.7
    action[:3] = step
    action[6] = gripper
    return action
