"""The gripper, as last action dimension: its meaning differs between datasets and simulators."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Convention = Literal["as_is", "libero", "bridge"]


def to_environment(actions: NDArray[np.float64], convention: Convention) -> NDArray[np.float64]:
    """Return actions ``[...,A]`` with the simulator's gripper values.

    Args:
        actions: model actions; with ``libero`` and ``bridge`` the gripper is 0 (closed) to 1 (open).
        convention: ``libero`` gives ``-sign(2 g - 1)``, -1 open and +1 closed; ``bridge`` gives +1 open (above one
            half) and -1 closed; ``as_is`` changes nothing.
    """
    if convention == "as_is":
        return actions
    gripper = actions[..., -1]
    changed = -np.sign(2.0 * gripper - 1.0) if convention == "libero" else np.where(gripper > 0.5, 1.0, -1.0)
    return np.concatenate([actions[..., :-1], changed[..., None]], axis=-1)


def to_model(actions: NDArray[np.float64], convention: Convention) -> NDArray[np.float64]:
    """Return simulator actions ``[...,A]`` with the gripper mapped back to 0 (closed) to 1 (open), for imitation."""
    if convention == "as_is":
        return actions
    sign = -1.0 if convention == "libero" else 1.0
    gripper = np.clip((sign * actions[..., -1] + 1.0) / 2.0, 0.0, 1.0)
    return np.concatenate([actions[..., :-1], gripper[..., None]], axis=-1)
