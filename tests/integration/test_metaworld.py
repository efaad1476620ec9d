"""What is Meta-World's own: cameras with a place."""

from __future__ import annotations

from typing import Any

import numpy as np
from env_cases import CAMERA, CASES, interpreter, started

from embodrl.envs.pool.manager import EnvManager

CASE = CASES["metaworld"]
FREE = CAMERA | {"height": 48, "width": 48, "eye": [1.0, 0.5, 1.0], "target": [0.0, 0.6, 0.1]}
NAMED = FREE | {"name": "corner2", "eye": None, "target": None}


def pictures(*cameras: dict[str, Any]) -> np.ndarray:
    """Return the first picture of each camera, ``uint8[V,H,W,3]``."""
    kwargs = {"tasks": ["reach-v3"], "cameras": list(cameras), "num_envs": 1}
    with started(EnvManager("metaworld", kwargs, name="cameras", python=interpreter(CASE))) as manager:
        return manager.reset(np.array([1]), np.zeros(1, np.int32), copy=True).images[0]


def test_every_camera_with_a_place_has_its_own_field_of_view() -> None:
    own, wide, narrow = (FREE | {"name": f"fov {fov}", "fov_rad": fov} for fov in (None, 1.2, 0.4))
    every = pictures(own, wide, narrow, NAMED)
    np.testing.assert_array_equal(every[[0, 1, 3]], pictures(own, wide, NAMED))
    assert all((every[i] != every[j]).any() for i in range(4) for j in range(i))


def test_the_full_state_tells_object_and_goal_and_pictures_may_be_left_out() -> None:
    kwargs = {"tasks": ["reach-v3"], "cameras": [NAMED], "num_envs": 2, "include_state": True}
    seen = {}
    for full in (False, True):
        asked = kwargs | {"full_state": full, "include_images": not full}
        with started(EnvManager("metaworld", asked, name="state", python=interpreter(CASE))) as manager:
            seen[full] = manager.reset(np.array([1, 2]), np.zeros(2, np.int32), copy=True)
    assert seen[False].state.shape == (2, 4) and seen[True].state.shape == (2, 39)
    np.testing.assert_array_equal(seen[True].state[:, :4], seen[False].state)
    goals = seen[True].state[:, -3:]  # metres; Meta-World's own order
    assert (goals[0] != goals[1]).any() and (np.abs(goals) > 0.05).any(1).all()
    assert seen[False].images.any() and not seen[True].images.any()
