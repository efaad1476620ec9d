"""ManiSkill's PhysX on a GPU: many environments in one scene; skipped without CUDA."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sim,
    pytest.mark.skipif(importlib.util.find_spec("mani_skill") is None, reason="mani_skill is not installed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
CAMERA: dict[str, Any] = {"name": "base_camera", "height": 64, "width": 64, "fov_rad": 1.0, "eye": None, "target": None}


@pytest.fixture(scope="module")
def env() -> Iterator[Any]:
    from embodrl.envs.maniskill.env import ManiSkillVectorEnv

    made = ManiSkillVectorEnv(
        4, ["PickCube-v1"], [CAMERA], max_episode_steps=10, sim_backend="physx_cuda", render_backend="gpu"
    )
    yield made
    made.close()


def start(env: Any, seeds: list[int], rows: list[int] | None = None) -> Any:
    rows = list(range(len(seeds))) if rows is None else rows
    return env.reset(np.array(seeds, np.int64), np.zeros(len(rows), np.int32), np.array(rows, np.int64))


def positions(env: Any) -> tuple[np.ndarray, np.ndarray]:
    stock = env._fleet.any_sim().env
    return stock.cube.pose.p.cpu().numpy(), stock.goal_site.pose.p.cpu().numpy()


def test_a_seed_decides_the_initial_state_whatever_the_row(env: Any) -> None:
    start(env, [1, 2, 1, 3])
    cube, goal = positions(env)
    np.testing.assert_allclose(cube[0], cube[2], atol=1e-5)
    np.testing.assert_allclose(goal[0], goal[2], atol=1e-5)
    assert np.abs(cube[0] - cube[1]).max() > 1e-3
    start(env, [3, 1, 2, 2])
    np.testing.assert_allclose(positions(env)[0], cube[[3, 0, 1, 1]], atol=1e-5)


def test_a_partial_reset_leaves_the_other_rows_alone(env: Any) -> None:
    start(env, [1, 2, 3, 4])
    env.chunk_step(np.full((4, 3, 7), 0.3, np.float32), np.ones(4, np.bool_))
    qpos = env._fleet.any_sim().env.agent.robot.get_qpos().cpu().numpy()
    cube, _ = positions(env)
    start(env, [9], rows=[2])
    others = [0, 1, 3]
    after = env._fleet.any_sim().env.agent.robot.get_qpos().cpu().numpy()
    np.testing.assert_allclose(after[others], qpos[others], atol=1e-6)
    np.testing.assert_allclose(positions(env)[0][others], cube[others], atol=1e-6)
    assert np.abs(after[2] - qpos[2]).max() > 1e-3
    new = positions(env)[0][2]
    start(env, [9, 9, 9, 9])
    np.testing.assert_allclose(positions(env)[0], np.tile(new, (4, 1)), atol=1e-5)


def test_pictures_show_every_row_and_the_goal(env: Any) -> None:
    images = start(env, [1, 2, 1, 3]).images
    assert images.shape == (4, 1, 64, 64, 3)
    assert images.std() > 20
    assert np.abs(images[0].astype(int) - images[2].astype(int)).mean() < 1
    assert (images[0] != images[1]).any()
    green = (images[..., 1].astype(int) - images[..., [0, 2]].max(axis=-1)) > 40
    assert green.any(axis=(1, 2, 3)).any()


def test_state_is_restored_closely(env: Any) -> None:
    start(env, [1, 2, 3, 4])
    active = np.ones(4, np.bool_)
    actions = np.random.default_rng(0).uniform(-0.5, 0.5, (4, 3, 7)).astype(np.float32)
    env.chunk_step(actions, active)
    state = env.get_state()
    expected = env.chunk_step(actions, active)
    env.set_state(state)
    step = env.chunk_step(actions, active)
    np.testing.assert_allclose(step.reward, expected.reward, atol=1e-2)
    np.testing.assert_array_equal(step.episode_length, expected.episode_length)


def test_truncation_and_auto_reset(env: Any) -> None:
    start(env, [1, 2, 3, 4])
    active = np.ones(4, np.bool_)
    env.chunk_step(np.zeros((4, 5, 7), np.float32), active)
    step = env.chunk_step(np.zeros((4, 5, 7), np.float32), active)
    assert step.truncated[:, -1].all()
    assert step.final_mask.all()
    assert (step.observation.images != step.final_observation.images).any()


def test_experts_are_refused(env: Any) -> None:
    from embodrl.errors import EnvError

    with raises_code("physx-cuda", EnvError):
        env.expert_reset([0])


def test_cpu_physics_with_gpu_pictures() -> None:
    from embodrl.envs.maniskill.env import ManiSkillVectorEnv

    made = ManiSkillVectorEnv(1, ["PushCube-v1"], [CAMERA], render_backend="gpu")
    images = start(made, [1]).images
    assert images.std() > 20
    made.close()
