"""What LIBERO's experts make of the geometry of a scene."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from embodrl.envs.libero.experts import BOX, CYLINDER, Body, Surroundings

MODEL = SimpleNamespace(
    ngeom=3,
    geom_type=np.array([BOX, CYLINDER, BOX]),
    geom_size=np.array([[0.1, 0.2, 0.3], [0.04, 0.05, 0.0], [9.0, 9.0, 9.0]]),
    geom_contype=np.array([1, 1, 0]),  # the last is for the eye only
    geom_bodyid=np.array([1, 2, 2]),
    body_rootid=np.array([0, 1, 2]),
)
TURN = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
DATA = SimpleNamespace(
    geom_xmat=np.stack([TURN.reshape(9), np.eye(3).reshape(9), np.eye(3).reshape(9)]),
    geom_xpos=np.array([[1.0, 0.0, 0.3], [0.0, 0.0, 0.05], [0.0, 0.0, 0.0]]),
)


def test_a_body_has_the_extent_of_its_collision_geometry() -> None:
    points = Body(MODEL, 2).points(DATA)
    assert points.min(axis=0) == pytest.approx([-0.04, -0.04, 0.0])
    assert points.max(axis=0) == pytest.approx([0.04, 0.04, 0.1])


def test_what_stands_in_the_way_is_known_by_its_height() -> None:
    around = Surroundings(MODEL, DATA, {1})
    assert around.height(np.array([[1.19, 0.09]]), 0.0) == pytest.approx(0.6)  # turned: 0.2 along x, 0.1 along y
    assert around.height(np.array([[1.0, 0.15]]), 0.0) == -np.inf
    assert around.height(np.array([[1.0, 0.15]]), 0.06) == pytest.approx(0.6)
