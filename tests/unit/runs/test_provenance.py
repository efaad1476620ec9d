"""provenance.json: who trained what, with which versions, and what a resumed run changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embodrl.config import load_config
from embodrl.processor import processor
from embodrl.reporting.provenance import PROVENANCE_FILE, is_damaged, read_provenance
from embodrl.trainer.files import summary_lines
from embodrl.trainer.provenance import add_provenance, changes_so_far, git_state
from embodrl.trainer.settings import changed_settings


def test_records_are_appended_with_what_changed_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-the-user")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/embodrl", "train", "runner.name=a b"])
    loaded = load_config(
        ["env=toy", "algorithm.gamma=0.97", "cluster.device=cpu", "rollout.precision=fp32", "actor.precision=fp32"]
    )
    old = loaded.to_yaml()
    resumed = load_config(["env=toy", "algorithm.gamma=0.5", "env.tasks=[reach-green]", "cluster.device=cpu"])
    new = resumed.to_yaml()
    assert add_provenance(tmp_path, loaded.config, old, None, 0) == []
    lines = add_provenance(tmp_path, resumed.config, new, old, 30)
    first, second = read_provenance(tmp_path)
    assert (first["kind"], first["from_iteration"], first["changed"]) == ("train", 0, {})
    assert first["command"] == "embodrl train 'runner.name=a b'"
    assert first["packages"]["numpy"] == np.__version__
    chosen = "bf16" if processor().has_bf16 else "fp32"
    assert first["compute"]["precision"] == {"actor": "fp32", "rollout": "fp32"}
    assert second["compute"]["precision"] == {"actor": chosen, "rollout": chosen}
    assert first["compute"]["processor"] == first["compute"]["device"] == str(processor())
    assert second["kind"] == "resume" and second["from_iteration"] == 30
    assert second["changed"]["algorithm.gamma"] == [0.97, 0.5]
    assert "resumed at iteration 30 with algorithm.gamma: 0.97 -> 0.5" in lines
    assert changes_so_far(tmp_path) == lines
    assert "env.tasks changed" in caplog.text
    assert "a-secret-of-the-user" not in (tmp_path / "provenance.json").read_text()


@pytest.mark.parametrize("content", ["[{", "[" * 200_000, '[{"changed": 5, "kind": [1]}]', "{}", "[1]"])
def test_a_damaged_file_does_not_stop_a_run_and_is_kept(content: str, tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(content)
    assert read_provenance(tmp_path) == []
    add_provenance(tmp_path, load_config(["env=toy"]).config, "a: 1", "a: 2", 3)
    (record,) = read_provenance(tmp_path)
    assert record["changed"] == {"a": [2, 1]}
    assert (tmp_path / "provenance.json.damaged").read_text() == content


def test_changes_leave_out_keys_of_other_versions_and_look_into_lists() -> None:
    old = "{a: 1, gone: 2, cameras: [{name: x, height: 64}], more: [{b: 1}]}"
    new = "{a: 1, new: 3, cameras: [{name: x, height: 96}], more: [{b: 1}, {b: 2}]}"
    more = ([{"b": 1}], [{"b": 1}, {"b": 2}])
    assert changed_settings(old, new) == {"cameras.0.height": (64, 96), "more": more}


def test_the_state_of_a_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"commit": None, "dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_state(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"commit": head, "dirty": True}


def test_a_finished_run_ends_with_its_gain_and_the_next_command(tmp_path: Path) -> None:
    rows = [{"iteration": i, "eval/success_rate": rate, "eval/episodes": 16.0} for i, rate in ((0, 0.375), (9, 0.5625))]
    (tmp_path / "policy_best").mkdir()
    done, following = summary_lines(tmp_path, rows)
    # Wilson's interval of 9 in 16, from a table: 33.2 to 76.9 %
    assert done == "done: evaluation success 37.5 -> 56.2 % (95 % interval 33 to 77 %)"
    assert following == f"next: embodrl eval {tmp_path}"
    others = {"eval/success_rate_sampled": 0.625, "eval/success_rate_mean": None}
    assert summary_lines(tmp_path, [*rows, rows[1] | others])[0].endswith("77 %), sampled 62.5 %")
    stopped = [rows[0] | others, rows[1]]  # its last evaluation is one on the way
    assert summary_lines(tmp_path, stopped)[0].endswith("77 %), sampled 62.5 % (iteration 0)")
    rows[0]["iteration"], rows[1]["iteration"] = 0, 5
    worse = {"iteration": 9, "eval/success_rate": 0.5, "eval/episodes": 16.0}
    assert "56.2 % after iteration 5" in summary_lines(tmp_path, [*rows, worse])[1]


def test_a_pipe_or_a_huge_file_counts_as_damaged(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / PROVENANCE_FILE)
    assert is_damaged(tmp_path)
    (tmp_path / PROVENANCE_FILE).unlink()
    with (tmp_path / PROVENANCE_FILE).open("wb") as file:
        file.write(b"[]")
        file.truncate(1 << 40)  # sparse
    assert is_damaged(tmp_path) and read_provenance(tmp_path) == []
