"""Layouts of public pi0 and pi0.5 checkpoints, made of tiny policies: statistics, prompts, files that lack."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file
from tiny_families import TINY

from embodrl.config import load_config
from embodrl.data.statistics import RobotStatistics
from embodrl.errors import CheckpointError, ConfigError
from embodrl.fields import read_fields
from embodrl.models.load_report import LoadReport
from embodrl.models.openpi import config as pi_config
from embodrl.models.openpi.config import PUBLIC, PiConfig, Variant
from embodrl.models.openpi.conventions import with_conventions
from embodrl.models.openpi.settings import PiArchitectureConfig
from embodrl.models.openpi.stats import read_openpi
from embodrl.models.openpi.weights import EMBEDDING, TIED_TO_EMBEDDING
from embodrl.models.pi.build import build_pi
from embodrl.models.pi.policy import PiPolicy
from embodrl.models.pi.spec import PiModelConfig
from embodrl.types import Observation, SamplingParams

SIZES: dict[str, Any] = {**TINY["pi"], "max_action_dim": 8, "num_images": 2, "max_prompt_tokens": 120}
OPENPI = {
    "action_dim": 8,
    "action_horizon": 4,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "max_token_len": 120,
}
LEROBOT = {"type": "pi05", "chunk_size": 4, "max_action_dim": 8, "tokenizer_max_length": 120}
VALUES = {"mean": [1.0, 2.0, 3.0], "std": [0.5, 0.5, 2.0], "q01": [0.0, 1.0, 2.0], "q99": [2.0, 3.0, 4.0]}


def build(variant: Variant = "pi05", seed: int = 0, pi: dict[str, Any] | None = None, **changes: Any):
    values = {"model_type": variant, "warm_start": None, "num_action_chunks": 2, "action_dim": 3}
    values |= {"pi": {**SIZES, **(pi or {})}, "value_head": {"hidden_sizes": (16,)}, "flow": {"num_steps": 3}}
    config = PiModelConfig.model_validate({**values, **changes})
    return build_pi(config, variant, torch.device("cpu"), torch.float32, seed)


def rearrange(directory: Path, folders: dict[str, float], raw: dict[str, Any]) -> None:
    """Make RLinf's layout of a saved policy: norm_stats.json in the folders, shifted by a number, no own section."""
    shutil.rmtree(directory / "assets")
    (directory / "checksums.json").unlink(missing_ok=True)
    for name, shift in folders.items():
        entry = {key: [value + shift for value in values] for key, values in VALUES.items()}
        entry["std"] = VALUES["std"]
        folder = directory / name
        folder.mkdir(parents=True)
        (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": {"actions": entry, "state": VALUES}}))
    (directory / "config.json").write_text(json.dumps(raw))


@pytest.fixture
def tiny_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the public variant names stand for the tiny sizes."""
    for variant in ("pi0", "pi05"):
        tiny = PiConfig.from_architecture(PiArchitectureConfig.model_validate(SIZES), variant, 640)
        public = {"siglip": tiny.siglip, "vlm": tiny.vlm, "expert": tiny.expert, "vocab_size": tiny.vocab_size}
        known = {**PUBLIC[variant].__dict__, **public}
        monkeypatch.setitem(PUBLIC, variant, PiConfig(**known))
    monkeypatch.setitem(pi_config.KNOWN_GEMMA, "gemma_2b", tiny.vlm)
    monkeypatch.setitem(pi_config.KNOWN_GEMMA, "gemma_300m", tiny.expert)


def prompt_ids(policy: PiPolicy) -> list[int]:
    state = np.array([[1.0, 2.0, 3.0]], np.float32)  # the middle of each range: bin 127 of 256
    images = np.zeros((1, 1, 16, 16, 3), np.uint8)
    inputs = policy.preprocess(Observation(images, state, ["push"], np.zeros(1, np.int32)))
    return inputs["input_ids"][0][inputs["attention_mask"][0]].tolist()


def wanted_ids(policy: PiPolicy, text: str) -> list[int]:
    tokenizer = policy.processor.tokenizer
    return [tokenizer.bos_id, *tokenizer.encode(text)]


WITHOUT = "push\n"
STATED = "Task: push, State: 127 127 127;\nAction: "
PADDED = "Task: push, State: 127 127 127 128 128 128 128 128;\nAction: "


# Statistics ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny_is_public")
@pytest.mark.parametrize("folder", ["physical-intelligence/libero", "local", "a/b/c"])
def test_rlinfs_statistics_are_found_in_any_folder(folder: str, tmp_path: Path):
    saved, _ = build("pi0")
    saved.save_pretrained(tmp_path)
    rearrange(tmp_path, {folder: 0.0}, OPENPI)
    policy, report = build("pi0", model_path=str(tmp_path))
    assert report.ok and policy.robot_stats.key == folder
    np.testing.assert_allclose(policy.stats.unnormalize(np.zeros(3)), VALUES["mean"])
    assert policy.model.config.relative_dims == (6 if "libero" in folder else 0)


@pytest.mark.usefixtures("tiny_is_public")
def test_of_several_sets_the_setting_chooses(tmp_path: Path):
    build()[0].save_pretrained(tmp_path)
    rearrange(tmp_path, {"lerobot/metaworld_mt50": 0.0, "assets/droid": 10.0}, OPENPI)
    with raises_code("statistics-choice", CheckpointError, 2, "droid", "lerobot/metaworld_mt50") as error:
        build(model_path=str(tmp_path))
    assert "model.unnorm_key" in error.value.hint
    policy, report = build(model_path=str(tmp_path), unnorm_key="droid")
    np.testing.assert_allclose(policy.stats.unnormalize(np.zeros(3)), [11.0, 12.0, 13.0])
    assert report.conventions["state in prompt"] == "yes (default of pi0.5)"
    policy, report = build(model_path=str(tmp_path), unnorm_key="lerobot/metaworld_mt50")
    assert report.conventions["state in prompt"] == "no (dataset lerobot/metaworld_mt50)"


def test_one_data_set_has_one_set_of_statistics(tmp_path: Path):
    for folder, low in (("assets/x", 0.0), ("x", 0.0)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "norm_stats.json").write_text(json.dumps({"norm_stats": {"actions": {"q01": [low]}}}))
    assert list(read_openpi(tmp_path)) == ["x"]
    (tmp_path / "x" / "norm_stats.json").write_text(json.dumps({"norm_stats": {"actions": {"q01": [1.0]}}}))
    with raises_code("policy-file", CheckpointError):
        read_openpi(tmp_path)


def test_statistics_that_link_elsewhere_are_refused(tmp_path: Path):
    here, secret = tmp_path / "policy", tmp_path / "secret.json"
    secret.write_text("{}")
    (here / "set").mkdir(parents=True)
    (here / "set" / "norm_stats.json").symlink_to(secret)
    with raises_code("policy-file"):
        read_openpi(here)


# Prompts -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny_is_public")
@pytest.mark.parametrize(
    ("key", "raw", "pi", "text", "origin"),
    [
        ("physical-intelligence/libero", {}, {}, WITHOUT, "no (dataset physical-intelligence/libero)"),
        ("physical-intelligence/maniskill", {}, {}, WITHOUT, "no (dataset physical-intelligence/maniskill)"),
        ("physical-intelligence/maniskill", {"discrete_state_input": True}, {}, STATED, "yes (config.json)"),
        (
            "physical-intelligence/maniskill",
            {},
            {"discrete_state": True},
            STATED,
            "yes (setting model.pi.discrete_state)",
        ),
        ("droid", {}, {}, STATED, "yes (default of pi0.5)"),
        ("droid", {"discrete_state_input": False}, {}, WITHOUT, "no (config.json)"),
        ("droid", {}, {"discrete_state": False}, WITHOUT, "no (setting model.pi.discrete_state)"),
        ("droid", {}, {"padded_state_in_prompt": True}, PADDED, "yes (default of pi0.5)"),
    ],
)
def test_the_state_in_the_prompt(
    key: str, raw: dict[str, Any], pi: dict[str, Any], text: str, origin: str, tmp_path: Path
):
    build()[0].save_pretrained(tmp_path)
    rearrange(tmp_path, {key: 0.0}, {**OPENPI, **raw})
    policy, report = build(model_path=str(tmp_path), pi=pi)
    assert prompt_ids(policy) == wanted_ids(policy, text)
    assert report.conventions["state in prompt"] == origin and origin in report.describe()


@pytest.mark.usefixtures("tiny_is_public")
def test_an_override_is_saved_with_the_policy(tmp_path: Path):
    build()[0].save_pretrained(tmp_path / "public")
    rearrange(tmp_path / "public", {"droid": 0.0}, OPENPI)
    changed, _ = build(model_path=str(tmp_path / "public"), pi={"discrete_state": False})
    changed.save_pretrained(tmp_path / "saved")
    policy, report = build(model_path=str(tmp_path / "saved"))
    assert prompt_ids(policy) == wanted_ids(policy, WITHOUT)
    assert report.conventions == {"state in prompt": "no (config.json)"}
    again, _ = build(warm_start=str(tmp_path / "saved"), pi={"discrete_state": True, "num_images": 3})
    assert prompt_ids(again) == wanted_ids(again, STATED)


def write_lerobot(directory: Path, raw: dict[str, Any], steps: list[str], train: dict[str, Any] | None) -> None:
    (directory / "checksums.json").unlink(missing_ok=True)
    shutil.rmtree(directory / "assets", ignore_errors=True)
    (directory / "config.json").write_text(json.dumps({**LEROBOT, **raw}))
    norm_map = {"STATE": "QUANTILES", "ACTION": "QUANTILES"}
    config = {"eps": 1e-8, "norm_map": norm_map}
    normalizer = {"registry_name": "normalizer_processor", "config": config, "state_file": "stats.safetensors"}
    named = [{"registry_name": name, "config": {}} for name in steps]
    (directory / "policy_preprocessor.json").write_text(json.dumps({"steps": [*named, normalizer]}))
    parts = ("observation.state", "action")
    tensors = {f"{part}.{name}": torch.tensor(value) for part in parts for name, value in VALUES.items()}
    save_file(tensors, directory / "stats.safetensors")
    if train is not None:
        (directory / "train_config.json").write_text(json.dumps(train))


@pytest.mark.usefixtures("tiny_is_public")
@pytest.mark.parametrize(
    ("raw", "steps", "train", "pi", "text", "origin"),
    [
        ({}, [], None, {}, PADDED, "before 0.4.2"),
        ({"rtc_config": None}, [], {"steps": 1}, {}, PADDED, "lerobot 0.4"),
        ({"rtc_config": None}, [], {"cudnn_deterministic": False}, {}, STATED, "0.5.0 or later"),
        ({"rtc_config": None, "use_relative_actions": False}, [], None, {}, STATED, "0.5.1 or later"),
        ({"rtc_config": None}, ["relative_actions_processor"], None, {}, STATED, "0.5.1 or later"),
        ({}, [], None, {"padded_state_in_prompt": False}, STATED, "setting model.pi.padded_state_in_prompt"),
        ({"use_relative_actions": False}, [], None, {"padded_state_in_prompt": True}, PADDED, "setting model.pi"),
    ],
)
def test_lerobots_padding_of_the_state(
    raw: dict[str, Any],
    steps: list[str],
    train: dict[str, Any] | None,
    pi: dict[str, Any],
    text: str,
    origin: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    build()[0].save_pretrained(tmp_path)
    write_lerobot(tmp_path, raw, steps, train)
    # A set of another layout in a folder does not take precedence over lerobot's own.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "norm_stats.json").write_text(json.dumps({"norm_stats": {}}))
    policy, report = build(model_path=str(tmp_path), pi=pi)
    assert prompt_ids(policy) == wanted_ids(policy, text)
    assert origin in report.conventions["padding of the state in prompt"] and not caplog.records


@pytest.mark.usefixtures("tiny_is_public")
@pytest.mark.parametrize(("apart", "text"), [(False, PADDED), (True, STATED)])
def test_weights_tell_lerobot_0_5_from_0_4(apart: bool, text: str, tmp_path: Path):
    """0.4 ties PaliGemma's embedding and output layer, and safetensors stores one; 0.5 stores both."""
    build()[0].save_pretrained(tmp_path)
    write_lerobot(tmp_path, {"rtc_config": None}, [], None)
    weights = load_file(tmp_path / "model.safetensors")
    if apart:
        weights[TIED_TO_EMBEDDING] = weights[EMBEDDING] + 1.0
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    policy, report = build(model_path=str(tmp_path))
    assert prompt_ids(policy) == wanted_ids(policy, text)
    assert policy.processor.config.dark_bars == (not apart)
    assert ("separately" if apart else "one") in report.conventions["padding of the state in prompt"]


def test_where_lerobots_files_do_not_say_a_warning_names_the_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Adapters without train_config.json: the base's weights may be of another version."""
    raw = {**LEROBOT, "rtc_config": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    fields = read_fields(tmp_path / "config.json")
    config, origins = with_conventions(
        PiConfig.from_dict(raw, "pi05"), PiArchitectureConfig(), fields, "lerobot", tmp_path
    )
    assert config.padded_state_in_prompt and config.dark_bars
    assert "assumed" in origins["padding of the state in prompt"] and "assumed" in origins[BARS]
    assert "model.pi.padded_state_in_prompt=false model.pi.dark_bars=false" in caplog.text


BARS = "bars beside pictures that are not square"


def lerobots_pixels(images: np.ndarray, side: int, bar: float) -> torch.Tensor:
    """``float32[N,3,side,side]`` as lerobot's pi0 prepares ``uint8[N,H,W,3]``; 0.4 has bars of -1, 0.5 of 0."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255.0
    height, width = images.shape[1:3]
    ratio = max(width / side, height / side)
    inner = int(height / ratio), int(width / ratio)
    pixels = torch.nn.functional.interpolate(pixels, inner, mode="bilinear", align_corners=False)
    (top, more), (left, wider) = divmod(side - inner[0], 2), divmod(side - inner[1], 2)
    return torch.nn.functional.pad(pixels, (left, left + wider, top, top + more), value=bar) * 2.0 - 1.0


@pytest.mark.usefixtures("tiny_is_public")
@pytest.mark.parametrize(
    ("variant", "raw", "pi", "bar"),
    [
        ("pi0", {}, {}, -1.0),
        ("pi05", {}, {}, -1.0),
        ("pi05", {"use_relative_actions": False}, {}, 0.0),
        ("pi05", {}, {"dark_bars": False}, 0.0),
        ("pi05", {"use_relative_actions": False}, {"dark_bars": True}, -1.0),
    ],
)
def test_bars_are_lerobots(variant: Variant, raw: dict[str, Any], pi: dict[str, Any], bar: float, tmp_path: Path):
    build(variant)[0].save_pretrained(tmp_path)
    write_lerobot(tmp_path, {**raw, "type": variant}, [], None)
    policy, report = build(variant, model_path=str(tmp_path), pi=pi)
    assert report.conventions[BARS].startswith("-3" if bar else "black")
    for shape in ((16, 16), (12, 20), (21, 12)):
        images = np.random.default_rng(0).integers(0, 256, (2, 1, *shape, 3), dtype=np.uint8)
        seen = Observation(images, np.ones((2, 3), np.float32), ["push"] * 2, np.zeros(2, np.int32))
        inputs = policy.preprocess(seen)
        assert ("picture_box" in inputs) == (bool(bar) and shape[0] != shape[1])
        found, wanted = policy.processor.pixels(inputs)[:, 0], lerobots_pixels(images[:, 0], 16, bar)
        assert torch.equal(found < -1.5, wanted < -1.5)
        torch.testing.assert_close(found, wanted, atol=1.01 / 255.0, rtol=0)  # rounded to whole levels
    seed = torch.Generator().manual_seed(0)
    taken = policy.predict_action_batch(seen, "train", SamplingParams(), seed, compute_values=False)
    again = policy.evaluate_actions(taken.forward_inputs, SamplingParams(), compute_values=False)
    torch.testing.assert_close(again.logprobs, taken.logprobs)
    if variant == "pi05":
        changed = replace(policy.model.config, padded_state_in_prompt=False)
        policy.model.config = changed
        refused = raises_code("lerobot-can-not-express") if bar else nullcontext()
        with refused:
            policy.save_lerobot(tmp_path / "exported", ["front"])


@pytest.mark.usefixtures("tiny_is_public")
@pytest.mark.parametrize("where", ["policy_preprocessor.json", "policy_postprocessor.json"])
def test_steps_of_lerobots_processors_that_are_left_out(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    build()[0].save_pretrained(tmp_path)

    def load(step: dict[str, Any]) -> None:
        (tmp_path / "policy_postprocessor.json").unlink(missing_ok=True)
        write_lerobot(tmp_path, {"use_relative_actions": False}, [], None)
        path = tmp_path / where
        content = json.loads(path.read_text()) if path.exists() else {"steps": []}
        content["steps"].append(step)
        path.write_text(json.dumps(content))
        build(model_path=str(tmp_path))

    for name in ("relative_actions_processor", "absolute_actions_processor"):
        load({"registry_name": name, "config": {"enabled": False}})
        with raises_code("checkpoint-unsupported"):
            load({"registry_name": name, "config": {"enabled": True}})
    assert not caplog.records
    load({"registry_name": "vla_jepa_binarize_gripper", "config": {}})
    assert "vla_jepa_binarize_gripper" in caplog.text
    load({"class": "my.robot.FlipPictures"})
    assert "my.robot.FlipPictures" in caplog.text


@pytest.mark.usefixtures("tiny_is_public")
@pytest.mark.parametrize(
    ("changes", "mode", "refused"),
    [
        ({}, "QUANTILES", False),
        ({"mean": [9.0, 9.0, 9.0]}, "QUANTILES", False),  # not used
        ({"q99": [2.0, 3.0, 4.5]}, "QUANTILES", True),
        ({}, "MEAN_STD", True),
    ],
)
def test_actions_are_scaled_back_as_they_were_scaled(
    changes: dict[str, list[float]], mode: str, refused: bool, tmp_path: Path
):
    """lerobot acts with policy_postprocessor.json and trains with policy_preprocessor.json."""
    build()[0].save_pretrained(tmp_path)
    write_lerobot(tmp_path, {"use_relative_actions": False}, [], None)
    save_file({f"action.{n}": torch.tensor(v) for n, v in {**VALUES, **changes}.items()}, tmp_path / "back.safetensors")
    config = {"norm_map": {"STATE": "QUANTILES", "ACTION": mode}}
    step = {"registry_name": "unnormalizer_processor", "config": config, "state_file": "back.safetensors"}
    (tmp_path / "policy_postprocessor.json").write_text(json.dumps({"steps": [step]}))
    with raises_code("policy-file") if refused else nullcontext():
        build(model_path=str(tmp_path))


@pytest.mark.usefixtures("tiny_is_public")
@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_relative_actions_of_an_unknown_dataset_are_asked_for(
    variant: Variant, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """openpi's DeltaActions follow from the TrainConfig's name alone; a fine-tune on data of one's own does not say."""
    build(variant)[0].save_pretrained(tmp_path)
    rearrange(tmp_path, {"assets/me/my_libero": 0.0}, {**OPENPI, "discrete_state_input": False})
    named = "action dimensions relative to the state"
    _, report = build(variant, model_path=str(tmp_path))
    assert report.conventions[named].startswith("0 (assumed") and "model.pi.relative_dims=6" in caplog.text
    caplog.clear()
    absolute, report = build(variant, model_path=str(tmp_path), pi={"relative_dims": 0})
    relative, _ = build(variant, model_path=str(tmp_path), pi={"relative_dims": 2})
    assert report.conventions[named] == "0 (setting model.pi.relative_dims)" and not caplog.records
    seen = Observation(
        np.zeros((1, 1, 16, 16, 3), np.uint8), np.array([[3.0, 5.0, 7.0]], np.float32), ["push"], np.zeros(1, np.int32)
    )
    first, second = (
        policy.predict_action_batch(
            seen, "eval", SamplingParams(), torch.Generator().manual_seed(0), compute_values=False
        ).actions
        for policy in (absolute, relative)
    )
    np.testing.assert_allclose(second - first, np.broadcast_to([3.0, 5.0, 0.0], first.shape), atol=1e-5)
    given = tmp_path / "robot.json"
    complete = {**VALUES, "min": VALUES["q01"], "max": VALUES["q99"]}
    RobotStatistics("robot", complete, complete, "as_is", 4, 1).write(given)
    with raises_code("statistics-relative"):
        build(variant, model_path=str(tmp_path), stats_path=str(given), pi={"relative_dims": 2})
    build(variant, model_path=str(tmp_path), stats_path=str(given))
    assert not caplog.records, "actions of the user's statistics are absolute"


@pytest.mark.parametrize("name", ["use_visual_memory", "use_proprioceptive_memory"])
def test_lerobots_memory_is_refused(name: str):
    with raises_code("checkpoint-unsupported", CheckpointError, name):
        PiConfig.from_dict({**LEROBOT, name: True}, "pi05")
    assert PiConfig.from_dict({**LEROBOT, name: False}, "pi05").variant == "pi05"


# Full size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "key", "horizon", "expected"),
    [
        ("pi05", "lerobot/metaworld_mt50", 5, (False, 0)),
        ("pi05", "InternRobotics/InternData-Calvin_ABC", 5, (False, 0)),
        ("pi05", "RLinf/IsaacLab-Stack-Cube-Data", 10, (False, 0)),
        ("pi05", "physical-intelligence/behavior", 32, (True, 0)),
        ("pi0", "physical-intelligence/behavior", 50, (False, 6)),
        ("pi0", "lerobot/metaworld_mt50", 5, (False, 0)),
        ("pi0", "physical-intelligence/libero", 50, (False, 6)),
    ],
)
def test_configurations_of_rlinfs_recipes(
    variant: Variant, key: str, horizon: int, expected: tuple[bool, int], tmp_path: Path
):
    raw = {**OPENPI, "action_dim": 32, "action_horizon": horizon, "max_token_len": 200}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    fields = read_fields(tmp_path / "config.json")
    config = PiConfig.from_dict(raw, variant)
    found, _ = with_conventions(config, PiArchitectureConfig(), fields, key, tmp_path)
    assert (found.discrete_state, found.relative_dims) == expected and found.action_horizon == horizon
    assert found.max_prompt_tokens == 200 and not found.padded_state_in_prompt


def two_arms(directory: Path, key: str, **pi: Any) -> tuple[PiPolicy, LoadReport]:
    """Return a pi0 for 14 numbers, whose statistics change nothing."""
    build("pi0", action_dim=14, pi={"max_action_dim": 16})[0].save_pretrained(directory)
    rearrange(directory, {}, {**OPENPI, "action_dim": 16})
    entry = {"mean": [0.0] * 14, "std": [1.0] * 14, "q01": [-1.0] * 14, "q99": [1.0] * 14}
    (directory / "assets" / key).mkdir(parents=True)
    content = {"norm_stats": {"actions": entry, "state": entry}}
    (directory / "assets" / key / "norm_stats.json").write_text(json.dumps(content))
    return build("pi0", model_path=str(directory), action_dim=14, pi={"max_action_dim": 16, **pi})


def seen_by_two_arms(state: Any) -> Observation:
    images = np.zeros((1, 1, 16, 16, 3), np.uint8)
    return Observation(images, np.asarray([state], np.float32), ["push"], np.zeros(1, np.int32))


def acted(policy: PiPolicy, seen: Observation) -> Any:
    draws = torch.Generator().manual_seed(0)
    return policy.predict_action_batch(seen, "eval", SamplingParams(), draws, compute_values=False).actions[0]


@pytest.mark.usefixtures("tiny_is_public")
def test_joints_of_two_arms_are_relative_and_their_grippers_absolute(tmp_path: Path):
    """RoboTwin's: openpi's DeltaActions with make_bool_mask(6, -1, 6, -1)."""
    key = "physical-intelligence/robotwin"
    policy, report = two_arms(tmp_path / "mask", key)
    named = "action dimensions relative to the state"
    assert report.conventions[named] == f"13 but 6 (dataset {key})" and "states and actions" not in report.conventions
    absolute, _ = two_arms(tmp_path / "absolute", key, relative_dims=0)
    assert absolute.model.config.absolute_dims == ()
    state = np.linspace(0.1, 1.4, 14)
    seen = seen_by_two_arms(state)
    added = state * ([1] * 6 + [0] + [1] * 6 + [0])
    found = acted(policy, seen) - acted(absolute, seen)
    np.testing.assert_allclose(found, np.broadcast_to(added, found.shape), atol=1e-5)
    actions = np.full((1, len(found), 14), 0.5)
    target = policy.sft_inputs(seen, torch.from_numpy(actions))["target"][0, : len(found), :14]
    np.testing.assert_allclose(target, np.broadcast_to(0.5 - added, found.shape), atol=1e-6)
    policy.save_pretrained(tmp_path / "again")
    again, _ = build("pi0", model_path=str(tmp_path / "again"), action_dim=14)
    np.testing.assert_array_equal(acted(again, seen), acted(policy, seen))
    with raises_code("lerobot-can-not-express"):
        policy.save_lerobot(tmp_path / "lerobot", ["base"])


@pytest.mark.usefixtures("tiny_is_public")
def test_alohas_arms_are_converted_to_openpis_units(tmp_path: Path):
    """Joints 1 and 2 of each arm turn the other way; grippers are openings in states, and angles in actions."""
    policy, report = two_arms(tmp_path / "aloha", "trossen")
    assert report.conventions["states and actions"] == "ALOHA's, converted to openpi's (dataset trossen)"
    plain, _ = two_arms(tmp_path / "plain", "trossen", relative_dims=0, aloha_units=False)
    signs = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1])
    state = np.linspace(0.1, 1.4, 14)
    state[[6, 13]] = 0.0, 1.0
    # Openings of 18.44 and 58 mm are angles of the crank, whose arms have 36 and 22 mm: by the law of cosines.
    closed, opened = ((0.022**2 + x**2 - 0.036**2) / (2 * 0.022 * x) for x in (0.01844, 0.058))
    angles = (np.arcsin(np.clip([closed, opened], -1, 1)) - 0.5476) / (1.6296 - 0.5476)
    in_pi = state * signs
    in_pi[[6, 13]] = angles
    np.testing.assert_allclose(angles, [-1.0799, 0.9456], atol=1e-4)
    predicted = acted(plain, seen_by_two_arms(in_pi))
    wanted = (predicted + in_pi) * signs
    wanted[:, [6, 13]] = (predicted[:, [6, 13]] + 0.5476 + 0.6213) / (1.4910 + 0.6213)
    seen = seen_by_two_arms(state)
    np.testing.assert_allclose(acted(policy, seen), wanted, atol=1e-5)

    actions = np.random.default_rng(0).uniform(0, 1, (1, len(wanted), 14))
    target = policy.relative_to(actions, seen)
    assert target[0, 0, 6] == pytest.approx(actions[0, 0, 6] * 2.1123 - 0.6213 - 0.5476)
    assert target[0, 0, 1] == pytest.approx(-actions[0, 0, 1] + state[1])
    np.testing.assert_allclose(policy.absolute_from(target, seen), actions, atol=1e-6)
    with raises_code("state-size"):
        acted(policy, seen_by_two_arms(state[:7]))


