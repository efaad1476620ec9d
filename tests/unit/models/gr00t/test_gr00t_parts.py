"""GR00T's prompts, statistics, states and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from PIL import Image

from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.models.common.config_file import fields_of
from embodrl.models.common.norm_stats import stats_sets
from embodrl.models.gr00t.config import EMBODIMENT_IDS
from embodrl.models.gr00t.policy import embodiment_id, trimmed
from embodrl.models.gr00t.processing import (
    SPECIAL_TOKENS,
    Gr00tProcessor,
    chat,
    has_tokenizer,
    load_chat_tokenizer,
    tiny_chat_tokenizer,
)
from embodrl.models.gr00t.robots import KEYS, JoinedStats, Keys, KeyStats, choose_keys, choose_robot
from embodrl.types import Observation

CONTENT = {
    "gr1": {
        "embodiment_tag": "gr1",
        "statistics": {
            "action": {
                "arm": {"min": [-2.0, 0.0], "max": [2.0, 10.0], "mean": [0.0, 5.0]},
                "hand": {"min": [3.0], "max": [3.0]},
            },
            "state": {"arm": {"min": [0.0], "max": [4.0]}, "waist": {"min": [-1.0], "max": [0.0]}},
        },
    },
    "oxe_droid": {"statistics": {"action": {"eef": {"min": [0.0], "max": [1.0]}}}},
}
METADATA = stats_sets(fields_of(CONTENT, "x"))


def processor(**changes) -> Gr00tProcessor:
    options = {
        "tokenizer": tiny_chat_tokenizer(),
        "image_size": 16,
        "num_patches": 4,
        "max_prompt_tokens": 64,
        "system_prompt": "",
        "crop_side": 1.0,
        "state_stats": None,
        "max_state_dim": 5,
        **changes,
    }
    return Gr00tProcessor(**options)


def observation(texts: list[str], cameras: int = 1, state_dim: int = 0, size: int = 16) -> Observation:
    rng = np.random.default_rng(0)
    batch = len(texts)
    images = rng.integers(0, 256, (batch, cameras, size, size, 3), dtype=np.uint8)
    return Observation(images, rng.random((batch, state_dim), np.float32), texts, np.zeros(batch, np.int32))


def test_chat_to_the_letter():
    assert chat("Push the cube.", 2, 3, "You are a helpful assistant.") == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n"
        "<image 1><img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>"
        "<image 2><img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>"
        "Push the cube.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chat("Push", 1, 1, "").startswith("<|im_start|>user\n<image 1><img><IMG_CONTEXT></img>Push<|im_end|>")


def test_special_tokens_are_single_ids():
    tokenizer = tiny_chat_tokenizer()
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode(token)) == 1
    ids = tokenizer.encode(chat("push", 2, 4, ""))
    assert ids.count(tokenizer.image_token_id) == 8
    assert max(ids) < tokenizer.vocab_size
    assert ids[0] == tokenizer.encode("<|im_start|>")[0]


def test_prompts_are_padded_on_the_left():
    made = processor()
    ids, mask = made.prompt_row("push the cube", 2)
    assert len(ids) == len(mask) == 64 + 2 * 4
    text = made.tokenizer.encode(chat("push the cube", 2, 4, ""))
    assert mask == [0] * (72 - len(text)) + [1] * len(text) and ids[-len(text) :] == text
    assert made.prompt_row("Push the cube", 2) != (ids, mask)  # the case of letters is kept


def test_longest_prompt():
    needed = len(tiny_chat_tokenizer().encode(chat("pull", 1, 4, ""))) - 4
    assert processor(max_prompt_tokens=needed).prompt_row("pull", 1)[1] == [1] * (needed + 4)
    with raises_code("prompt-too-long", EmbodrlError, f"max_prompt_tokens={needed}"):
        processor(max_prompt_tokens=needed - 1).prompt_row("pull", 1)
    with raises_code("prompt-too-long"):
        processor(max_prompt_tokens=8).check_room()  # not even an empty instruction


def test_trimming_drops_common_padding_only():
    ids = torch.tensor([[0, 0, 5, 6], [0, 7, 8, 9]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    short, kept = trimmed(ids, mask)
    assert short.tolist() == [[0, 5, 6], [7, 8, 9]]
    assert kept is not None and kept.tolist() == [[False, True, True], [True, True, True]]
    short, kept = trimmed(ids[:1], mask[:1])
    assert short.tolist() == [[5, 6]] and kept is None


def test_images_and_shapes():
    seen = observation(["push", "pull"], cameras=3, size=32)
    inputs = processor()(seen, torch.device("cpu"))
    assert inputs["images"].shape == (2, 3, 16, 16, 3) and inputs["images"].dtype == torch.uint8
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (2, 64 + 3 * 4)
    assert inputs["state"].shape == (2, 5) and not inputs["state"].any()
    same = processor(image_size=32)(seen, torch.device("cpu"))["images"]
    assert np.abs(same.numpy().astype(int) - seen.images).max() <= 1  # the reference cuts off fractions
    with raises_code("num-cameras"):
        processor()(observation(["push"], cameras=0), torch.device("cpu"))


def test_images_are_cropped_before_an_antialiased_resize():
    """As NVIDIA's data configurations: Pillow's bilinear filter on floats, of the middle 0.95 of each side."""
    picture = np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8)
    seen = Observation(picture[None, None], np.zeros((1, 0), np.float32), ["push"], np.zeros(1, np.int32))
    found = processor(crop_side=0.95)(seen, torch.device("cpu"))["images"][0, 0].numpy()
    channels = [Image.fromarray(picture[1:-1, 1:-1, c].astype(np.float32)) for c in range(3)]
    resized = [np.asarray(channel.resize((16, 16), Image.Resampling.BILINEAR)) for channel in channels]
    exact = np.stack(resized, axis=-1)
    assert np.abs(found - exact).max() <= 1.001 and ((exact - found) > -0.001).all()
    assert (found == np.floor(exact)).mean() > 0.98


def test_states_are_normalised_and_padded():
    stats = JoinedStats((KeyStats("arm", "min_max", np.array([0.0, -1.0, 2.0]), np.array([4.0, 0.0, 2.0])),))
    made = processor(state_stats=stats)
    state = np.array([[1.0, -0.25, 7.0], [6.0, -1.0, 2.0]], np.float32)
    np.testing.assert_allclose(made.padded_state(state), [[-0.5, 0.5, 0, 0, 0], [2.0, -1.0, 0, 0, 0]])
    np.testing.assert_allclose(processor().padded_state(state), [[1, -0.25, 7, 0, 0], [6, -1, 2, 0, 0]])
    assert not made.padded_state(np.zeros((2, 0), np.float32)).any()
    with raises_code("state-size", EmbodrlError, "2", "3"):
        made.padded_state(state[:, :2])
    with raises_code("state-size", EmbodrlError, "max_state_dim=6"):
        processor().padded_state(np.zeros((1, 6), np.float32))


def test_min_max_statistics_by_hand():
    robot = choose_robot(METADATA, "gr1", 3, "x")
    actions = np.array([[[1.0, 2.5, 3.0], [-2.0, 12.0, 9.0]]])
    normalized = np.array([[[0.5, -0.5, 0.0], [-1.0, 1.4, 0.0]]])  # not clipped; no range gives 0
    np.testing.assert_allclose(robot.action.normalize(actions), normalized, atol=1e-12)
    back = robot.action.unnormalize(normalized)
    np.testing.assert_allclose(back, [[[1.0, 2.5, 3.0], [-2.0, 12.0, 3.0]]], atol=1e-12)
    assert robot.state is not None
    np.testing.assert_allclose(robot.state.normalize(np.array([1.0, -0.5])), [-0.5, 0.0], atol=1e-12)


def test_the_robot_is_chosen_by_name():
    one = {"oxe_droid": METADATA["oxe_droid"]}
    assert choose_robot(one, None, 1, "x").name == "oxe_droid" and choose_robot(one, None, 1, "x").state is None
    with raises_code("statistics-choice", CheckpointError, 2, "gr1", "oxe_droid"):
        choose_robot(METADATA, None, 3, "x")
    with raises_code("statistics-missing", CheckpointError, "'oxe'", "gr1", "oxe_droid") as caught:
        choose_robot(METADATA, "oxe", 3, "x")
    assert "model.unnorm_key=oxe_droid" in caught.value.hint
    with raises_code("statistics-size", CheckpointError, "3", "7"):
        choose_robot(METADATA, "gr1", 7, "x")
    broken = stats_sets(fields_of({"a": {"statistics": {"action": {"arm": {"min": [0.0]}}}}}, "x"))
    with raises_code("policy-file", CheckpointError, "x, a, statistics, action, arm", "'max'"):
        choose_robot(broken, None, 1, "x")


VALUES = {
    "arm": {
        **{"min": [-2.0, 0.0], "max": [2.0, 8.0]},
        **{"mean": [1.0, 3.0], "std": [0.5, 0.0], "q01": [0.0, 1.0], "q99": [1.0, 1.0]},
    },
    "gripper": {"min": 0.0, "max": 1.0},
}
ROBOT = stats_sets(fields_of({"so100": {"statistics": {"action": VALUES, "state": VALUES}}}, "x"))


@pytest.mark.parametrize(
    ("entry", "normalized", "back"),
    [
        ("arm", [0.75, -0.5], [1.5, 2.0]),
        ("arm:mean_std", [1.0, 2.0], [1.5, 3.0]),  # no deviation: as it is, and the mean on the way back
        ("arm:q99", [1.0, 1.0], [1.0, 1.0]),  # clipped; no range: as it is, clipped as well
        ("arm:binary", [1.0, 1.0], [1.0, 1.0]),
        ("arm:identity", [1.5, 2.0], [1.5, 2.0]),
    ],
)
def test_modes_by_hand(entry: str, normalized: list[float], back: list[float]):
    """NVIDIA's Normalizer, by its formulas."""
    robot = choose_robot(ROBOT, None, 3, "x", lambda name: Keys(None, ("gripper:binary", entry)))
    found = robot.action.normalize(np.array([[0.25, 1.5, 2.0]]))
    np.testing.assert_allclose(found, [[0.0, *normalized]], atol=1e-12)
    np.testing.assert_allclose(robot.action.unnormalize(found), [[0.0, *back]], atol=1e-12)


