"""scripts/make_results.sh with a stand-in for embodrl: what it asks for, and what it does not do twice."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from embodrl.config import load_config

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_results.sh"
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> LOG
for word in "$@"; do
    case $word in
        collect.output_dir=*) mkdir -p "${word#*=}" ;;
        sft.output_dir=*) mkdir -p "${word#*=}/policy" ;;
        runner.output_dir=*) mkdir -p "${word#*=}"; echo '{}' > "${word#*=}/metrics.jsonl"; [ "$STOP" ] && exit 1 ;;
        --json) wants_json=1 ;;
        *) [ "${wants_json:-}" ] && echo '{}' > "$word"; wants_json= ;;
    esac
done
[ "$1" = resume ] && mkdir "$2/policy"
exit 0
"""


def run(tmp_path: Path, *tasks: str, stop: str = "") -> tuple[int, list[str]]:
    """Run the script; return its exit code and the commands of this call."""
    log, stand_in = tmp_path / "log", tmp_path / "embodrl"
    stand_in.write_text(STAND_IN.replace("LOG", str(log)))
    stand_in.chmod(0o755)
    log.write_text("")
    here = {"RESULTS_DIR": str(tmp_path / "work"), "RESULTS_TARGET": str(tmp_path / "kept"), "EMBODRL": str(stand_in)}
    outcome = subprocess.run(["bash", str(SCRIPT), *tasks], env=os.environ | here | {"STOP": stop}, check=False)
    return outcome.returncode, log.read_text().splitlines()


def test_every_command_is_a_valid_configuration(tmp_path: Path) -> None:
    code, commands = run(tmp_path)
    assert code == 0
    assert [line.split()[0] for line in commands] == [
        *("collect", "sft", "train", "collect", "sft", "train", "resume"),
        *("collect", "sft", "train", "eval", "train"),
    ]
    for line in commands:
        words = [word for word in line.split()[1:] if "=" in word and "warm_start=/" not in word]
        load_config(words)
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    names = ("libero_spatial", "lift_peg", "metaworld_drawer", "metaworld_reach")
    assert kept == [f"{name}_seed_0.jsonl" for name in names]


def test_a_policy_is_trained_from_its_own_demonstrations(tmp_path: Path) -> None:
    _, (collect, sft, train, more) = run(tmp_path, "reach")
    demos, policy = tmp_path / "work/metaworld_reach_seed_0/demos", tmp_path / "work/metaworld_reach_seed_0/sft/policy"
    assert more == f"resume {demos.parent / 'rl'} runner.max_iterations=60"
    assert f"collect.output_dir={demos}" in collect.split() and f"sft.data_dir={demos}" in sft.split()
    assert train.split().index(f"model.warm_start={policy}") > train.split().index("model.warm_start=null")


@pytest.mark.parametrize("stopped_early", [True, False])
def test_demonstrations_that_stopped_early_are_made_again(stopped_early: bool, tmp_path: Path) -> None:
    meta = tmp_path / "work/lift_peg_seed_0/demos/meta/embodrl.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"stopped_early": stopped_early}, indent=4))  # as the LeRobot writer does
    code, commands = run(tmp_path, "lift")
    assert code == 0 and meta.exists() is not stopped_early
    assert [line.split()[0] for line in commands] == ["collect"] * stopped_early + ["sft", "train"]


def test_a_run_that_was_stopped_continues_and_nothing_is_done_twice(tmp_path: Path) -> None:
    code, commands = run(tmp_path, "lift", stop="1")
    assert code == 1 and [line.split()[0] for line in commands] == ["collect", "sft", "train"]
    code, commands = run(tmp_path, "lift")
    assert code == 0 and commands == [f"resume {tmp_path / 'work/lift_peg_seed_0/rl'}"]
    code, commands = run(tmp_path, "lift")
    assert code == 0 and commands == []
