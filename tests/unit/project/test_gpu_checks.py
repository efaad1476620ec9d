"""The list of checks for a GPU machine: what is recorded, what is run again, and what ends at its limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import check_list  # noqa: E402 - it stands in scripts/
import gpu_checks  # noqa: E402
from check_list import Check, CheckFailed, CheckList, Figures, NotHere, Shell, read_rows  # noqa: E402


def listed(directory: Path, limit_s: float = 60.0, workers: int = 1) -> CheckList:
    return CheckList(directory / "out", directory / "work", {}, limit_s, workers, directory)


def answers(figures: Figures) -> Callable[[Shell], Figures]:
    return lambda shell: figures


def raises(problem: Exception) -> Callable[[Shell], Figures]:
    def check(shell: Shell) -> Figures:
        raise problem

    return check


def rows(directory: Path) -> dict[str, Any]:
    return {row["name"]: row for row in read_rows(directory / "out")}


def test_every_outcome_is_a_row_and_ends_nothing_else(tmp_path: Path) -> None:
    checks = [
        Check("fine", answers({"x": 1.5}), 10),
        Check("wrong", raises(CheckFailed("x is 2", {"x": 2})), 10),
        Check("elsewhere", raises(NotHere("no GPU")), 10),
        Check("broken", raises(KeyError("y")), 10),
        Check("last", answers({}), 10, alone=True),
    ]
    assert listed(tmp_path).run(checks) == []
    found = rows(tmp_path)
    assert {name: (row["ok"], row["status"]) for name, row in found.items()} == {
        "fine": (True, "ok"),
        "wrong": (False, "failed"),
        "elsewhere": (False, "skipped"),
        "broken": (False, "failed"),
        "last": (True, "ok"),
    }
    assert found["fine"]["figures"] == {"x": 1.5} and found["fine"]["reason"] is None
    assert found["wrong"]["figures"] == {"x": 2} and found["wrong"]["reason"] == "x is 2"
    assert found["elsewhere"]["reason"] == "no GPU" and "KeyError" in found["broken"]["reason"]


def test_only_what_has_no_row_is_run_again(tmp_path: Path) -> None:
    ran: list[str] = []

    def note(name: str) -> Check:
        return Check(name, lambda shell: ran.append(name) or {}, 10)

    listed(tmp_path).run([note("a"), note("b")])
    with (tmp_path / "out" / "results.jsonl").open("a") as file:
        file.write('{"name": "c", "ok": tr')  # cut off with its machine
    listed(tmp_path).run([note("a"), note("b"), note("c"), note("d")])
    assert ran == ["a", "b", "c", "d"] and list(rows(tmp_path)) == ran


def test_what_there_is_no_time_for_gets_no_row(tmp_path: Path) -> None:
    assert listed(tmp_path, limit_s=0.0).run([Check("a", answers({}), 10)]) == ["a"]
    assert rows(tmp_path) == {}


def test_a_command_ends_at_the_limit_of_its_check_and_its_output_is_kept(tmp_path: Path) -> None:
    def slow(shell: Shell) -> Figures:
        shell.run("sh", "-c", "echo begun; sleep 60")
        return {}

    def wrong(shell: Shell) -> Figures:
        shell.run("sh", "-c", "echo noise; echo 'error: no such thing'; echo '  hint: none'; exit 3")
        return {}

    listed(tmp_path).run([Check("slow", slow, 0.5), Check("wrong", wrong, 10)])
    found = rows(tmp_path)
    assert found["slow"]["status"] == "failed" and "begun" in found["slow"]["reason"]
    assert found["wrong"]["reason"] == "exit code 3: error: no such thing | hint: none"
    log = (tmp_path / "out" / "checks.log").read_text()
    assert "==== slow" in log and "==== wrong" in log and "noise" in log
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checks.log", "results.jsonl"]


def test_a_check_that_the_whole_limit_cuts_short_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_list, "MIN_SECONDS", 0.0)

    def slow(shell: Shell) -> Figures:
        shell.run("sleep", "60")
        return {}

    assert listed(tmp_path, limit_s=0.5).run([Check("slow", slow, 30)]) == ["slow"]
    assert rows(tmp_path) == {}


def test_a_check_that_a_signal_interrupts_is_run_again(tmp_path: Path) -> None:
    checks = listed(tmp_path)

    def interrupted(shell: Shell) -> Figures:
        process = shell.start("sleep", "60")
        checks.stop()
        raise CheckFailed(f"exit code {process.wait()}")

    assert checks.run([Check("a", interrupted, 30), Check("b", answers({}), 30)]) == ["a", "b"]
    assert rows(tmp_path) == {}


def test_differences_of_two_runs() -> None:
    rows = [{"iteration": 1, "train/x": 1.0, "time/s": 2.0}, {"iteration": 2, "train/x": 2.0, "y": None}]
    same = [{**rows[0], "time/s": 3.0}, rows[1]]
    assert gpu_checks.difference(rows, same) == {
        "equal": True,
        "first_difference": None,
        "largest_relative_difference": 0.0,
    }
    other = gpu_checks.difference(rows, [rows[0], {**rows[1], "train/x": 2.5}])
    assert not other["equal"] and other["largest_relative_difference"] == pytest.approx(0.2)
    assert other["first_difference"] == "train/x in iteration 2: 2.0 and 2.5"
    assert not gpu_checks.difference(rows, rows[:1])["equal"]


def test_the_script_lists_names_and_refuses_others() -> None:
    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "scripts" / "gpu_checks.py", "nowhere", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    names = script("--list").stdout.split()
    assert names[0] == "machine" and len(names) == len(set(names)) > 30
    assert {f"family_{name}" for name in gpu_checks.FAMILIES} <= set(names)
    assert script("--list", "--only", "parity_*,resume").stdout.split() == [
        "machine",
        "parity_fp32",
        "parity_bf16",
        "resume",
    ]
    refused = script("--only", "parity_fp8")
    assert refused.returncode == 1 and "no check parity_fp8" in refused.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_run_of_the_list_has_valid_settings(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a described machine with one GPU, or on this one."""
    from embodrl.errors import EmbodrlError
    from embodrl.pipelines.load import load_config

    wanted: list[list[str]] = []
    monkeypatch.setattr(
        gpu_checks, "train", lambda options, shell, name, settings: wanted.append(list(settings)) or [{}]
    )
    monkeypatch.setattr(gpu_checks, "need_package", lambda options, shell, name: None)
    options = gpu_checks.Options("python", device, ())
    others = (
        "resume",
        "rollout_killed",
        "lora_7b",
        "mujoco_egl",
        "megatron",
    )  # not by `train` alone, or a package lacks
    trained = [check for check in gpu_checks.all_checks(options) if check.name not in others]
    first = next(number for number, check in enumerate(trained) if check.name.startswith("family"))
    last = next(number for number, check in enumerate(trained) if check.name == "fsdp")
    for check in trained[first : last + 1]:
        check.run(Shell(check.name, tmp_path, {}, 1.0, check_list.Clock(1.0), tmp_path))
    assert len(wanted) > 20
    machine = ["cluster=1xh200"] if device == "cuda" else []
    for words in wanted:
        try:
            load_config([*machine, *words], None, "train")
        except EmbodrlError as error:
            codes = {problem.code for problem in getattr(error, "problems", [])}
            assert codes == {"described-hardware-is-here"}, error