def test_sines_and_cosines_of_a_state():
    robot = choose_robot(ROBOT, None, 2, "x", lambda name: Keys(("arm:sin_cos", "gripper"), ("arm",)))
    assert robot.state is not None and (robot.state.dims, robot.state.width) == (3, 5)
    state = np.array([[0.0, np.pi / 2, 0.75]], np.float32)
    wanted = [[0.0, 1.0, 1.0, 0.0, 0.5]]
    np.testing.assert_allclose(processor(state_stats=robot.state).padded_state(state), wanted, atol=1e-6)
    with raises_code("state-size", EmbodrlError, "5", "4"):
        processor(state_stats=robot.state, max_state_dim=4).padded_state(state)


@pytest.mark.parametrize("entry", ["arm:sin_cos", "arm:scale", "leg"])
def test_keys_that_do_not_exist(entry: str):
    with raises_code("gr00t-keys"):
        choose_robot(ROBOT, None, 2, "x", lambda name: Keys(None, (entry,)))


def test_which_keys(caplog: pytest.LogCaptureFixture):
    pose = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
    keys, origin = choose_keys("libero_franka", Keys(), {}, True, "x")
    assert keys == Keys(pose, pose) and origin == "data configuration of libero_franka"
    assert KEYS["maniskill_widowx"] == Keys(("left_arm:sin_cos",), ("left_arm",))
    assert choose_keys("libero_franka", Keys(("x",), ("y",)), {}, True, "x")[0] == Keys(("x",), ("y",))
    for robot in ("gr1", "oxe_droid"):
        with raises_code("gr00t-keys"):
            choose_keys(robot, Keys(), {}, True, "x")
        assert choose_keys(robot, Keys(), {robot: Keys(None, ("a",))}, False, "x")[1] == "config.json"
        assert choose_keys(robot, Keys(None, ("a",)), {}, True, "x")[0].action == ("a",)
    assert not caplog.records
    keys, origin = choose_keys("new_embodiment", Keys(), {}, True, "x")
    assert keys == Keys() and "assumed" in origin and "model.gr00t.action_keys" in caplog.text


