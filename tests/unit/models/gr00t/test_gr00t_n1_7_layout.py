"""GR00T N1.7: names and sizes of the public checkpoint, its files, prompts and pictures, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from gr00t_files import N1_7 as PUBLIC
from gr00t_files import PROCESSOR, STATISTICS, sidecars
from tiny_families import build, observation

from embodrl.errors import CheckpointError, EmbodrlError, StatisticsMissingError
from embodrl.models.common.images import center_crop, resize_area
from embodrl.models.gr00t.build_n1_7 import Gr00tN17Processor, QwenTokenizer
from embodrl.models.gr00t.config_n1_7 import Gr00tN17Config
from embodrl.models.gr00t.modeling import Gr00tN17Model
from embodrl.models.gr00t.processing import tiny_chat_tokenizer
from embodrl.models.gr00t.qwen3_vl import patchify, rope_positions
from embodrl.models.gr00t.robots import KeyStats
from embodrl.models.gr00t.sidecars import EMBODIMENT_IDS, ImageTransform, Sidecars

U = "checkpoint-unsupported"


@pytest.fixture(scope="module")
def model() -> Gr00tN17Model:
    with torch.device("meta"):
        return Gr00tN17Model(Gr00tN17Config.from_dict(PUBLIC, sidecars()))


VISUAL, LANGUAGE = "backbone.model.model.visual", "backbone.model.model.language_model"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{VISUAL}.patch_embed.proj.weight", (1024, 3, 2, 16, 16)),
        (f"{VISUAL}.pos_embed.weight", (2304, 1024)),
        (f"{VISUAL}.blocks.23.attn.qkv.weight", (3072, 1024)),
        (f"{VISUAL}.blocks.23.attn.proj.bias", (1024,)),
        (f"{VISUAL}.blocks.23.mlp.linear_fc1.weight", (4096, 1024)),
        (f"{VISUAL}.blocks.23.norm2.weight", (1024,)),
        (f"{VISUAL}.merger.norm.weight", (1024,)),
        (f"{VISUAL}.merger.linear_fc2.weight", (2048, 4096)),
        (f"{VISUAL}.deepstack_merger_list.2.norm.weight", (4096,)),
        (f"{VISUAL}.deepstack_merger_list.2.linear_fc1.weight", (4096, 4096)),
        (f"{LANGUAGE}.embed_tokens.weight", (151936, 2048)),
        (f"{LANGUAGE}.layers.15.self_attn.k_proj.weight", (1024, 2048)),
        (f"{LANGUAGE}.layers.15.self_attn.q_norm.weight", (128,)),
        (f"{LANGUAGE}.layers.15.mlp.down_proj.weight", (2048, 6144)),
        (f"{LANGUAGE}.norm.weight", (2048,)),
        ("action_head.model.transformer_blocks.30.attn1.to_k.weight", (1536, 2048)),
        ("action_head.model.transformer_blocks.31.attn1.to_k.weight", (1536, 1536)),
        ("action_head.state_encoder.layer1.W", (32, 132, 1024)),
        ("action_head.action_encoder.W1.W", (32, 132, 1536)),
        ("action_head.action_decoder.layer2.W", (32, 1024, 132)),
        ("action_head.position_embedding.weight", (1024, 1536)),
        ("action_head.vl_self_attention.transformer_blocks.3.ff.net.2.weight", (2048, 8192)),
    ],
)
def test_public_name(model: Gr00tN17Model, name: str, shape: tuple[int, ...]) -> None:
    assert tuple(model.state_dict()[name].shape) == shape


def test_no_more_layers_and_no_future_tokens(model: Gr00tN17Model) -> None:
    names = set(model.state_dict())
    assert not any(".layers.16." in name or ".blocks.24." in name or "_blocks.32." in name for name in names)
    assert not any("future_tokens" in name or "lm_head" in name for name in names)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 3_144_016_000 and sum(p.numel() for p in model.unused_parameters()) == 2048
    assert model.config.tokens_per_image == 64 and model.config.patches_per_image == 256


def test_config_survives_a_round_trip() -> None:
    config = Gr00tN17Config.from_dict(PUBLIC, sidecars())
    written = config.to_dict()
    for key, value in PUBLIC.items():
        expected = {**value, "dropout": 0.2, "final_dropout": True} if key == "vl_self_attention_cfg" else value
        assert written[key] == expected, key
    again = Gr00tN17Config.from_dict(written, sidecars())
    assert (again.vision, again.qwen, again.head) == (config.vision, config.qwen, config.head)
    assert config.files()["processor_config.json"] == PROCESSOR and config.files()["statistics.json"] == STATISTICS


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"model_type": "Gr00tN1d8"}, "checkpoint-family", ["'Gr00tN1d8'", "'Gr00tN1d7'"]),
        ({"model_type": "gr00t_n1_5"}, "checkpoint-family", ["'gr00t'", "'gr00t_n1_7'"]),
        ({"model_name": "nvidia/Cosmos-Reason3-8B"}, U, ["model_name"]),
        ({"state_history_length": 2}, U, ["state_history_length"]),
        ({"use_alternate_vl_dit": False}, U, ["use_alternate_vl_dit"]),
        ({"strict_action_padding_mask": True}, U, ["strict_action_padding_mask"]),
        ({"backbone_embedding_dim": 1536}, U, ["backbone_embedding_dim", 1536, 2048]),
        ({"max_action_dim": None}, "policy-file", ["'max_action_dim'"]),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], code: str, names: list[object]) -> None:
    with raises_code(code, CheckpointError, *names):
        Gr00tN17Config.from_dict({**PUBLIC, **changes}, sidecars())


@pytest.mark.parametrize("size", [224, 250])
def test_pictures_that_qwen_would_resize_are_refused(size: int) -> None:
    with raises_code(U, CheckpointError, size):
        Gr00tN17Config.from_dict(PUBLIC, sidecars(shortest_image_edge=size))


# Statistics ----------------------------------------------------------------------------------------------------------


def test_states_and_actions_lie_between_the_quantiles() -> None:
    robot = sidecars().robot(None, 7, "x")
    assert (robot.name, robot.horizon, robot.relative) == ("libero_sim", 16, ())
    assert robot.state is not None and robot.state.dims == 8
    values = np.array([-1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 1.0, -2.0])
    np.testing.assert_allclose(robot.state.normalize(values), [-1, -0.5, 0, 0.5, 1, 1, 1, -1])
    assert robot.state.scale(values)[5] == 3.0
    actions = np.array([-1.0, -2.0, 0.0, 0.5, 1.0, 9.0, 0.0])
    np.testing.assert_allclose(robot.action.unnormalize(actions), [0, 0, 2, 3, 4, 4, 2])
    robot = sidecars(use_percentiles=False).robot("libero_sim", 7, "x")
    np.testing.assert_allclose(robot.action.unnormalize(actions), [-2, -2, 2, 4, 6, 6, 2])


def test_a_dimension_without_range_is_0() -> None:
    key = KeyStats("a", "bounded", np.array([3.0, 100.0]), np.array([3.0, 100.0 + 1e-7]))
    np.testing.assert_array_equal(key.normalize(np.array([7.0, 200.0])), [0.0, 0.0])
    np.testing.assert_allclose(key.unnormalize(np.array([0.7, -1.0])), [3.0, 100.0])


def test_states_by_sines_and_by_deviations() -> None:
    listed = {"state": {"sin_cos_embedding_keys": ["x"], "mean_std_embedding_keys": ["y"]}}
    state = sidecars(listed, apply_sincos_state_encoding=True).robot(None, 7, "x").state
    assert state is not None and (state.dims, state.width) == (8, 9)
    found = state.normalize(np.array([0.5, 3.0, 0.5, 0, 0, 0, 0, 0]))
    np.testing.assert_allclose(found[:4], [np.sin(0.5), np.cos(0.5), 1.5, 0.5])
    without = sidecars(listed).robot(None, 7, "x").state
    assert without is not None and without.keys[0].mode == "bounded"


RELATIVE = [{"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}] * 2 + [
    {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
] * 5
BY_STEP = {"min": [[-1.0 - step] for step in range(16)], "max": [[1.0 + step] for step in range(16)]}
RELATIVE_STATISTICS = {"libero_sim": {**STATISTICS["libero_sim"], "relative_action": {"x": BY_STEP, "y": BY_STEP}}}


def test_relative_actions_have_ranges_by_step_and_count_from_the_state() -> None:
    made = sidecars({"action": {"action_configs": RELATIVE}}, RELATIVE_STATISTICS)
    robot = made.robot(None, 7, "x")
    assert robot.relative == ((slice(0, 1), slice(0, 1)), (slice(1, 2), slice(1, 2)))
    chunk = np.ones((2, 5, 7))
    np.testing.assert_allclose(robot.action.unnormalize(chunk)[0, :, 0], [1, 2, 3, 4, 5])
    np.testing.assert_allclose(robot.action.scale(chunk)[0, :, 1], 1 / np.arange(1, 6))
    absolute = sidecars({"action": {"action_configs": RELATIVE}}, RELATIVE_STATISTICS, use_relative_action=False)
    assert not absolute.robot(None, 7, "x").relative


def test_the_policy_adds_the_state_to_relative_actions() -> None:
    policy = build("gr00t_n1_7")
    object.__setattr__(policy.robot, "relative", ((slice(1, 3), slice(4, 6)),))  # type: ignore[attr-defined]
    seen = observation("gr00t_n1_7")
    actions = np.zeros((3, 2, 7))
    absolute = policy.absolute_from(actions, seen)  # type: ignore[attr-defined]
    np.testing.assert_allclose(absolute[:, 1, 1:3], seen.state[:, 4:6])
    assert not absolute[..., 0].any() and not absolute[..., 3:].any()
    np.testing.assert_allclose(policy.relative_to(absolute, seen), 0.0)  # type: ignore[attr-defined]
    seen.state = seen.state[:, :0]
    with raises_code("state-size"):
        policy.absolute_from(actions, seen)  # type: ignore[attr-defined]


EEF = [{"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROT6D", "state_key": None}] * 7
LOST = [{**RELATIVE[0], "state_key": "elbow"}, *RELATIVE[1:]]


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        ({"action": {"action_configs": EEF}}, U, ["'x'"]),
        ({"action": {"action_configs": RELATIVE[:3]}}, "policy-file", ["'action_configs'", 3, 7]),
        ({"action": {"action_configs": LOST}}, "policy-file", ["'elbow'"]),
        ({"action": {"action_configs": RELATIVE, "delta_indices": list(range(20))}}, "policy-file", ["'x'", 20, 16]),
        ({"action": {"mean_std_embedding_keys": ["x"]}}, U, ["x"]),
        ({"video": {"delta_indices": [-15, 0]}}, U, ["'video'"]),
    ],
)
def test_robots_that_would_act_wrongly_are_refused(change: Any, code: str, names: list[object]) -> None:
    with raises_code(code, CheckpointError, *names):
        sidecars(change, RELATIVE_STATISTICS).robot(None, 7, "x")


def test_other_dimensions_and_robots_are_refused() -> None:
    with raises_code("statistics-size", CheckpointError, "'libero_sim'", 7, 6):
        sidecars().robot(None, 6, "x")
    with raises_code("statistics-missing", StatisticsMissingError, "'gr1'", "libero_sim"):
        sidecars().robot("gr1", 7, "x")


def test_files_are_read_and_written(tmp_path: Path) -> None:
    policy = build("gr00t_n1_7", seed=5)
    policy.save_pretrained(tmp_path / "policy")  # type: ignore[attr-defined]
    found = Sidecars.read(tmp_path / "policy")
    assert found.embodiment_ids["new_embodiment"] == 1 and found.embodiment_ids["libero_sim"] == 2
    file = tmp_path / "policy" / "processor_config.json"
    written = json.loads(file.read_text())
    for name, value in {"use_tactile": True, "clip_outliers": False, "exclude_state": True}.items():
        changed = {**written, "processor_kwargs": {**written["processor_kwargs"], name: value}}
        file.write_text(json.dumps(changed))
        with raises_code(U, CheckpointError, name, str(value).lower()):
            Sidecars.read(tmp_path / "policy")
    assert EMBODIMENT_IDS["new_embodiment"] == 10


def test_more_actions_than_the_robot_was_trained_with_are_refused(tmp_path: Path) -> None:
    policy = build("gr00t_n1_7")
    policy.save_pretrained(tmp_path / "policy")  # type: ignore[attr-defined]
    file = tmp_path / "policy" / "processor_config.json"
    written = json.loads(file.read_text())
    written["processor_kwargs"]["modality_configs"]["new_embodiment"]["action"]["delta_indices"] = [0, 1, 2]
    file.write_text(json.dumps(written))
    (tmp_path / "policy" / "checksums.json").unlink(missing_ok=True)
    short = build("gr00t_n1_7", model_path=str(tmp_path / "policy"))
    assert (short.action_horizon, short.horizon) == (3, 4)  # type: ignore[attr-defined]
    chunk = torch.zeros(3, 3, 7)
    inputs = short.sft_inputs(observation("gr00t_n1_7"), chunk)
    loss = short.sft_loss({**inputs, "action_mask": torch.ones(3, 3, dtype=torch.bool)})[0]
    changed = {**inputs, "target": inputs["target"].clone()}
    changed["target"][:, 3] = 5.0
    changed["noise"] = inputs["noise"].clone()
    changed["noise"][:, 3] -= 5.0 * (1 - inputs["tau"][:, None]) / inputs["tau"][:, None]  # the same point
    torch.testing.assert_close(short.sft_loss(changed)[0], loss)  # the fourth action does not count
    with raises_code("action-horizon", EmbodrlError, 3, 4):
        build("gr00t_n1_7", model_path=str(tmp_path / "policy"), num_action_chunks=4)


# Prompts and pictures ------------------------------------------------------------------------------------------------


def processor(formalize: bool = True) -> Gr00tN17Processor:
    tiny = build("gr00t_n1_7").model.config  # type: ignore[attr-defined]
    tiny.sidecars.processor.content["processor_kwargs"]["formalize_language"] = formalize
    robot = tiny.sidecars.robot(None, 7, "x")
    return Gr00tN17Processor(tiny_chat_tokenizer(QwenTokenizer), tiny, robot, 64)


def test_the_prompt_is_that_of_qwen3_vl() -> None:
    image = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    assert processor().chat("Pick up the RED cube, now!", 2) == (
        f"<|im_start|>user\n{image}{image}pick up the red cube now<|im_end|>\n"
    )
    assert "Pick up the RED cube, now!<|im_end|>" in processor(False).chat("Pick up the RED cube, now!", 1)


def test_area_resizing_is_that_of_opencv() -> None:
    """Values of cv2.resize(..., INTER_AREA) of OpenCV 5.0 for the first channel; enlarged within one level."""
    y, x = np.indices((6, 6))
    image = np.stack([(37 * x + 11 * y) % 256] * 3, -1).astype(np.uint8)
    small = resize_area(torch.from_numpy(image)[None], 4, 4)[0, ..., 0].tolist()
    assert small == [[16, 65, 127, 176], [31, 80, 142, 191], [49, 98, 160, 209], [64, 113, 175, 224]]
    large = resize_area(torch.from_numpy(image)[None], 9, 9)[0, ..., 0].int()
    rows = [[0, 19, 37, 74, 93, 111, 148, 167, 185], [6, 24, 43, 80, 98, 117, 154, 172, 191]]
    assert (large[:2] - torch.tensor(rows)).abs().max() <= 1
    last = torch.tensor([55, 74, 92, 129, 148, 166, 203, 222, 240])
    assert (large[-1] - last).abs().max() <= 1


def test_the_middle_of_a_picture() -> None:
    image = torch.arange(25, dtype=torch.uint8).reshape(1, 5, 5, 1).expand(1, 5, 5, 3)
    assert center_crop(image, 2, rounds_down=True)[0, ..., 0].tolist() == [[6, 7], [11, 12]]
    assert center_crop(image, 2, rounds_down=False)[0, ..., 0].tolist() == [[12, 13], [17, 18]]


@pytest.mark.parametrize(
    ("kwargs", "wanted"),
    [
        ({}, ImageTransform(256, 243, True, True, False)),
        ({"shortest_image_edge": None, "crop_fraction": None}, ImageTransform(256, 230, True, True, False)),
        ({"use_albumentations": False, "letter_box_transform": True}, ImageTransform(256, 230, False, False, True)),
    ],
)
def test_pictures_as_the_files_say(kwargs: dict[str, Any], wanted: ImageTransform) -> None:
    assert sidecars(**kwargs).images() == wanted


def test_shapes_of_pictures() -> None:
    wide = torch.randint(0, 256, (1, 20, 40, 3), dtype=torch.uint8)
    with raises_code("gr00t-picture-shape"):
        ImageTransform(32, 30, True, True, False)(wide)
    assert ImageTransform(32, 30, True, False, False)(wide).shape == (1, 32, 32, 3)
    boxed = ImageTransform(40, 40, False, False, True)(wide)
    assert torch.equal(boxed[:, 10:30], wide) and not boxed[:, :10].any() and not boxed[:, 30:].any()


def test_patches_are_in_qwens_order() -> None:
    """Tile by tile, each patch colour by colour, twice in time."""
    image = torch.arange(3 * 8 * 8, dtype=torch.float32).reshape(1, 3, 8, 8)
    patches, side = patchify(image, 2, 2)
    assert side == 4 and patches.shape == (16, 3 * 2 * 2 * 2)
    wanted = [image[0, :, y : y + 2, x : x + 2] for y, x in ((0, 0), (0, 2), (2, 0), (2, 2), (0, 4))]
    for found, patch in zip(patches, wanted, strict=False):
        assert torch.equal(found, patch[:, None].expand(3, 2, 2, 2).flatten())


def test_places_of_tokens_are_those_of_qwen3_vl() -> None:
    """Two texts around an image of 2 x 2 tokens, by hand, with padding before."""
    at_images = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]]).bool()
    time, rows, columns = rope_positions(at_images, 2, None)[:, 0].tolist()
    assert time == [0, 1, 2, 2, 2, 2, 4, 5]
    assert rows == [0, 1, 2, 2, 3, 3, 4, 5] and columns == [0, 1, 2, 3, 2, 3, 4, 5]
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]]).bool()
    assert rope_positions(at_images, 2, mask)[0, 0, 1:].tolist() == [0, 1, 1, 1, 1, 3, 4]
