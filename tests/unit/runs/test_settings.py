"""The settings of a run: sealed in config.yaml, copied into checkpoints, and never replaced by defaults."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from expect import raises_code

from embodrl.config import load_config
from embodrl.errors import CheckpointError, ConfigError
from embodrl.fields import Fields
from embodrl.storage.checkpoint import CheckpointManager
from embodrl.trainer.settings import (
    STATE_KEY,
    changed_settings,
    load_saved,
    read_settings,
    refuse_impossible,
    write_settings,
)

OVERRIDES = ["env=toy", "runner.seed=3", "algorithm.gamma=0.93", "env.tasks=[reach-green]"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with the settings in its config.yaml and in a checkpoint."""
    text = write_settings(tmp_path, load_config(OVERRIDES).to_yaml(), ["resumed at iteration 2 with a: 1 -> 2"])
    CheckpointManager(tmp_path, 2).save(2, {}, {"iteration": 2, STATE_KEY: text})
    return tmp_path


def test_an_intact_file_gives_the_settings_of_the_run(run_dir: Path) -> None:
    loaded, saved = load_saved(run_dir, ["runner.max_iterations=7"])
    assert saved.restored == "" and saved.text == (run_dir / "config.yaml").read_text()
    assert (loaded.config.runner.seed, loaded.config.algorithm.gamma) == (3, 0.93)
    assert loaded.config.runner.max_iterations == 7
    assert "# resumed at iteration 2 with a: 1 -> 2" in saved.text
    assert yaml.safe_load(saved.text)["runner"]["seed"] == 3


@pytest.mark.parametrize("damage", ["emptied", "cut", "cut before the last section", "zeroed", "binary", "missing"])
def test_a_damaged_file_is_replaced_by_the_checkpoints_copy(
    damage: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_dir / "config.yaml"
    content = path.read_bytes()
    damaged = {
        "emptied": b"",
        "cut": content[: len(content) // 2],
        "cut before the last section": content[: content.rindex(b"\nextensions")],
        "zeroed": bytes(len(content)),
        "binary": b"\xff\xfe" * 50,
    }
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged[damage])
    loaded, saved = load_saved(run_dir, [])
    assert loaded.config == load_config(OVERRIDES).config
    assert saved.text.encode() == content and str(path) in saved.restored
    assert str(path) in caplog.text and "checkpoint" in caplog.text


def test_an_edited_file_is_refused_until_the_command_line_confirms_it(run_dir: Path) -> None:
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("gamma: 0.93", "gamma: 0.27").replace("seed: 3\n", "seed: 4\n"))
    with raises_code("settings-edited", ConfigError) as caught:
        load_saved(run_dir, [])
    report = str(caught.value)
    assert "algorithm.gamma: was 0.93" in report and "is 0.27 now" in report
    assert "runner.seed: was 3" in report and f"embodrl resume {run_dir}" in report
    with raises_code("settings-edited"):
        load_saved(run_dir, ["algorithm.gamma=0.27"])
    loaded, _ = load_saved(run_dir, ["algorithm.gamma=0.27", "runner.seed=4"])
    assert (loaded.config.algorithm.gamma, loaded.config.runner.seed) == (0.27, 4)
    loaded, _ = load_saved(run_dir, ["algorithm.gamma=0.5", "runner.seed=3"])  # decided otherwise
    assert (loaded.config.algorithm.gamma, loaded.config.runner.seed) == (0.5, 3)


def test_comments_and_order_are_no_edits(run_dir: Path) -> None:
    path = run_dir / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text())) + "# mine\n")
    assert load_saved(run_dir, [])[0].config == load_config(OVERRIDES).config