def test_numbers_of_robots():
    numbers = {"libero_franka": 31, "maniskill_widowx": 30, "isaaclab_franka": 31}  # RLinf's
    assert {name: embodiment_id(name, EMBODIMENT_IDS, 32) for name in numbers} == numbers
    assert embodiment_id("new_embodiment", EMBODIMENT_IDS, 32) == 31
    assert embodiment_id("oxe_droid", EMBODIMENT_IDS, 32) == 17
    with raises_code("gr00t-robot", CheckpointError, "'so100'", "new_embodiment") as caught:
        embodiment_id("so100", EMBODIMENT_IDS, 32)
    assert '"embodiment_ids": {"so100": NUMBER}' in caught.value.hint
    with raises_code("gr00t-robot", CheckpointError, "31", "4"):
        embodiment_id("new_embodiment", EMBODIMENT_IDS, 4)


def qwen_files(directory: Path) -> None:
    """Write the files of a Qwen tokenizer of six tokens and the chat's own."""
    vocab = {token: number for number, token in enumerate(["p", "u", "s", "h", "pu", "sh"])}
    (directory / "vocab.json").write_text(json.dumps(vocab))
    (directory / "merges.txt").write_text("#version: 0.2\np u\ns h\n")
    added = {token: 6 + number for number, token in enumerate(SPECIAL_TOKENS)}
    decoder = {str(number): {"content": token, "special": True} for token, number in added.items()}
    (directory / "added_tokens.json").write_text(json.dumps(added))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder}
    special = {"unk_token": None, "pad_token": "<|im_end|>", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, **special}))


