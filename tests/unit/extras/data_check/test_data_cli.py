"""`embodrl data check` and `data stats` on datasets of others: names of features, and instructions that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embodrl.cli.main import app

pytest.importorskip("pyarrow")
from lerobot_files import build


def renamed(root: Path) -> Path:
    def columns(content: dict[str, Any]) -> None:
        content["actions"] = content.pop("action")

    def info(content: dict[str, Any]) -> None:
        content["features"]["actions"] = content["features"].pop("action")

    return build(root, columns=columns, info=info)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(list(arguments), prog_name="embodrl")
    return int(ended.value.code or 0)


def test_statistics_of_features_with_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = str(renamed(tmp_path / "d")), tmp_path / "stats.json"
    assert run("data", "stats", data, "-o", str(output)) == 1
    assert "dataset-no-actions" in capsys.readouterr().err
    assert run("data", "stats", data, "-o", str(output), "sft.keys={action: actions}") == 0
    assert len(json.loads(output.read_text())["action"]["mean"]) == 7
    assert run("data", "stats", data, "-o", str(output), "sft.max_steps=3") == 2
    assert "data-stats-setting" in capsys.readouterr().err


def test_instructions_are_encoded_where_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(build(tmp_path / "d", tasks=("pick it up " * 100,)))
    run("data", "check", data)
    assert "instructions were not encoded" in capsys.readouterr().out
    report = tmp_path / "report.json"
    run("data", "check", data, "model=smolvla", "--json", str(report))
    assert "prompt-too-long" in {finding["code"] for finding in json.loads(report.read_text())["findings"]}
    short = str(build(tmp_path / "short"))
    run("data", "check", short, "model=smolvla", "--json", str(report))
    content = json.loads(report.read_text())
    assert content["encoded"] == 1 and "prompt-too-long" not in {finding["code"] for finding in content["findings"]}


def test_held_out_episodes_are_those_of_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "check", str(tmp_path), "--held-out") == 2
    assert "held-out-without-policy" in capsys.readouterr().err
