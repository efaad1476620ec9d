"""Parts of the ManiSkill environment that need no simulator: meshes, rotations, reach, journals, videos."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodrl.config import load_config
from embodrl.envs.experts.base import CLOSED, MAX_REACH_M, is_reachable, reach
from embodrl.envs.maniskill.controller import quaternion_from_euler, quaternion_multiply
from embodrl.envs.maniskill.fleet import ActionJournal
from embodrl.envs.maniskill.grasp import angle_between
from embodrl.envs.maniskill.rendering import reduction_of
from embodrl.envs.maniskill.tasks import TASKS
from embodrl.envs.pool.video import VideoWriter
from embodrl.workers.env import env_kwargs


def grid(n: int) -> tuple[np.ndarray, np.ndarray]:
    """A flat square of 1 x 1 m in the plane z = 0 with 2 n^2 triangles that face up, no vertex shared."""
    quads = [(x, y) for x in range(n) for y in range(n)]
    corners = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y), (x + 1, y + 1), (x, y + 1)] for x, y in quads]
    flat = np.array(corners, np.float32).reshape(-1, 2) / n
    vertices = np.concatenate([flat, np.zeros((len(flat), 1), np.float32)], axis=1)
    return vertices, np.arange(len(vertices), dtype=np.uint32).reshape(-1, 3)


@pytest.mark.parametrize(
    ("overrides", "on_a_cpu", "on_a_gpu"),
    [
        ([], 0.95, 0.0),
        (["env.render_detail=full"], 0.0, 0.0),
        (["env.render_detail=fast"], 0.95, 0.95),
        (["env.mesh_decimation=0.5"], 0.5, 0.5),
        (["env.render_detail=fast", "env.mesh_decimation=0"], 0.0, 0.0),
    ],
)
def test_detail_decides_on_meshes_unless_a_part_is_named(
    overrides: list[str], on_a_cpu: float, on_a_gpu: float
) -> None:
    loaded = load_config(["env=maniskill", *overrides])
    kwargs = env_kwargs(loaded.config)
    found = [reduction_of(kwargs["render_detail"], kwargs["mesh_decimation"], device) for device in ("pci:0", "cuda")]
    assert found == [on_a_cpu, on_a_gpu]
    both = len(overrides) == 2
    assert ["env.render_detail"] * both == [n.key for n in loaded.notes if n.key == "env.render_detail"]


def test_a_scene_with_an_environment_map_keeps_the_reflection_table_of_sapien() -> None:
    pytest.importorskip("sapien")
    from embodrl.envs.maniskill.rendering import omit_reflection_table

    given: list[str] = []
    camera = SimpleNamespace(set_texture=lambda name, texture: given.append(name))
    sensor: Any = SimpleNamespace(camera=SimpleNamespace(_render_cameras=[camera]))
    for cubemap in (object(), None):
        omit_reflection_table(SimpleNamespace(cubemap=cubemap), [sensor])  # type: ignore[arg-type]
    assert given == ["BRDFLUT"]


def test_decimation_keeps_the_shape_of_a_mesh_with_split_vertices() -> None:
    pytest.importorskip("fast_simplification")
    from embodrl.envs.maniskill.rendering import decimate

    vertices, triangles = grid(20)
    points, faces, normals = decimate(vertices, triangles, 0.9)
    assert 2 <= len(faces) <= 0.15 * len(triangles)
    np.testing.assert_allclose(points.min(axis=0), [0, 0, 0], atol=0.03)
    np.testing.assert_allclose(points.max(axis=0), [1, 1, 0], atol=0.03)
    a, b, c = (points[faces[:, corner].astype(int)] for corner in range(3))
    assert np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2 == pytest.approx(
        1.0, abs=0.1
    )  # no holes; the rim gives a little
    np.testing.assert_allclose(normals, np.tile([0, 0, 1], (len(points), 1)), atol=1e-5)
    assert (points.dtype, faces.dtype, normals.dtype) == (np.float32, np.uint32, np.float32)


def test_small_meshes_are_left_alone_but_for_shared_vertices() -> None:
    pytest.importorskip("fast_simplification")
    from embodrl.envs.maniskill.rendering import decimate

    vertices, triangles = grid(2)
    points, faces, _ = decimate(vertices, triangles, 0.9)
    assert len(faces) == 8
    assert len(points) == 9


@pytest.mark.parametrize("angles", [(0.1, 0, 0), (0, -0.2, 0), (0, 0, 0.3), (0.4, -0.5, 0.6), (3.0, 1.2, -2.0)])
def test_quaternion_of_euler_angles_is_the_matrix_product(angles: tuple[float, float, float]) -> None:
    x, y, z = angles
    about_x = np.array([[1, 0, 0], [0, np.cos(x), -np.sin(x)], [0, np.sin(x), np.cos(x)]])
    about_y = np.array([[np.cos(y), 0, np.sin(y)], [0, 1, 0], [-np.sin(y), 0, np.cos(y)]])
    about_z = np.array([[np.cos(z), -np.sin(z), 0], [np.sin(z), np.cos(z), 0], [0, 0, 1]])
    quaternion = quaternion_from_euler(x, y, z)
    w, *rest = quaternion
    conjugate = (w, *(-value for value in rest))
    vector = np.array([0.3, -0.7, 0.2])
    rotated = quaternion_multiply(quaternion_multiply(quaternion, (0.0, *vector)), conjugate)  # q v q*
    np.testing.assert_allclose(rotated[1:], about_x @ about_y @ about_z @ vector, atol=1e-12)
    assert rotated[0] == pytest.approx(0, abs=1e-12)


def test_angles_between_vectors() -> None:
    x, y = np.array([2.0, 0, 0], np.float32), np.array([0, 3.0, 0], np.float32)
    assert angle_between(x, y) == pytest.approx(90)
    assert angle_between(x, x + y / 1.5) == pytest.approx(45)
    assert angle_between(x, -x) == pytest.approx(180)


def test_experts_ask_in_proportion_and_never_beyond_the_arm() -> None:
    tcp, target = np.array([0.0, 0.0, 0.2], np.float32), np.array([0.02, -0.01, 0.1], np.float32)
    np.testing.assert_allclose(reach(tcp, target, CLOSED), [0.4, -0.2, -1, 0, 0, 0, -1], atol=1e-6)
    edge = np.array([0.17, 0.0, 0.1], np.float32)
    assert is_reachable(edge)
    far = np.array([0.5, 0.0, 0.1], np.float32)
    assert not is_reachable(far)
    action = reach(edge, far, CLOSED)
    assert 0 <= action[0] < 1
    assert is_reachable(edge + 0.1 * action[:3])
    assert MAX_REACH_M < 0.7194  # of the stretched arm


def test_journals_are_cut_at_events() -> None:
    journal = ActionJournal()
    journal.reset(5)
    for value in (1.0, 2.0):
        journal.step(np.full(7, value, np.float32))
    journal.reset(6)
    journal.step(np.full(7, 3.0, np.float32))
    journal.truncate(3)
    arrays = journal.to_arrays()
    assert arrays["kinds"].tolist() == [0, 1, 1]
    assert arrays["seeds"].tolist() == [5]
    assert arrays["actions"][:, 0].tolist() == [1.0, 2.0]
    journal.truncate(0)
    assert journal.to_arrays()["actions"].shape == (0, 0)


class FakeSim:
    """Records what is replayed."""

    task = TASKS["PushCube-v1"]

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def reset(self, seeds: np.ndarray, rows: np.ndarray) -> None:
        self.calls.append(("reset", float(seeds[0])))

    def advance(self, actions: np.ndarray) -> None:
        assert actions.shape == (1, 7)
        self.calls.append(("step", float(actions[0, 0])))


def test_a_journal_is_replayed_in_order() -> None:
    journal = ActionJournal()
    journal.reset(5)
    journal.step(np.full(7, 0.5, np.float32))
    journal.reset(6)
    journal.step(np.full(7, 0.25, np.float32))
    sim: Any = FakeSim()
    copy = ActionJournal.replay(journal.to_arrays(), sim)
    assert sim.calls == [("reset", 5.0), ("step", 0.5), ("reset", 6.0), ("step", 0.25)]
    for name, value in journal.to_arrays().items():
        np.testing.assert_array_equal(copy.to_arrays()[name], value)


def test_videos_are_named_after_the_outcome_and_only_whole_ones_stay(tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio.v2")
    writer = VideoWriter(fps=10)
    for row, name in enumerate(("good", "bad", "unfinished")):
        writer.start(row, str(tmp_path / name))
    for value in (0, 100, 200):
        for row in writer.rows(np.array([True, True, True])):
            writer.add(row, np.full((32, 48, 3), value, np.uint8))
    assert writer.rows(np.array([False, True, False])) == [1]
    writer.finish(0, success=True)
    writer.finish(1, success=False)
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad_failure.mp4", "good_success.mp4"]
    frames = imageio.mimread(tmp_path / "good_success.mp4")
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * 3
    np.testing.assert_allclose([np.asarray(frame).mean() for frame in frames], [0, 100, 200], atol=6)
