"""Repositories of the hub in a configuration: small files first, for the rules; then one commit for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from fake_hub import FakeHub, serving
from huggingface_hub import constants
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.config import load_config
from embodrl.config.policy_card import ASSETS, policy_directory
from embodrl.config.schema import ModelConfig
from embodrl.data.demos import DemoEpisode
from embodrl.data.imitation import load_configured_demos
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.errors import CheckpointError
from embodrl.models.common.checkpoint import resolve
from embodrl.models.registry import build_policy

ARGUMENTS = ["env=toy", "model=openvla", "model.model_path=org/tiny"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with serving(monkeypatch, tmp_path / "home") as running:
        yield running


def files_of(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def state_of(model: ModelConfig) -> dict[str, torch.Tensor]:
    return build_policy(model, device="cpu", dtype=torch.float32, seed=0)[0].state_dict()


def test_a_policy_of_the_hub_is_that_of_its_directory(server: FakeHub) -> None:
    commit = server.model("org/tiny", files_of(ASSETS / "openvla_tiny"))
    loaded = load_config([*ARGUMENTS, "model.warm_start=null"], verb="eval")
    model = loaded.config.model
    assert model.model_path == f"org/tiny@{commit}"
    assert "hub-commit" in {note.code for note in loaded.notes}
    assert not [line for line in server.requests if "safetensors" in line]  # not before the rules have passed
    found = policy_directory(model)
    assert found is not None and found.name == commit
    there, here = state_of(model), state_of(model.model_copy(update={"model_path": str(ASSETS / "openvla_tiny")}))
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in here)


def test_rules_read_what_is_there(server: FakeHub) -> None:
    """The card says which tasks the policy knows, though its weights were not fetched."""
    server.model("org/tiny", files_of(ASSETS / "openvla_tiny"))
    notes = load_config(ARGUMENTS, verb="eval").notes
    assert any("the policy was trained in maniskill" in note.message for note in notes)


def test_a_run_keeps_its_commit(server: FakeHub) -> None:
    older = server.model("org/tiny", files_of(ASSETS / "openvla_tiny"))
    path = load_config(ARGUMENTS, verb="train").config.model.model_path
    server.model("org/tiny", {"config.json": b"{}"})
    assert load_config([*ARGUMENTS[:2], f"model.model_path={path}"], verb="train").config.model.model_path == path
    assert resolve(str(path)).name == older


def test_what_can_not_be_fetched_is_a_problem_among_others(server: FakeHub) -> None:
    with raises_code("hub-missing") as raised:
        load_config([*ARGUMENTS, "runner.max_iterations=0"], verb="train")
    codes = {problem.code: problem for problem in raised.value.problems}
    assert len(codes) == 2
    assert codes["hub-missing"].key == "model.model_path" and "command line" in codes["hub-missing"].origin


def test_without_a_verb_nothing_is_fetched(server: FakeHub) -> None:
    assert load_config(ARGUMENTS).config.model.model_path == "org/tiny"
    assert not server.requests


def test_offline_and_not_in_the_cache(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as caught:
        resolve("org/tiny")
    assert caught.value.code == "hub-offline" and "model.model_path" in caught.value.hint


def test_fine_tuning_on_data_of_the_hub(server: FakeHub, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    writer = LeRobotWriter(tmp_path / "push", ("top",), 20)
    pictures = rng.integers(0, 256, (12, 1, 32, 32, 3), dtype=np.uint8)
    actions = rng.uniform(-1, 1, (12, 7)).astype(np.float32)
    writer.add(DemoEpisode(pictures, np.zeros((12, 0), np.float32), actions, "push", "Push", 0, True))
    writer.close({})
    commit = server.dataset("org/push", files_of(tmp_path / "push"), "v3.0")
    loaded = load_config(["env=dataset", "model=openvla", "sft.data_dir=hf://datasets/org/push@v3.0"], verb="sft")
    assert loaded.config.sft.data_dir == f"hf://datasets/org/push@{commit}"
    assert [(camera.height, camera.width) for camera in loaded.config.env.cameras] == [(32, 32)]
    assert not [line for line in server.requests if ".mp4" in line or (".parquet" in line and "/data/" in line)]
    assert len(load_configured_demos(loaded.config).actions) == 12


def test_the_command(server: FakeHub, tmp_path: Path) -> None:
    server.model("org/tiny", files_of(ASSETS / "openvla_tiny"), "v1")
    to = tmp_path / "here"
    answer = CliRunner().invoke(app, ["fetch", "org/tiny", "--revision", "v1", "--to", str(to)])
    assert answer.exit_code == 0, answer.output
    assert files_of(ASSETS / "openvla_tiny").items() <= files_of(to).items()
    assert CliRunner().invoke(app, ["fetch", "org/tiny@v1", "--to", str(to)]).exit_code == 0
    cached = CliRunner().invoke(app, ["fetch", "hf://org/tiny@v1"])
    assert f"model.model_path=org/tiny@{server.models['org/tiny'].refs['v1']}" in cached.output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["no-owner"], "hub-name"),
        (["org/tiny@v1", "--revision", "v2"], "hub-name"),
        (["org/tiny", "--revision", "../x"], "hub-name"),
        (["org/tiny", "--to", "."], "output-exists"),
        (["org/tiny", "--dataset"], "hub-missing"),
    ],
)
def test_the_command_refuses(server: FakeHub, arguments: list[str], code: str) -> None:
    server.model("org/tiny", {"config.json": b"{}"})
    answer = CliRunner().invoke(app, ["fetch", *arguments])
    assert answer.exit_code in (1, 2) and f"code: {code}" in answer.output


@pytest.mark.parametrize("preset", ["openvla_libero", "openvla_oft_libero", "gr00t_libero"])
def test_presets_of_published_pairs_ask_for_the_weights(preset: str) -> None:
    arguments = ["env=libero_spatial", f"model={preset}"]
    with raises_code("policy-has-weights"):
        load_config(arguments, verb="eval")
    random = [*arguments, "model.random_weights=true"]
    with raises_code("statistics-have-weights"):
        load_config(random, verb="eval")
    load_config([*random, f"model.stats_path={__file__}"], verb="eval")
    load_config(arguments, verb="sft")