@pytest.mark.usefixtures("tiny_is_public")
def test_what_is_unknown_of_two_arms_is_asked_for(tmp_path: Path):
    with raises_code("pi-joints"):
        two_arms(tmp_path / "mobile", "trossen_mobile")
    known = {"relative_dims": 13, "absolute_dims": (6,), "aloha_units": True}
    assert two_arms(tmp_path / "set", "trossen_mobile", **known)[0].model.config.aloha_units
    with raises_code("pi-joints"):
        two_arms(tmp_path / "useless", "droid", relative_dims=6, absolute_dims=(6,))
    with raises_code("pi-joints"):
        build("pi0", pi={"aloha_units": True})
    simulated, _ = two_arms(tmp_path / "sim", "lerobot/aloha_sim_transfer_cube_human")
    assert simulated.model.config.relative_dims == 0 and simulated.model.config.aloha_units


# What train_pytorch.py writes ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny_is_public")
def test_without_config_json_the_hint_has_its_content(tmp_path: Path):
    saved, _ = build()
    saved.save_pretrained(tmp_path)
    rearrange(tmp_path, {"assets/droid": 0.0}, OPENPI)
    (tmp_path / "config.json").unlink()
    with raises_code("policy-file", CheckpointError, "config.json") as error:
        build(model_path=str(tmp_path))
    with raises_code("checkpoint-exists", ConfigError) as refused:
        load_config(["model=pi05", f"model.model_path={tmp_path}", "env.include_state=true"])
    [problem] = [p for p in refused.value.problems if p.key == "model.model_path"]
    assert problem.hint == error.value.hint
    stated = problem.hint[problem.hint.index("{") : problem.hint.index("}") + 1]
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(stated), "action_dim": 8, "action_horizon": 4}))
    report: LoadReport
    _, report = build(model_path=str(tmp_path), pi={"discrete_state": False})
    assert report.ok