def test_tokenizer_of_separate_files(tmp_path):
    """Eagle's tokenizer has no tokenizer.json."""
    assert not has_tokenizer(tmp_path)
    qwen_files(tmp_path)
    assert has_tokenizer(tmp_path)
    tokenizer = load_chat_tokenizer(tmp_path)
    assert tokenizer.encode("<|im_start|>push<img><IMG_CONTEXT></img>") == [6, 4, 5, 8, 9, 10]
    assert tokenizer.image_token_id == 9


def test_tokenizer_files_round_trip(tmp_path):
    made = tiny_chat_tokenizer()
    made.save(tmp_path)
    again = load_chat_tokenizer(tmp_path)
    text = chat("Push the RED cube, now!", 1, 2, "Hello.")
    assert again.encode(text) == made.encode(text) and again.vocab_size == made.vocab_size


def test_other_tokenizers_are_refused(tmp_path):
    from embodrl.models.common.tokenizer import TINY_TOKENIZER

    (tmp_path / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    with raises_code(
        "tokenizer-mismatch", CheckpointError, "<|im_start|>", "<|im_end|>", "<img>", "<IMG_CONTEXT>", "</img>"
    ):
        load_chat_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with raises_code("policy-file", CheckpointError, "tokenizer.json"):
        load_chat_tokenizer(tmp_path)
