"""embodrl.json beside a policy, and the notes of a configuration that asks it for something else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.config.policy_card import CARD_FILE, policy_card, policy_directory, read_card, trained_delay
from embodrl.config.schema.readers import Verb
from embodrl.errors import ConfigError

CODE = "policy-was-trained-for-this"


def notes(*overrides: str, verb: Verb | None = None) -> list[str]:
    found = load_config(list(overrides), verb=verb).notes
    return [f"{note.key}: {note.message}" for note in found if note.code == CODE]


@pytest.mark.parametrize("env", ["maniskill", "maniskill_push", "maniskill_pull", "maniskill_mix"])
def test_the_shipped_policy_knows_push_and_pull(env: str) -> None:
    assert notes(f"env={env}") == []


def test_a_task_that_the_shipped_policy_does_not_know_is_noted() -> None:
    (text,) = notes("env=maniskill_pick")
    assert "PickCube-v1" in text and "PushCube-v1, PullCube-v1" in text and "near 0" in text
    assert notes("env=maniskill_pick", "model.warm_start=null") == []


def policy_of(directory: Path, *overrides: str) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    card = policy_card(load_config(["env=toy", "model.warm_start=null", *overrides]).config, iteration=3)
    (directory / CARD_FILE).write_text(json.dumps(card))
    return directory


def test_a_policy_in_another_environment_task_or_camera_is_noted(tmp_path: Path) -> None:
    policy = policy_of(tmp_path / "policy")
    same = ["env=toy", f"model.warm_start={policy}"]
    assert notes(*same) == [] and notes(*same, verb="eval") == []
    (text,) = notes("env=maniskill", f"model.warm_start={policy}", verb="eval")
    assert "trained in toy (reach-red), not in maniskill" in text
    (text,) = notes(*same, "env.tasks=[reach-red,reach-green]")
    assert "not on reach-green of 2 tasks" in text
    (text,) = notes(*same, "env.cameras=[{name: overview, height: 96}]")
    assert "another camera: " in text and "height 64 -> 96" in text


def test_a_policy_without_a_card_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert notes("env=toy", f"model.warm_start={tmp_path}") == []
    (tmp_path / CARD_FILE).write_text("[broken")
    assert notes("env=toy", f"model.warm_start={tmp_path}") == [] and read_card(tmp_path) is None


def test_the_delay_that_a_flow_policy_was_trained_with_is_recorded_and_taken_up(tmp_path: Path) -> None:
    trained = policy_of(tmp_path / "policy", "model=pi0", "model.num_action_chunks=4", "model.flow.rtc_max_delay=3")
    assert read_card(trained)["rtc_max_delay"] == 3

    def delay(*overrides: str) -> int:
        return trained_delay(load_config(["env=toy", *overrides]).config.model)

    assert delay("model=pi0", f"model.warm_start={trained}") == 3
    assert delay("model=pi0", f"model.warm_start={trained}", "model.flow.rtc_max_delay=0") == 0
    assert delay("model=pi0", "model.warm_start=null") == 0 == delay("model=cnn", "model.warm_start=null")
    card = json.loads((trained / CARD_FILE).read_text())
    for wrong in ("3", -1, True, 2.0):
        (trained / CARD_FILE).write_text(json.dumps(card | {"rtc_max_delay": wrong}))
        assert delay("model=pi0", f"model.warm_start={trained}") == 0


def test_a_chunk_of_given_actions_alone_is_refused() -> None:
    with raises_code("something-is-left-to-learn", ConfigError):
        load_config(["env=toy", "model=pi0", "model.num_action_chunks=4", "model.flow.rtc_max_delay=4"])
    with raises_code("setting-of-another-type", ConfigError):
        load_config(["env=toy", "model=openvla", "model.flow.rtc_max_delay=1"])


@pytest.mark.parametrize("content", ["[" * 200_000, '{"tasks": [1]}', '{"tasks": 5}', "[]"])
def test_a_hostile_card_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / CARD_FILE).write_text(content)
    assert read_card(tmp_path) is None


def test_instructions_are_recorded(tmp_path: Path) -> None:
    card = policy_card(load_config(["env=maniskill_mix"]).config)
    assert card["instructions"]["PullCube-v1"] == "pull the blue cube to the target"


def test_the_note_is_cheap() -> None:
    code = "import sys, embodrl.config as c; c.load_config(['env=maniskill_pick']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_hub_ids_and_random_weights_have_no_directory() -> None:
    config = load_config(["env=toy", "model.warm_start=null"]).config
    assert policy_directory(config.model) is None
    assert policy_directory(config.model.model_copy(update={"model_path": "openvla/openvla-7b"})) is None


def test_an_evaluation_has_no_notes_about_training() -> None:
    overrides = ["env=toy", "model.warm_start=null", "runner.max_iterations=2"]
    assert "default-warm-ups-end" in [note.code for note in load_config(overrides).notes]
    shared = {"env": "toy", "model": {"warm_start": None, "random_weights": True}, "runner": {"max_iterations": 2}}
    assert load_config([], shared, verb="eval").notes == []


def test_a_debug_run_has_no_notes_about_itself_or_its_evaluation() -> None:
    base = ["env=toy", "model.warm_start=null", "runner=debug"]
    assert load_config(base).notes == []
    assert load_config([*base, "env.eval.num_episodes=8", "env.eval.total_num_envs=8"]).notes == []
    (note,) = load_config([*base, "env.video.every_eval=true"]).notes
    assert note.key == "env.video.every_eval"


def test_a_card_that_is_a_pipe_or_too_large_counts_as_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CARD_FILE)
    assert read_card(tmp_path) is None
    (tmp_path / CARD_FILE).unlink()
    with (tmp_path / CARD_FILE).open("wb") as file:
        file.write(b"{}")
        file.truncate(1 << 40)  # sparse
    assert read_card(tmp_path) is None
