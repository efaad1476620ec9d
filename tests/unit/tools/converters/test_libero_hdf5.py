"""LIBERO's HDF5 demonstrations, in the published layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code

from embodrl.data.load import load_demos
from embodrl.data.raw import RawWriter
from embodrl.tools.converters.libero_hdf5 import convert, moving

h5py = pytest.importorskip("h5py")
TASK = "turn_on_the_stove"


def write(path: Path, lengths: tuple[int, ...] = (6, 4)) -> dict[str, np.ndarray]:
    """A file as LIBERO publishes it; returns what the first demonstration holds."""
    rng = np.random.default_rng(0)
    first: dict[str, np.ndarray] = {}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps({"language_instruction": ["other words"]})
        for number, length in enumerate(lengths):
            demo = data.create_group(f"demo_{number}")
            actions = rng.uniform(-1, 1, (length, 7))
            actions[:, 6] = -1
            arrays = {
                "actions": actions,
                "rewards": np.r_[np.zeros(length - 1), 1].astype(np.uint8),
                "obs/agentview_rgb": rng.integers(0, 256, (length, 8, 8, 3), np.uint8),
                "obs/eye_in_hand_rgb": rng.integers(0, 256, (length, 8, 8, 3), np.uint8),
                "obs/ee_pos": rng.normal(size=(length, 3)),
                "obs/ee_ori": rng.normal(size=(length, 3)),
                "obs/gripper_states": rng.normal(size=(length, 2)),
            }
            for name, array in arrays.items():
                demo[name] = array
            first = first or arrays
    return first


def quiet(_: str) -> None: ...


def raw(directory: Path):
    return lambda: RawWriter(directory)


def test_demonstrations_come_as_the_environment_shows_them(tmp_path: Path):
    first = write(tmp_path / f"{TASK}_demo.hdf5")
    assert convert(tmp_path, raw(tmp_path / "out"), ("wrist", "agentview"), False, quiet) == (2, 10)
    demos = load_demos(tmp_path / "out")
    assert demos.images.shape == (10, 2, 8, 8, 3)
    np.testing.assert_array_equal(demos.images[2, 0], np.rot90(first["obs/eye_in_hand_rgb"][2], 2))
    np.testing.assert_array_equal(demos.images[2, 1], np.rot90(first["obs/agentview_rgb"][2], 2))
    np.testing.assert_allclose(demos.actions[:6], first["actions"], rtol=1e-6)
    state = np.concatenate([first[f"obs/{name}"] for name in ("ee_pos", "ee_ori", "gripper_states")], axis=1)
    np.testing.assert_allclose(demos.state[:6], state, rtol=1e-6)
    assert demos.tasks == [TASK, TASK]
    assert demos.instruction_table == ["turn on the stove"]


def test_a_task_of_no_suite_has_the_words_of_its_file(tmp_path: Path):
    write(tmp_path / "mine_demo.hdf5", (3,))
    convert(tmp_path / "mine_demo.hdf5", raw(tmp_path / "out"), ("agentview",), True, quiet)
    assert load_demos(tmp_path / "out").instruction_table == ["other words"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("KITCHEN_SCENE10_close_the_top_drawer_of_the_cabinet", "close the top drawer of the cabinet"),
        ("LIVING_ROOM_SCENE2_put_it_in_the_basket", "put it in the basket"),
        ("wipe_the_table", "wipe the table"),
    ],
)
def test_a_file_without_attributes_has_its_words_in_its_name(tmp_path: Path, name: str, words: str):
    """LIBERO-90 as the published filter of idle frames writes it; names as ``grab_language_from_filename`` reads."""
    path = tmp_path / f"{name}_demo.hdf5"
    write(path, (3,))
    with h5py.File(path, "a") as file:
        del file["data"].attrs["problem_info"]
    convert(path, raw(tmp_path / "out"), ("agentview",), True, quiet)
    demos = load_demos(tmp_path / "out")
    assert demos.instruction_table == [words] and demos.tasks == [name]
    convert(path, raw(tmp_path / "own"), ("agentview",), True, quiet, instruction="go")
    assert load_demos(tmp_path / "own").instruction_table == ["go"]


def test_pictures_that_are_upright_are_not_turned(tmp_path: Path):
    first = write(tmp_path / f"{TASK}_demo.hdf5", (3,))
    convert(tmp_path, raw(tmp_path / "out"), ("agentview",), True, quiet, upright=True)
    np.testing.assert_array_equal(load_demos(tmp_path / "out").images[:, 0], first["obs/agentview_rgb"])


def test_frames_in_which_nothing_is_commanded_are_dropped():
    actions = np.zeros((6, 7), np.float32)
    actions[:, 6] = [-1, -1, -1, 1, 1, 1]
    actions[1, 0] = 0.5
    actions[5, 2] = 0.1
    assert moving(actions).tolist() == [1, 3, 5]  # a motion, the closing of the gripper, a motion


@pytest.mark.parametrize("cameras", [("front",), (), ("wrist", "wrist")])
def test_wrong_cameras_are_refused(tmp_path: Path, cameras: tuple[str, ...]):
    write(tmp_path / "a_demo.hdf5")
    with raises_code("libero-cameras"):
        convert(tmp_path, raw(tmp_path / "out"), cameras, False, quiet)
    assert not (tmp_path / "out").exists()


def test_other_files_are_refused(tmp_path: Path):
    with raises_code("libero-no-files"):
        convert(tmp_path, raw(tmp_path / "out"), ("agentview",), False, quiet)
    (tmp_path / "b_demo.hdf5").write_text("not hdf5")
    write(tmp_path / "a_demo.hdf5")  # is read first, and its episodes must not stay
    with raises_code("libero-layout"):
        convert(tmp_path, raw(tmp_path / "out"), ("agentview",), False, quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_demo.hdf5", "b_demo.hdf5"]


def change(file, name: str, value: object) -> None:
    del file[name]
    file[name] = value


def nan_at_2(file) -> None:
    file["data/demo_1/actions"][2, 3] = np.nan


def link(file) -> None:
    del file["data/demo_1/actions"]
    file["data/demo_1/actions"] = h5py.ExternalLink("a_demo.hdf5", "data/demo_0/actions")


def external(file) -> None:
    del file["data/demo_1/actions"]
    file["data/demo_1"].create_dataset("actions", (4, 7), "f8", external=[("/etc/hostname", 0, 4 * 7 * 8)])


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (nan_at_2, "file-damaged", "episode 1, frame 2: data/demo_1/actions[3] is nan"),
        (link, "libero-layout", "data/demo_1/actions is stored in another file"),
        (external, "libero-layout", "data/demo_1/actions is stored in another file"),
        (lambda f: change(f, "data/demo_1/actions", np.zeros((4, 6))), "libero-layout", "actions has the shape [4, 6]"),
        (lambda f: change(f, "data/demo_1/actions", [b"x"] * 4), "libero-layout", "actions has the shape [4]"),
        (lambda f: change(f, "data/demo_1/obs/ee_pos", np.zeros((3, 3))), "libero-layout", "an episode of 4 frames"),
        (
            lambda f: change(f, "data/demo_1/obs/agentview_rgb", np.zeros((4, 8, 8, 3))),
            "libero-layout",
            "is float64, not uint8",
        ),
        (lambda f: f["data"].attrs.__setitem__("problem_info", "[" * 3000), "file-format", "nested too deeply"),
        (
            lambda f: f["data"].attrs.__setitem__("problem_info", "{}"),
            "file-format",
            "'language_instruction' is missing",
        ),
        (lambda f: f["data"].attrs.__setitem__("problem_info", 3), "libero-layout", "'problem_info' is not text"),
    ],
)
def test_hostile_and_damaged_files_are_refused(tmp_path: Path, damage, code: str, words: str):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a_demo.hdf5")
    write(tmp_path / "in/x_demo.hdf5")
    with h5py.File(tmp_path / "in/x_demo.hdf5", "r+") as file:
        damage(file)
    with raises_code(code) as refused:
        convert(tmp_path / "in/x_demo.hdf5", raw(tmp_path / "out"), ("agentview",), True, quiet)
    assert words in refused.value.message and not (tmp_path / "out").exists()
