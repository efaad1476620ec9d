"""The interface of scripted experts and the proportional controller that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

POSITION_STEP_M = 0.1
"""Position change that an action of 1 asks for in pd_ee_delta_pose."""
ROTATION_STEP_RAD = 0.1
"""Rotation that an action of 1 asks for; ManiSkill turns the other way round (it scales by the lower bound)."""
OPEN, CLOSED = 1.0, -1.0


class Expert(ABC):
    """Plays one episode of one task; sees the simulator's state."""

    @abstractmethod
    def act(self, env: Any) -> NDArray[np.float32]:
        """Return the next action ``float32[7]`` in [-1, 1] for a single ManiSkill environment."""


def reach(
    tcp_m: NDArray[np.float32], target_m: NDArray[np.float32], gripper: float, gain: float = 2.0
) -> NDArray[np.float32]:
    """Return the action that moves the tool centre point ``tcp_m[3]`` towards ``target_m[3]``."""
    action = np.zeros(7, np.float32)
    action[:3] = np.clip(gain * (target_m - tcp_m) / POSITION_STEP_M, -1, 1)
    action[6] = gripper
    return action
