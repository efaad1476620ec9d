"""Presets in directories of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expect import raises_code
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.config import load_config
from embodrl.errors import ConfigError
from embodrl.tools.sweep.combinations import expand_sweep

MY_TOY = "# A short one.\ndefaults:\n  - toy\n  - _self_\n\nmax_episode_steps: 12\n"
MINE = "# @package _global_\n# Mine.\ndefaults:\n  - override /env: my_toy\n\nrunner: {max_iterations: 3}\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a preset of an environment and an experiment; none in the home directory."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = tmp_path / "my presets, it's"
    write(directory / "env" / "my_toy.yaml", MY_TOY)
    write(directory / "experiment" / "mine.yaml", MINE)
    return directory


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def codes(overrides: list[str], directory: Path) -> set[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, {"presets": {"dirs": [directory]}})
    return {(problem.key, problem.code) for problem in caught.value.problems}


def test_a_preset_of_ones_own_lies_over_the_one_that_it_names(own: Path) -> None:
    loaded = load_config(["env=my_toy"], {"presets": {"dirs": [own]}})
    assert loaded.config.env.env_type == "toy" and loaded.config.env.max_episode_steps == 12
    origin = loaded.origins["env.max_episode_steps"]
    assert (origin.source, origin.line, origin.by_user) == (str(own / "env" / "my_toy.yaml"), 6, True)
    assert loaded.choices == {"env": "my_toy"}


def test_an_experiment_of_ones_own_chooses_presets_of_ones_own(own: Path) -> None:
    loaded = load_config([], {"presets": {"dirs": str(own), "experiment": "mine"}})
    assert (loaded.config.runner.max_iterations, loaded.config.env.max_episode_steps) == (3, 12)


def test_a_file_names_directories_relative_to_itself(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "mine.yaml", f'presets: {{dirs: ["{own.name}"], env: my_toy}}\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config([], path).config.env.max_episode_steps == 12


def test_the_directory_in_the_home_directory_is_always_searched(own: Path, tmp_path: Path) -> None:
    own.rename(write(tmp_path / "home" / "embodrl" / "x", "").parent / "presets")  # not a group: nothing below counts
    with raises_code("preset-unknown"):
        load_config(["env=my_toy"])
    write(tmp_path / "home" / "embodrl" / "env" / "my_toy.yaml", MY_TOY)
    assert load_config(["env=my_toy"]).config.env.max_episode_steps == 12


def test_an_edited_preset_is_read_again(own: Path) -> None:
    assert load_config(["experiment=mine"], {"presets": {"dirs": own}}).config.env.max_episode_steps == 12
    write(own / "experiment" / "mine.yaml", MINE.replace("my_toy", "toy") + "# longer\n")
    assert load_config(["experiment=mine"], {"presets": {"dirs": own}}).config.env.max_episode_steps != 12


def test_a_misspelt_name_is_answered_with_the_nearest_of_both(own: Path) -> None:
    for wrong, near in (("my_tou", "my_toy"), ("tooy", "toy")):
        with pytest.raises(ConfigError) as caught:
            load_config([f"env={wrong}"], {"presets": {"dirs": [own]}})
        assert [problem.nearest for problem in caught.value.problems] == [near]


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("env/toy.yaml", "max_episode_steps: 3\n", ("presets.dirs", "preset-clash")),
        ("envs/other.yaml", "max_episode_steps: 3\n", ("presets.dirs", "preset-directory")),
        ("other.yaml", "max_episode_steps: 3\n", ("presets.dirs", "preset-directory")),
        ("env/of mine.yaml", "max_episode_steps: 3\n", ("presets.dirs", "preset-directory")),
        ("env/my_toy.yaml", "defaults: [toyy]\n", ("env", "preset-unknown")),
        ("env/my_toy.yaml", "defaults: [my_toy]\n", ("defaults", "preset-defaults")),
        ("env/my_toy.yaml", "defaults: toy\n", ("defaults", "preset-defaults")),
        ("env/my_toy.yaml", "defaults: [{/model: mlp}]\n", ("defaults", "preset-defaults")),
        ("env/my_toy.yaml", "# @package _global_\ndefaults: [{override /env: toy}]\n", ("defaults", "preset-defaults")),
        (
            "env/my_toy.yaml",
            "# @package _global_\ndefaults: [{override /runner: debug}, toy]\n",
            ("defaults", "preset-defaults"),
        ),
        ("env/my_toy.yaml", "max_episode_steps: [\n", ("(file)", "config-yaml-syntax")),
        ("env/my_toy.yaml", "max_episode_stepz: 3\n", ("env.max_episode_stepz", "config-unknown-key")),
        ("env/my_toy.yaml", "defaults: [{override /model: mlp}]\n", ("env", "preset-package")),
    ],
)
def test_what_is_wrong_in_a_directory_is_told(own: Path, path: str, text: str, expected: tuple[str, str]) -> None:
    write(own / path, text)
    assert expected in codes(["env=my_toy"], own)


def test_a_directory_that_is_not_there_is_an_error(own: Path) -> None:
    assert ("presets.dirs", "preset-directory") in codes([], own / "missing")
    with raises_code("preset-directory"):
        load_config(["presets.dirs={a: 1}"])


def test_presets_that_anybody_can_write_run_no_code(own: Path) -> None:
    path = write(own / "env" / "my_toy.yaml", MY_TOY + "python: /tmp/program\n")
    path.chmod(0o666)
    assert ("env.python", "settings-run-code") in codes(["env=my_toy"], own)


@pytest.mark.parametrize("beside", [None, "metrics.jsonl"])
def test_a_run_from_elsewhere_names_no_directories(own: Path, tmp_path: Path, beside: str | None) -> None:
    run = tmp_path / "unpacked"
    write(run / "config.yaml", f'presets: {{dirs: ["{own}"], env: my_toy}}\n')
    if beside:
        write(run / beside, "")
    with raises_code("settings-run-code"):
        load_config([], run / "config.yaml" if beside else run)


def test_the_command_line_names_directories_and_lists_what_is_in_them(own: Path) -> None:
    run = CliRunner().invoke
    outcome = run(app, ["config", "validate", "env=my_toy", "--presets", str(own)])
    assert outcome.exit_code == 0, outcome.output
    listed = json.loads(run(app, ["list", "presets", "--json", "--presets", str(own)]).stdout)["presets"]
    mine = next(entry for entry in listed if entry["name"] == "env=my_toy")
    assert mine == {"name": "env=my_toy", "description": "A short one.", "file": [str(own / "env" / "my_toy.yaml")]}
    assert "file" not in next(entry for entry in listed if entry["name"] == "env=toy")
    assert "my_toy" in run(app, ["list", "presets", f'presets.dirs=["{own}"]']).stdout


def test_runs_of_a_sweep_know_the_directories(own: Path) -> None:
    runs = expand_sweep(["runner.seed=0,1", "env=my_toy", f'presets.dirs=["{own}"]'])
    assert [load_config(list(each.overrides)).config.env.max_episode_steps for each in runs] == [12, 12]