def test_without_a_copy_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    text = write_settings(tmp_path, load_config(OVERRIDES).to_yaml(), [])
    path = tmp_path / "config.yaml"
    for damaged in ("", text[: len(text) // 2], text.replace("gamma: 0.93", "gamma: 0.27")):
        path.write_text(damaged)
        with raises_code("settings-damaged", CheckpointError) as caught:
            read_settings(tmp_path, None, [])
        assert str(path) in caught.value.message
    path.write_text("\n".join(text.splitlines()[:-1]))  # the user's decision
    assert load_saved(tmp_path, [])[0].config == load_config(OVERRIDES).config
    path.unlink()
    with raises_code("not-a-run"):
        read_settings(tmp_path, None, [])


def test_a_resume_with_changes_that_was_killed_before_it_saved_keeps_them(run_dir: Path) -> None:
    """config.yaml is newer than the checkpoint then, and intact."""
    write_settings(run_dir, load_config([*OVERRIDES, "algorithm.gamma=0.5"]).to_yaml(), [])
    loaded, saved = load_saved(run_dir, [])
    assert loaded.config.algorithm.gamma == 0.5 and not saved.restored


def test_a_damaged_checkpoint_is_passed_over(run_dir: Path) -> None:
    CheckpointManager(run_dir, 2).save(4, {}, {"iteration": 4, STATE_KEY: "env: {}"})
    (run_dir / "checkpoints/step_4/state.json").write_text('{"settings": "forged: 1"}')
    (run_dir / "config.yaml").unlink()
    assert load_saved(run_dir, [])[0].config.runner.seed == 3


@pytest.mark.parametrize("backend", ["native", "fsdp"])
@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("env.train.total_num_envs=8", "env.train.total_num_envs"),
        ("env.cameras=[{height: 32, width: 64}]", "env.cameras.0.height"),
        ("model=pi0", "model.model_type"),
    ],
)
def test_what_a_checkpoint_can_not_be_resumed_with_is_refused(change: str, key: str, backend: str) -> None:
    mine = [*OVERRIDES, f"actor.training_backend={backend}"]
    old = load_config(mine)
    with raises_code("settings-fixed", ConfigError) as caught:
        refuse_impossible(load_config([*mine, change]).config, old.to_yaml())
    assert key in [problem.key for problem in caught.value.problems]
    refuse_impossible(load_config([*mine, "algorithm.gamma=0.5", "runner.seed=8"]).config, old.to_yaml())


@pytest.mark.parametrize(
    ("rollout", "generators", "keys"),
    [
        ({"state": {"random": ["a", "b"]}, "blobs": ["env_0", "env_1"]}, [2], []),
        ({"state": {"random": ["a", "b"]}, "blobs": ["env_0"]}, [2], ["env.num_processes"]),
        ({"state": {"random": ["a"]}, "blobs": ["env_0"]}, [4], ["env.num_processes", "cluster.num_threads"]),
        ({"state": {"random": ["a"]}, "blobs": ["env_0", "env_1"]}, [], []),  # vLLM: its engine knows
        (
            {"state": {"processes": [{"random": ["a"]}] * 2}, "blobs": ["rollout_0_env_0", "rollout_1_env_0"]},
            [3, 3],
            ["cluster.num_threads"],
        ),
        ({"state": {"next": 4}, "blobs": []}, [2], []),  # an asynchronous run
        ({"state": {"processes": [{"random": ["a"]}, {"lost": True}]}, "blobs": ["rollout_0_env_0"]}, [1, 1], []),
    ],
)
def test_numbers_of_processes_and_threads_are_those_of_the_states(
    rollout: dict[str, object], generators: list[int], keys: list[str]
) -> None:
    loaded = load_config([*OVERRIDES, "env.num_processes=2"])
    fields = Fields(rollout, "the checkpoint", CheckpointError)
    if not keys:
        refuse_impossible(loaded.config, "", fields, generators)
        return
    with raises_code("settings-fixed", ConfigError) as caught:
        refuse_impossible(loaded.config, "", fields, generators)
    assert [problem.key for problem in caught.value.problems] == keys


def test_every_changed_value_is_found() -> None:
    old, new = load_config(OVERRIDES), load_config([*OVERRIDES[:2], "env.cameras=[{fov_rad: 1.0}]", "reward.retries=9"])
    assert changed_settings(old.to_yaml(), new.to_yaml()) == {
        "env.tasks": (["reach-green"], list(load_config(["env=toy"]).config.env.tasks)),
        "env.cameras.0.fov_rad": (None, 1.0),
        "algorithm.gamma": (0.93, load_config(["env=toy"]).config.algorithm.gamma),
        "reward.retries": (old.config.reward.retries, 9),
    }
