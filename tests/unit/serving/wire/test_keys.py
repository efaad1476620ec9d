"""From messages to observations and back."""

import numpy as np
import pytest
from expect import raises_code

from embodrl.errors import WireError
from embodrl.serving.wire.keys import Part, WireMap, split
from embodrl.types import Observation

KEYS = WireMap(("observation/image", "images.wrist"), ("state.arm:2", "state.gripper"), "prompt")
PICTURE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
MESSAGE = {
    "observation/image": PICTURE,
    "images": {"wrist": PICTURE + 1},
    "state": {"arm": np.array([1.0, 2.0]), "gripper": 3},
    "prompt": "push",
    "further": object(),
}


def test_keys_lead_to_cameras_state_and_instruction():
    found = KEYS.observation(MESSAGE)
    assert found.images.shape == (1, 2, 4, 5, 3) and found.images.dtype == np.uint8
    assert (found.images[0, 0] == PICTURE).all() and (found.images[0, 1] == PICTURE + 1).all()
    assert found.state.tolist() == [[1.0, 2.0, 3.0]] and found.instruction == ["push"]
    flat = {"observation/image": PICTURE, "images.wrist": PICTURE, "state.arm": [1, 2], "state.gripper": [[9], [3]]}
    assert KEYS.observation(flat | {"prompt": ["push"]}).state.tolist() == [[1.0, 2.0, 3.0]]


def test_pictures_of_other_layouts_become_bytes_with_channels_last():
    keys = WireMap(("image",), ("state",), "prompt")
    planes = PICTURE.transpose(2, 0, 1)
    for value in (PICTURE, planes, PICTURE / 255, (planes / 255).astype(np.float32)):
        found = keys.observation({"image": value, "prompt": ""})
        assert np.abs(found.images[0, 0].astype(int) - PICTURE).max() <= 1
        assert found.state.shape == (1, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"observation/image": PICTURE[None]},
        {"observation/image": PICTURE[..., :2]},
        {"observation/image": PICTURE.astype(np.int64)},
        {"observation/image": PICTURE.astype(np.float32)},
        {"observation/image": np.full((4, 5, 3), np.nan)},
        {"observation/image": PICTURE[:0]},
        {"observation/image": PICTURE[:3]},
        {"observation/image": "text"},
        {"prompt": 3},
        {"prompt": "x" * 10_001},
        {"prompt": ["a", "b"]},
        {"state": {"arm": [1.0, 2.0]}},
        {"state": {"arm": [1.0], "gripper": 3}},
        {"state": {"arm": [1.0, float("nan")], "gripper": 3}},
        {"state": {"arm": [1.0, 1e300], "gripper": 3}},
        {"state": {"arm": [[1.0], [2.0, 3.0]], "gripper": 3}},
        {"images": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_no_observation_is_refused(change):
    with raises_code("wire-observation", WireError):
        KEYS.observation(MESSAGE | change)


def test_a_row_of_an_observation_becomes_the_message_that_it_came_from():
    observation = KEYS.observation(MESSAGE)
    again = KEYS.message(observation, 0)
    assert KEYS.observation(again).state.tolist() == observation.state.tolist()
    assert again["images.wrist"].shape == (4, 5, 3)
    assert KEYS.message(observation, 0, nested=True)["images"]["wrist"].shape == (4, 5, 3)
    one = Observation(observation.images[:, :1], observation.state, ["push"], observation.task_id)
    with raises_code("wire-observation", WireError):
        KEYS.message(one, 0)


def test_a_vector_is_cut_into_its_parts():
    found = split(np.arange(7), [Part.parse("arm"), Part.parse("gripper:1")])
    assert found["arm"].tolist() == [0, 1, 2, 3, 4, 5] and found["gripper"].tolist() == [6]
    for parts in (["arm:7", "gripper:1"], ["arm:6"], ["a", "b"]):
        with raises_code("wire-observation", WireError):
            split(np.arange(7), [Part.parse(text) for text in parts])
