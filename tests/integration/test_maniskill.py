"""ManiSkill as a VectorEnv: pictures, seeds, chunks, rewards, exact state, cameras, videos. One process for all."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expect import raises_code

from embodrl.envs.maniskill.tasks import TASKS

# As in a simulator process; read when SAPIEN is loaded.
os.environ.setdefault("LP_NUM_THREADS", "1")
os.environ.setdefault("SAPIEN_DISABLE_RAY_TRACING", "1")
# It is looked for and not imported, which every worker of the tests would do to collect them.
installed = importlib.util.find_spec("mani_skill") is not None
pytestmark = [pytest.mark.sim, pytest.mark.skipif(not installed, reason="mani_skill is not installed")]

ALL_TASKS = ["PushCube-v1", "PullCube-v1", "PickCube-v1", "StackCube-v1", "LiftPegUpright-v1"]
CAMERA: dict[str, Any] = {"name": "base_camera", "height": 48, "width": 64, "fov_rad": 1.0, "eye": None, "target": None}


def make(num_envs: int, tasks: list[str], **kwargs: Any) -> Any:
    import torch

    from embodrl.envs.maniskill.env import ManiSkillVectorEnv
    from embodrl.errors import MissingDependencyError

    torch.set_num_threads(1)
    arguments = {"cameras": [CAMERA], "render_backend": "cpu", "max_episode_steps": 12, **kwargs}
    try:
        return ManiSkillVectorEnv(num_envs, tasks, **arguments)
    except MissingDependencyError as error:
        pytest.skip(str(error))


def seeds_of(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def start(env: Any, seeds: np.ndarray, task: int = 0) -> Any:
    rows = np.arange(len(seeds))
    return env.reset(seeds, np.full(len(seeds), task, np.int32), rows)


def noise(seed: int, chunk: int, num_envs: int = 2, scale: float = 0.5) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-scale, scale, (num_envs, chunk, 7)).astype(np.float32)


def same(a: Any, b: Any) -> None:
    """Assert that two EnvSteps are bit-identical."""
    for name in ("reward", "valid", "terminated", "truncated", "success", "episode_return", "episode_seed"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    np.testing.assert_array_equal(a.observation.images, b.observation.images)


@pytest.fixture(scope="module")
def env() -> Iterator[Any]:
    """Two PushCube environments; each test resets them and leaves auto-reset on."""
    made = make(2, ["PushCube-v1"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def mixed() -> Iterator[Any]:
    """Five environments for all five tasks, two cameras, proprioception, long episodes, no auto-reset."""
    side = {**CAMERA, "name": "side_camera", "eye": [0.1, 0.6, 0.3], "target": [0.0, 0.0, 0.1]}
    made = make(5, ALL_TASKS, cameras=[CAMERA, side], include_state=True, auto_reset=False, max_episode_steps=80)
    yield made
    made.close()


# -- seeds and pictures -----------------------------------------------------------------------------------------------


def test_a_partial_reset_leaves_the_other_environment_alone(env: Any) -> None:
    before = start(env, seeds_of(1, 2)).images
    after = env.reset(seeds_of(5), np.zeros(1, np.int32), np.array([1])).images
    np.testing.assert_array_equal(after[0], before[0])
    assert (after[1] != before[1]).any()


def test_light_meshes_hardly_change_the_picture_and_leave_collisions_alone() -> None:
    light, stock = make(1, ["PushCube-v1"]), make(1, ["PushCube-v1"], render_detail="full")
    try:
        ours, theirs = (start(e, seeds_of(3)).images.astype(np.int64) for e in (light, stock))
        difference = np.abs(ours - theirs)
        assert difference.mean() < 2.0  # of 255
        assert difference.max() > 0  # the meshes did change
        shapes = [collision_triangles(e) for e in (light, stock)]
        assert shapes[0] == shapes[1]
        assert sum(shapes[0]) > 100
        triangles = [visual_triangles(e) for e in (light, stock)]
        assert triangles[0] < 0.1 * triangles[1]
        step = [e.chunk_step(noise(0, 8, num_envs=1), np.ones(1, np.bool_)).reward for e in (light, stock)]
        np.testing.assert_array_equal(step[0], step[1])
    finally:
        light.close()
        stock.close()


@pytest.mark.parametrize(("task", "link"), [("PickCube-v1", "panda_hand"), ("PegInsertionSide-v1", "camera_link")])
def test_the_hand_camera_is_carried_by_the_wrist(task: str, link: str) -> None:
    with closing(make(1, [task], cameras=[CAMERA, {**CAMERA, "name": "hand_camera", "fov_rad": None}])) as made:
        seen, hands, cameras = [start(made, seeds_of(1)).images[0, 1]], [], []
        stock = made._fleet.any_sim().env
        for height in (1.0, 0.0):
            stock.scene.update_render(update_sensors=True, update_human_render_cameras=False)
            extrinsic = stock._sensors["hand_camera"].camera.get_extrinsic_matrix()[0].numpy()
            hands.append(stock.agent.robot.links_map[link].pose.p[0].numpy())
            cameras.append(-extrinsic[:3, :3].T @ extrinsic[:3, 3])
            up = np.array([[[0, 0, height, 0, 0, 0, 1]]], np.float32).repeat(4, 1)
            seen.append(made.chunk_step(up, np.ones(1, np.bool_)).observation.images[0, 1])
    assert np.linalg.norm(hands[1] - hands[0]) > 0.05  # metres
    np.testing.assert_allclose(cameras[1] - cameras[0], hands[1] - hands[0], atol=0.02)  # the wrist hardly turns
    assert (seen[0] != seen[1]).mean() > 0.1


def test_the_reflection_table_changes_no_picture(env: Any) -> None:
    import sapien

    other = make(1, ["PushCube-v1"])
    table = sapien.render.RenderTexture(np.full((1, 1, 2), 7.5, np.float32), dim=2, format="R32G32Sfloat")
    try:
        for sensor in other._fleet.any_sim().env._sensors.values():
            sensor.camera._render_cameras[0].set_texture("BRDFLUT", table)
        np.testing.assert_array_equal(start(other, seeds_of(3)).images[0], start(env, seeds_of(3, 4)).images[0])
    finally:
        other.close()


@pytest.mark.long
def test_pictures_are_those_with_the_reflection_table_of_sapien(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from embodrl.envs.maniskill import sim

    monkeypatch.setattr(sim, "omit_reflection_table", lambda *_: None)
    stock = make(1, ["PushCube-v1"])
    try:
        np.testing.assert_array_equal(start(stock, seeds_of(3)).images[0], start(env, seeds_of(3, 4)).images[0])
    finally:
        stock.close()


def robot_entities(env: Any) -> list[Any]:
    return [link._objs[0].entity for link in env._fleet.any_sim().env.agent.robot.links]


def collision_triangles(env: Any) -> list[int]:
    import sapien

    kind = sapien.physx.PhysxCollisionShapeConvexMesh
    links = [
        entity.find_component_by_type(sapien.physx.PhysxArticulationLinkComponent) for entity in robot_entities(env)
    ]
    return [len(shape.triangles) for link in links for shape in link.collision_shapes if isinstance(shape, kind)]


def visual_triangles(env: Any) -> int:
    import sapien

    bodies = [entity.find_component_by_type(sapien.render.RenderBodyComponent) for entity in robot_entities(env)]
    shapes = [shape for body in bodies if body is not None for shape in body.render_shapes]
    return sum(len(part.triangles) for shape in shapes for part in shape.parts)


# -- chunks, episodes, rewards ----------------------------------------------------------------------------------------


def play_expert(env: Any, seeds: np.ndarray, task: int, limit: int, noise_std: float = 0.0) -> tuple[Any, np.ndarray]:
    """Let the experts play single actions; return the last step of each row and its rewards ``[steps, B]``."""
    start(env, seeds, task)
    env.expert_reset(list(range(len(seeds))))
    rng = np.random.default_rng(0)
    active, success, rewards = np.ones(len(seeds), np.bool_), np.zeros(len(seeds), np.bool_), []
    for _ in range(limit):
        actions = env.expert_actions()
        disturbance = rng.normal(0, noise_std, actions.shape).astype(np.float32)
        disturbance[:, 6] = 0
        step = env.chunk_step(np.clip(actions + disturbance, -1, 1)[:, None], active)
        rewards.append(step.reward[:, 0])
        success |= step.success & active
        active &= ~step.done
        if not active.any():
            break
    return success, np.array(rewards)


def test_success_terminates_once_and_masks_the_rest_of_the_chunk(env: Any) -> None:
    start(env, seeds_of(1, 2))
    env.expert_reset([0, 1])
    env.set_auto_reset(False)
    try:
        active = np.array([True, False])
        for _ in range(12):
            actions = np.repeat(env.expert_actions()[:, None], 2, axis=1)
            step = env.chunk_step(actions, active)
            assert not step.valid[1].any()
            assert not step.reward[1].any()
            if step.done[0]:
                break
        assert step.success[0]
        assert step.terminated[0].sum() == 1
        assert not step.truncated.any()
        column = int(step.terminated[0].argmax())
        np.testing.assert_array_equal(step.valid[0], np.arange(2) <= column)
        assert step.final_observation is None
        # Without auto-reset the picture stays at the end of the episode.
        assert (step.observation.images[0] == env._images[0]).all()
    finally:
        env.set_auto_reset(True)


@pytest.mark.parametrize("mode", ["sparse", "dense_delta"])
def test_rewards_of_an_episode_sum_to_progress_plus_bonus(env: Any, mode: str) -> None:
    rules = env.rules
    env.rules = replace(rules, reward_mode=mode, auto_reset=False)
    try:
        start(env, seeds_of(3, 4))
        potential = env._potential.copy()
        success, rewards = play_expert(env, seeds_of(3, 4), 0, 12)
    finally:
        env.rules = rules
    assert success.all()
    # ManiSkill's normalised dense reward is 1 at success; the bonus is 1.
    expected = 1 + (1 - potential) if mode == "dense_delta" else np.ones(2)
    np.testing.assert_allclose(rewards.sum(axis=0), expected, atol=1e-5)
    if mode == "sparse":
        assert set(rewards.ravel().tolist()) == {0.0, 1.0}


# -- exact state ------------------------------------------------------------------------------------------------------


def test_rebuild_forgets_history(env: Any) -> None:
    active = np.ones(2, np.bool_)

    def episode() -> Any:
        env.rebuild()
        start(env, seeds_of(8, 9))
        return env.chunk_step(noise(0, 8, scale=1.0), active)

    first = episode()
    for chunk in range(3):
        env.chunk_step(noise(chunk + 5, 8, scale=1.0), active)
    same(episode(), first)
    assert len(env._fleet.get_state()["scenes"][0]["journal"]["kinds"]) == 9  # a reset and eight steps


def test_rewind_drops_what_came_after_the_mark(env: Any) -> None:
    env.rebuild()
    start(env, seeds_of(1, 2))
    env.chunk_step(noise(0, 4), np.ones(2, np.bool_))
    env.mark()
    before = env._fleet.get_state()["scenes"]
    start(env, seeds_of(5, 6))
    env.chunk_step(noise(1, 4), np.ones(2, np.bool_))
    env.rewind()
    after = env._fleet.get_state()["scenes"]
    for old, new in zip(before, after, strict=True):
        for name in ("kinds", "seeds", "actions"):
            np.testing.assert_array_equal(old["journal"][name], new["journal"][name])
    start(env, seeds_of(1, 2))


# -- tasks, cameras, state --------------------------------------------------------------------------------------------


def test_tasks_mix_in_one_process_with_their_instructions(mixed: Any) -> None:
    task_ids = np.array([4, 3, 2, 1, 0], np.int32)
    observation = mixed.reset(seeds_of(1, 2, 3, 4, 5), task_ids, np.arange(5))
    from embodrl.envs.maniskill.tasks import TASKS

    assert observation.instruction == [TASKS[ALL_TASKS[i]].instruction for i in task_ids]
    np.testing.assert_array_equal(observation.task_id, task_ids)
    assert len({image.tobytes() for image in observation.images}) == 5
    step = mixed.chunk_step(noise(0, 3, num_envs=5), np.ones(5, np.bool_))
    assert step.valid.all()
    assert mixed.spec.tasks == tuple(ALL_TASKS)


def test_cameras_are_where_the_configuration_puts_them(mixed: Any) -> None:
    observation = start(mixed, seeds_of(1, 2, 3, 4, 5))
    assert observation.images.shape == (5, 2, 48, 64, 3)
    assert [camera.name for camera in mixed.spec.cameras] == ["base_camera", "side_camera"]
    sensors = mixed._fleet.any_sim().env._sensors
    matrix = sensors["side_camera"].camera.get_model_matrix()[0].numpy()
    np.testing.assert_allclose(matrix[:3, 3], [0.1, 0.6, 0.3], atol=1e-5)
    forward = -matrix[:3, 2]  # cameras look along -z in OpenGL's convention
    towards = np.array([0.0, 0.0, 0.1]) - np.array([0.1, 0.6, 0.3])
    np.testing.assert_allclose(forward, towards / np.linalg.norm(towards), atol=1e-5)
    intrinsic = sensors["base_camera"].camera.get_intrinsic_matrix()[0].numpy()
    assert intrinsic[1, 1] == pytest.approx(24 / np.tan(0.5), rel=1e-4)  # vertical field of view of 1 rad
    assert np.abs(observation.images[:, 0].astype(int) - observation.images[:, 1].astype(int)).mean() > 5


def test_proprioception_is_joint_positions_and_velocities(mixed: Any) -> None:
    observation = start(mixed, seeds_of(1, 2, 3, 4, 5))
    robot = mixed._fleet._sim(0).env.agent.robot
    assert observation.state.shape == (5, 18)
    np.testing.assert_array_equal(observation.state[0, :9], robot.get_qpos()[0].numpy())
    np.testing.assert_array_equal(observation.state[:, 9:], 0)  # at rest
    step = mixed.chunk_step(noise(0, 3, num_envs=5), np.ones(5, np.bool_))
    assert np.abs(step.observation.state[:, 9:]).max() > 0.01


def test_the_goal_of_pick_cube_is_drawn(mixed: Any) -> None:
    task = ALL_TASKS.index("PickCube-v1")
    shown = start(mixed, seeds_of(1, 2, 3, 4, 5), task).images[0, 0].astype(int)
    sim = mixed._fleet._sim(0)
    sim.env.goal_site.hide_visual()
    hidden = sim.images()[0, 0].astype(int)
    sim.env.goal_site.show_visual()
    pixels = np.abs(shown - hidden).sum(axis=-1) > 30
    assert pixels.sum() > 3
    assert (shown[pixels][:, 1] > shown[pixels][:, 0]).mean() > 0.8  # it is green


# -- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ALL_TASKS)
@pytest.mark.long
def test_experts_succeed_under_perturbation(mixed: Any, task: str) -> None:
    success, _ = play_expert(mixed, np.arange(200, 205), ALL_TASKS.index(task), 80, noise_std=0.12)
    assert success.sum() >= 4


def test_an_unknown_expert_is_refused_by_name() -> None:
    from embodrl.envs.experts import make_expert
    from embodrl.errors import EnvError

    with raises_code("expert-missing", EnvError, "'Juggle-v1'") as error:
        make_expert("Juggle-v1")
    assert "PickCube-v1" in error.value.hint


# -- control ----------------------------------------------------------------------------------------------------------


def test_drive_targets_and_trajectories_are_those_of_stock_control(mixed: Any) -> None:
    import torch

    for task in ("PushCube-v1", "StackCube-v1"):
        start(mixed, np.full(5, 11), ALL_TASKS.index(task))
        fast, stock = mixed._fleet._sim(0), mixed._fleet._sim(1)
        joints = [joint._objs[0] for joint in stock.env.agent.robot.active_joints]
        actions = np.random.default_rng(0).uniform(-1.2, 1.2, (50, 7)).astype(np.float32)
        for action in actions:
            stock._controller.set_action(action)
            ours = np.array([joint.drive_target[0] for joint in joints])
            stock.env.agent.set_action(torch.from_numpy(action[None]))
            theirs = np.array([joint.drive_target[0] for joint in joints])
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
            for _ in range(stock.env._sim_steps_per_control):
                stock.env.scene.step()
            fast.advance(action[None])
        ours, theirs = (sim.env.agent.robot.get_qpos().numpy() for sim in (fast, stock))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        start(mixed, np.full(5, 11), ALL_TASKS.index(task))  # the journal knows nothing of this test's steps


def test_the_quick_grasp_check_agrees_with_stock(mixed: Any) -> None:
    start(mixed, np.arange(5), ALL_TASKS.index("PickCube-v1"))
    mixed.expert_reset([0])
    env = mixed._fleet._sim(0).env
    answers = []
    for _ in range(25):
        mixed.chunk_step(mixed.expert_actions()[:, None], np.array([True, False, False, False, False]))
        stock = type(env.agent).is_grasping(env.agent, env.cube)
        answers.append(bool(env.agent.is_grasping(env.cube)[0]))
        assert answers[-1] == bool(stock[0])
    assert True in answers
    assert False in answers


@pytest.mark.parametrize(
    "task", [t if t in ("PushCube-v1", "StackCube-v1") else pytest.param(t, marks=pytest.mark.long) for t in TASKS]
)
def test_scenes_evaluated_as_one_batch_give_what_each_gives_alone(task: str) -> None:
    from embodrl.envs.maniskill.sim import evaluate, observe

    with closing(make(3, [task], max_episode_steps=200, include_state=True, full_state=True)) as env:
        start(env, seeds_of(1, 2, 3))
        sims, rng = [env._fleet._sim(row) for row in range(3)], np.random.default_rng(0)
        if task in ALL_TASKS:
            env.expert_reset([0, 1, 2])
        for step in range(40 if task in ALL_TASKS else 10):
            actions = rng.uniform(-1, 1, (3, 7)).astype(np.float32)
            actions[1:] = env.expert_actions()[1:] if task in ALL_TASKS else actions[1:]
            for sim, action in zip(sims, actions, strict=True):
                sim.advance(action[None])
            if step % 5 == 4:
                alone = [evaluate([sim], action[None]) for sim, action in zip(sims, actions, strict=True)]
                for found, expected in zip(evaluate(sims, actions), zip(*alone, strict=True), strict=True):
                    np.testing.assert_array_equal(found, np.concatenate(expected))
                states = np.concatenate([observe([sim]) for sim in sims])
                np.testing.assert_array_equal(observe(sims), states)
                assert len(np.unique(states, axis=0)) == 3


def test_a_scene_without_a_true_state_is_the_only_one_with_no_reward(env: Any) -> None:
    import sapien

    from embodrl.envs.maniskill.sim import evaluate

    start(env, seeds_of(1, 2))
    sims = [env._fleet._sim(row) for row in range(2)]
    before = evaluate(sims)[0]
    sims[1].env.goal_region.set_pose(sapien.Pose([float("nan"), 0, 0]))
    found = evaluate(sims)[0]
    assert found[0] == before[0] and np.isnan(found[1]) and not np.isnan(before[1])


def test_a_reward_that_depends_on_earlier_ones_keeps_its_state() -> None:
    import sapien

    from embodrl.envs.maniskill.sim import evaluate

    with closing(make(2, ["RollBall-v1"])) as env:
        start(env, seeds_of(1, 2))
        sims = [env._fleet._sim(row) for row in range(2)]
        assert not any(sim.env.reached_status.any() for sim in sims)
        for sim in sims:  # the ball to where the tool stands behind it, seen from the goal
            tool, goal = (body.pose.p[0].numpy() for body in (sim.env.agent.tcp, sim.env.goal_region))
            towards = (goal - tool) / np.linalg.norm(goal - tool)
            sim.env.ball.set_pose(sapien.Pose(tool + towards * (sim.env.ball_radius + 0.05)))
        evaluate(sims)
        assert all(sim.env.reached_status.all() for sim in sims)


def test_an_action_that_is_not_a_number_is_refused(env: Any) -> None:
    from embodrl.errors import EnvError

    start(env, seeds_of(1, 2))
    with raises_code("actions-not-finite", EnvError, "NaN"):
        env.chunk_step(np.full((2, 1, 7), np.nan, np.float32), np.ones(2, np.bool_))


# -- videos -----------------------------------------------------------------------------------------------------------


def test_videos_are_named_after_the_outcome_and_decode(env: Any, tmp_path: Path) -> None:
    import imageio.v2 as imageio

    start(env, seeds_of(3, 4))
    env.start_video(0, str(tmp_path / "videos" / "a"))
    env.start_video(1, str(tmp_path / "videos" / "b"))
    env.expert_reset([0, 1])
    active = np.ones(2, np.bool_)
    for _ in range(12):
        actions = env.expert_actions()
        actions[1] = 0  # the second does nothing
        step = env.chunk_step(actions[:, None], active)
        active &= ~step.done
        if step.done[0]:
            frames = int(step.episode_length[0])
            break
    for _ in range(12):
        if not active[1]:
            break
        active[1] &= not env.chunk_step(np.zeros((2, 1, 7), np.float32), np.array([False, True])).done[1]
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == ["a_success.mp4", "b_failure.mp4"]
    video = imageio.mimread(tmp_path / "videos" / "a_success.mp4", memtest=False)
    assert len(video) == frames
    assert video[0].shape == (256, 256, 3)
    assert np.asarray(video[0]).std() > 10


def test_the_example_of_the_doctor_is_drawn() -> None:
    from embodrl.envs.maniskill.spec import SPEC

    assert SPEC.example is not None
    example = make(1, **SPEC.example)
    assert start(example, seeds_of(0)).images.std() > 0
    example.close()


@pytest.mark.long
def test_doctor_makes_an_environment(env: Any) -> None:
    from embodrl.preflight.simulators import check_simulator

    found = check_simulator("maniskill")
    assert found.status == "ok" and "one environment and one frame" in found.detail, found


# -- perturbed episodes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def perturbed() -> Iterator[Any]:
    """One PushCube environment; each test chooses an axis, which builds the scene again."""
    made = make(1, ["PushCube-v1"], include_state=True, auto_reset=False)
    yield made
    made.close()


def episode(env: Any, axis: str | None, seed: int = 5) -> tuple[Any, Any]:
    """Return the first observation and the step after two chunks."""
    env.axis = None
    env._fleet._kwargs["axis"] = None
    env.rebuild()
    if axis is not None:
        env.set_axis(axis)
    first = start(env, seeds_of(seed))
    for number in range(2):
        step = env.chunk_step(noise(number, 3, 1), np.ones(1, bool))
    return first, step


def test_axes_of_vision_and_semantics_change_what_is_seen_and_nothing_else(perturbed: Any) -> None:
    plain, end = episode(perturbed, None)
    for axis in ("light", "texture", "camera", "colours", "distractors"):
        first, step = episode(perturbed, axis)
        assert (first.images != plain.images).any(axis=-1).mean() > 0.002, axis
        np.testing.assert_array_equal(step.observation.state, end.observation.state, err_msg=axis)
        np.testing.assert_array_equal(step.reward, end.reward, err_msg=axis)
        assert (first.instruction != plain.instruction) == (axis == "colours")


def test_axes_of_execution_change_the_start_or_the_goal_and_states_return_exactly(perturbed: Any) -> None:
    plain, _ = episode(perturbed, None)
    (robot_start, _), (objects_start, _) = episode(perturbed, "robot"), episode(perturbed, "objects")
    assert 0.02 < np.abs(robot_start.state - plain.state)[0, :7].max() <= 0.25
    np.testing.assert_array_equal(objects_start.state, plain.state)
    assert (objects_start.images != plain.images).any()
    first, _ = episode(perturbed, "goal")
    np.testing.assert_array_equal(first.images, plain.images)
    goal = perturbed._fleet.any_sim().env.goal_region
    before = goal.pose.p.numpy().copy()
    state = perturbed.get_state()
    expected = perturbed.chunk_step(noise(7, 3, 1), np.ones(1, bool))
    assert 0.003 < np.linalg.norm(perturbed._fleet.any_sim().env.goal_region.pose.p.numpy() - before) < 0.02
    perturbed.set_state(state)
    same(perturbed.chunk_step(noise(7, 3, 1), np.ones(1, bool)), expected)
