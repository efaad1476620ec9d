"""ALOHA's joints and grippers in the units of openpi's models (its adapt_to_pi).

As src/openpi/policies/aloha_policy.py of openpi has it, for two arms of six joints and a gripper each. ALOHA measures
a gripper by its linear opening, and commands it by its joint's angle, so that states and actions differ.
Shapes: B batch, N actions, S state dimensions, A action dimensions; the first 14 are the arms', others stay.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_DIMS = 14
"""Numbers of the two arms in states and actions."""
_GRIPPERS = [6, 13]
_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2, np.float64)
_OPENING = 0.01844, 0.05800  # metres, closed and open
_ARM, _HORN = 0.036, 0.022  # metres, of the gripper's crank
_READ = 0.5476, 1.6296  # radians at 0 and 1 of a state: encoder counts 2405 and 3110 of 4096, around 2048
_COMMANDED = -0.6213, 1.4910  # radians at 0 and 1 of an action
_OFFSET = 0.5476  # radians


def state_to_pi(state: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return a state ``[B,S]`` with joints in openpi's directions, and grippers from openings to angles."""
    result = _turned(state)
    low, high = _OPENING
    opening = result[..., _GRIPPERS] * (high - low) + low
    sine = (_HORN**2 + opening**2 - _ARM**2) / (2 * _HORN * opening)
    low, high = _READ
    result[..., _GRIPPERS] = (np.arcsin(sine.clip(-1, 1)) - low) / (high - low)
    return result


def actions_to_pi(actions: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return absolute actions ``[B,N,A]`` of ALOHA in openpi's units."""
    result = _turned(actions)
    low, high = _COMMANDED
    result[..., _GRIPPERS] = result[..., _GRIPPERS] * (high - low) + low - _OFFSET
    return result


def actions_from_pi(actions: NDArray[np.floating]) -> NDArray[np.float64]:
    """Invert ``actions_to_pi``."""
    result = _turned(actions)
    low, high = _COMMANDED
    result[..., _GRIPPERS] = (result[..., _GRIPPERS] + _OFFSET - low) / (high - low)
    return result


def _turned(numbers: NDArray[np.floating]) -> NDArray[np.float64]:
    result = np.array(numbers, np.float64)
    result[..., :NUM_DIMS] *= _SIGNS
    return result
