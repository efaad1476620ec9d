"""What LIBERO's experts make of the geometry of a scene."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from embodrl.envs.libero.experts import BOX, CYLINDER, ObjectGeometry, Surroundings
from embodrl.envs.libero.full_state import DIM, FullState

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
    points = ObjectGeometry(MODEL, 2).points(DATA)
    assert points.min(axis=0) == pytest.approx([-0.04, -0.04, 0.0])
    assert points.max(axis=0) == pytest.approx([0.04, 0.04, 0.1])


def test_what_stands_in_the_way_is_known_by_its_height() -> None:
    around = Surroundings(MODEL, DATA, {1})
    assert around.height(np.array([[1.19, 0.09]]), 0.0) == pytest.approx(0.6)  # turned: 0.2 along x, 0.1 along y
    assert around.height(np.array([[1.0, 0.15]]), 0.0) == -np.inf
    assert around.height(np.array([[1.0, 0.15]]), 0.06) == pytest.approx(0.6)


class FakeScene:
    """A block of 0.2 x 0.4 x 0.6 m that goes to a region, seen by fingertips above it."""

    def __init__(self, goals: list[list[str]], reached: tuple[str, ...] = ()) -> None:
        names = SimpleNamespace(get_joint_qvel_addr={"left": 0, "right": 1}.get, site_name2id={"there": 1}.get)
        self.env = SimpleNamespace(
            sim=SimpleNamespace(model=SimpleNamespace(**vars(MODEL), **vars(names), nv=2)),
            robots=[SimpleNamespace(gripper=SimpleNamespace(joints=["left", "right"]))],
            parsed_problem={"goal_state": goals},
            obj_body_id={"block": 1, "can": 2},
            object_sites_dict={"there": None},
            _eval_predicate=lambda goal: goal[1] in reached,
        )
        self.model = SimpleNamespace(**vars(MODEL), nv=2)

        def mj_jac_site(model: object, data: object, jacobian: np.ndarray, _: None, site: int) -> None:
            jacobian[:] = [[1, 0], [0, 1], [1, 1]]

        self.arm = SimpleNamespace(mujoco=SimpleNamespace(mj_jacSite=mj_jac_site), site=0)
        sites = {
            "site_xpos": np.array([[1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]),
            "site_xmat": np.tile(np.eye(3).ravel(), (2, 1)),
        }
        bodies = {
            "xpos": np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.3], [0.0, 0.0, 0.05]]),
            "xmat": np.stack([np.eye(3).ravel(), TURN.ravel(), np.eye(3).ravel()]),
        }
        self.data = SimpleNamespace(**vars(DATA), **sites, **bodies, qvel=np.array([0.1, 0.2]))


def test_the_full_state_tells_object_and_goal() -> None:
    scene = FakeScene([["on", "block", "there"]])
    expected = [
        *(0.1, 0.2, 0.3, 0.1, 0.2),  # velocities of the fingertips and the fingers
        *(0.0, 0.0, -0.7),  # to the block's origin
        *(-0.2, -0.1, -1.0, 0.2, 0.1, -0.4),  # to the corners of its box: it is turned by a quarter
        *(1.0, 1.0, -1.0),  # to the region
        *(1.0, 1.0, -0.3),  # from the block to the region
        *(0.0, 1.0, 0.0, -1.0, 0.0, 0.0),  # columns of its rotation
    ]
    found = FullState(scene).read(scene.data)
    assert found.dtype == np.float32
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(found) == DIM


def test_of_several_goals_the_first_that_is_open_counts_and_a_region_is_its_own_goal() -> None:
    goals = [["on", "block", "can"], ["turnon", "there"]]
    first = FullState(FakeScene(goals))
    second = FullState(scene := FakeScene(goals, reached=("block",)))
    assert first.read(scene.data)[17:20] == pytest.approx([-1.0, 0.0, -0.25])  # from the block to the can
    found = second.read(scene.data)
    assert found[5:8] == pytest.approx([1.0, 1.0, -1.0])
    assert found[17:20] == pytest.approx([0.0, 0.0, 0.0])
