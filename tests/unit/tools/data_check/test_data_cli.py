"""`embodrl data check` and `data stats` on datasets of others: names of features, and instructions that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expect import raises_code

from embodrl.cli.main import app
from embodrl.config.schema import SftConfig
from embodrl.data.imitation import hold_out, load_configured_demos, load_untrained_demos
from embodrl.data.load import load_demos
from embodrl.pipelines.load import load_config
from embodrl.tools.data_check.check import _check_split

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


@pytest.mark.parametrize("held_out", ["sft.val_episodes=1", "sft.max_episodes=1"])
def test_episodes_that_a_policy_was_not_trained_on_are_those_of_its_settings(tmp_path: Path, held_out: str) -> None:
    data = build(tmp_path / "d")
    config = load_config(["env=dataset", "model=cnn", f"sft.data_dir={data}", held_out], verb="sft").config
    trained, apart = load_untrained_demos(config)
    whole = load_demos(data)
    for episode, found in enumerate((trained, apart)):
        assert found.num_episodes == 1
        np.testing.assert_array_equal(found.actions, whole.actions[whole.episode == episode])
    if config.sft.val_episodes:
        kept, held = hold_out(load_configured_demos(config), config.sft)  # as `embodrl sft` does
        assert held is not None and (held.checksum, kept.checksum) == (apart.checksum, trained.checksum)


def test_with_both_settings_the_held_out_episodes_are_among_the_first(tmp_path: Path) -> None:
    data = build(tmp_path / "d")
    both = ["sft.max_episodes=2", "sft.val_episodes=1"]
    config = load_config(["env=dataset", "model=cnn", f"sft.data_dir={data}", *both], verb="sft").config
    whole = load_demos(data)
    np.testing.assert_array_equal(load_untrained_demos(config)[1].actions, whole.actions[whole.episode == 1])


@pytest.mark.parametrize("settings", [(), ("sft.max_episodes=2",)])
def test_a_policy_that_was_trained_on_all_episodes_has_none_held_out(tmp_path: Path, settings: tuple[str, ...]) -> None:
    data = build(tmp_path / "d")
    config = load_config(["env=dataset", "model=cnn", f"sft.data_dir={data}", *settings], verb="sft").config
    with raises_code("no-held-out-episodes"):
        load_untrained_demos(config)


def test_what_is_held_out_is_what_the_run_of_the_policy_says(tmp_path: Path) -> None:
    of_no_run, now = SftConfig(), SftConfig(data_dir=str(tmp_path), val_episodes=1)
    assert _check_split(of_no_run, now, tmp_path) == [] == _check_split(now, now, tmp_path)
    with raises_code("held-out-settings"):
        _check_split(SftConfig(data_dir=str(tmp_path)), now, tmp_path)
    (finding,) = _check_split(now, now, tmp_path / "other")
    assert (finding.level, finding.code) == ("warning", "held-out-other-dataset")
