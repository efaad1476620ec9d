"""`embodrl export --push`: what reaches the hub, and what does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from fake_hub import FakeHub, serving
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.config import load_config
from embodrl.config.schema import Config
from embodrl.errors import EmbodrlError
from embodrl.hub import HubName
from embodrl.storage.checkpoint import Checkpoint
from embodrl.tools.export.push import check_push, push

TOKEN = "hf_secret"
NAME = HubName("me/push-cube")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with serving(monkeypatch, tmp_path / "home") as running:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an evaluation, and an exported policy."""
    directory = tmp_path / "run"
    (directory / "eval-20260101-000000" / "videos").mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"iteration": 3}\n')
    result = {"success_rate": 0.75, "interval": [0.5, 0.9], "episodes": 16, "weights": f"{Path.home()}/policy"}
    (directory / "eval-20260101-000000" / "eval.json").write_text(json.dumps(result))
    (directory / "eval-20260101-000000" / "videos" / "0.mp4").write_bytes(b"video")
    (directory / "policy").mkdir()
    (directory / "policy" / "config.json").write_text("{}")
    (directory / "policy" / "model.safetensors").write_bytes(b"weights")
    return directory


def pushed(run: Path, public: bool = False, name: HubName = NAME) -> str:
    checkpoint = cast(Checkpoint, SimpleNamespace(path=run / "checkpoints" / "step_3", step=3))
    config = load_config(["env=toy", f"runner.output_dir={Path.home()}/runs"]).config
    return push(name, run / "policy", checkpoint, config, public, "mit")


def content(server: FakeHub) -> dict[str, bytes]:
    repository = server.models[NAME.repository]
    return repository.commits[repository.refs["main"]]


def test_what_is_pushed(server: FakeHub, run: Path) -> None:
    assert check_push("me/push-cube", public=False) == NAME
    assert pushed(run).startswith(f"{server.url}/me/push-cube/commit/")
    files = content(server)
    assert server.models[NAME.repository].private
    assert files["model.safetensors"] == b"weights" and files["videos/0.mp4"] == b"video"
    assert set(files) == {
        *("config.json", "model.safetensors", "README.md"),
        *("training/config.yaml", "training/metrics.jsonl", "eval.json", "videos/0.mp4"),
    }
    everything = b"".join(files.values())
    assert TOKEN.encode() not in everything and str(Path.home()).encode() not in everything
    assert yaml.safe_load(files["training/config.yaml"])["env"]["env_type"] == "toy"


def test_the_card(server: FakeHub, run: Path) -> None:
    pushed(run)
    _, front, text = content(server)["README.md"].decode().split("---\n", 2)
    card: dict[str, Any] = yaml.safe_load(front)
    assert card["license"] == "mit" and card["pipeline_tag"] == "robotics" and "openvla" in card["tags"]
    assert card["model-index"][0]["results"][0]["metrics"] == [{"type": "success_rate", "value": 0.75}]
    assert "75.0 % of 16 episodes (95 %: 50.0 to 90.0 %)" in text
    assert "model.model_path=me/push-cube" in text and "(videos/0.mp4)" in text


def test_a_second_push_keeps_what_is_there(server: FakeHub, run: Path) -> None:
    pushed(run)
    (run / "policy" / "model.safetensors").write_bytes(b"better")
    pushed(run)
    assert content(server)["model.safetensors"] == b"better" and len(server.models[NAME.repository].commits) == 3


def test_a_public_repository_is_no_surprise(server: FakeHub, run: Path) -> None:
    server.model("me/push-cube", {})
    with pytest.raises(EmbodrlError) as refused:
        check_push("me/push-cube", public=False)
    assert refused.value.code == "hub-public"
    assert check_push("me/push-cube", public=True) == NAME
    server.models.clear()
    pushed(run, public=True)
    assert not server.models[NAME.repository].private


def test_a_wrong_token_is_not_shown(server: FakeHub, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.token = "hf_another"
    with pytest.raises(EmbodrlError) as refused:
        pushed(run)
    assert refused.value.code == "hub-token"
    assert TOKEN not in str(refused.value) + caplog.text


def test_refused_before_the_export(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("name", "me/name@v1", "hf://datasets/me/name"):
        with pytest.raises(EmbodrlError) as refused:
            check_push(text, public=False)
        assert refused.value.code == "hub-name"
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(EmbodrlError) as refused:
        check_push("me/name", public=False)
    assert refused.value.code == "hub-access"
    assert not server.requests


def test_the_command(server: FakeHub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`embodrl export --push` checks the name first, exports, and uploads what was exported."""
    config = load_config(["env=toy"]).config
    checkpoint = SimpleNamespace(path=run / "checkpoints" / "step_3", step=3)

    def export(source: Path, directory: Path, *_: object) -> tuple[object, Config]:
        shutil.copytree(source / "policy", directory)
        return checkpoint, config

    monkeypatch.setattr("embodrl.tools.export.checkpoint.export_checkpoint", export)
    refused = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "no"), "--push", "no-owner"])
    assert refused.exit_code == 2 and not (tmp_path / "no").exists()
    arguments = ["export", str(run), str(tmp_path / "out"), "--push", "me/push-cube", "--license", "mit"]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0 and f"{server.url}/me/push-cube/commit/" in answer.output, answer.output
    assert content(server)["model.safetensors"] == b"weights" and b"license: mit" in content(server)["README.md"]


def test_a_run_of_fine_tuning_says_so(server: FakeHub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodrl.tools.export.push.is_sft_run", lambda directory: directory == run)
    (run / "sft_metrics.jsonl").write_text('{"step": 3}')
    pushed(run)
    assert b"fine-tuning on demonstrations" in content(server)["README.md"]
    assert content(server)["training/metrics.jsonl"] == b'{"step": 3}'
