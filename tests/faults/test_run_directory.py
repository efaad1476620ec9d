"""What happens to the directory of a run while it trains, and between two processes: nothing wrong passes silently."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from runs import TINY, Outcome, embodrl, metrics, start

# Two processes train one run, as on a preempted cluster: 2 of 4 iterations, then the rest.


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY.replace("save_interval: 2", "save_interval: 2\n  keep_best: false"))
    return path


@pytest.fixture(scope="module")
def half(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its third iteration, after the checkpoint of the second."""
    run_dir = tmp_path_factory.mktemp("half") / "run"
    outcome = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", stop_at="act:11:SIGKILL")
    assert outcome.code == -signal.SIGKILL and (run_dir / "checkpoints/step_2").is_dir(), outcome.stderr
    return run_dir


@pytest.fixture(scope="module")
def resumed(half: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, resumed without any damage."""
    run_dir = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(half, run_dir)
    assert embodrl("resume", run_dir).code == 0
    return run_dir


@pytest.fixture
def run_dir(half: Path, tmp_path: Path) -> Path:
    shutil.copytree(half, tmp_path / "run")
    return tmp_path / "run"


def rows(run_dir: Path) -> list[dict[str, object]]:
    return metrics(run_dir)


def resume(run_dir: Path, *args: str) -> Outcome:
    outcome = embodrl("resume", run_dir, *args)
    assert "Traceback" not in outcome.stderr
    return outcome


@pytest.mark.long
def test_damaged_settings_and_metrics_are_restored_and_the_run_is_the_same(run_dir: Path, resumed: Path) -> None:
    (run_dir / "config.yaml").write_bytes(b"")
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b'"iteration": 0', b'"iteration": null')
    lines[1] = bytes(len(lines[1]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    outcome = resume(run_dir)
    assert outcome.code == 0, outcome.stderr
    assert f"{run_dir / 'config.yaml'} is empty" in outcome.stderr
    assert "lines 1, 2 are damaged or missing: restored from the checkpoint" in outcome.stderr
    assert rows(run_dir) == rows(resumed)
    mine, other = (yaml.safe_load((d / "config.yaml").read_text()) for d in (run_dir, resumed))
    assert mine == other | {"runner": other["runner"]}


@pytest.mark.long
def test_edits_are_refused_and_changes_on_the_command_line_are_recorded(run_dir: Path) -> None:
    path = run_dir / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("gamma: 0.97", "gamma: 0.27"))
    outcome = resume(run_dir)
    assert outcome.code == 2 and "code:     settings-edited" in outcome.stderr
    assert "algorithm.gamma: was 0.97" in outcome.stderr
    outcome = resume(run_dir, "env.train.total_num_envs=8", "algorithm.gamma=0.27")
    assert outcome.code == 2 and "code:     settings-fixed" in outcome.stderr and "starting" not in outcome.stdout
    outcome = resume(run_dir, "algorithm.gamma=0.27")
    assert outcome.code == 0, outcome.stderr
    change = "resumed at iteration 2 with algorithm.gamma: 0.97 -> 0.27"
    assert change in outcome.stdout and change in (run_dir / "logs/embodrl.log").read_text()
    assert f"# {change}" in path.read_text()
    record = json.loads((run_dir / "provenance.json").read_text())[-1]
    assert record["changed"] == {"algorithm.gamma": [0.97, 0.27]} and record["from_iteration"] == 2
    assert "algorithm.gamma" in (run_dir / "report.html").read_text()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "logs/embodrl.log", "checkpoints"])
def test_links_in_a_run_directory_are_refused(name: str, run_dir: Path, tmp_path: Path) -> None:
    path, elsewhere = run_dir / name, tmp_path / "elsewhere"
    if path.is_dir():
        path.rename(elsewhere)
        before = sorted(elsewhere.rglob("*"))
    else:
        path.unlink(missing_ok=True)
        elsewhere.write_text("precious\n")
        before = []
    path.symlink_to(elsewhere)
    outcome = resume(run_dir)
    assert outcome.code == 1 and "code: run-directory-link" in outcome.stderr and str(path) in outcome.stderr
    if before:
        assert sorted(elsewhere.rglob("*")) == before
    else:
        assert elsewhere.read_text() == "precious\n"


@pytest.mark.long
def test_a_deeply_nested_manifest_is_damage_and_the_older_checkpoint_is_used(run_dir: Path, resumed: Path) -> None:
    shutil.copytree(resumed / "checkpoints/step_4", run_dir / "checkpoints/step_4")
    (run_dir / "checkpoints/step_4/manifest.json").write_text("[" * 200_000 + "]" * 200_000)
    outcome = resume(run_dir)
    assert outcome.code == 0, outcome.stderr
    assert "step_4 is not used" in outcome.stderr and "nested too deeply" in outcome.stderr
    assert rows(run_dir) == rows(resumed)


def test_a_damaged_result_of_a_finished_run_is_written_again(resumed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir)
    report = run_dir / "report.html"
    report.write_bytes(report.read_bytes()[:1000])
    outcome = resume(run_dir)
    assert outcome.code == 0 and f"{report} is cut off" in outcome.stderr
    assert report.read_text().rstrip().endswith("</html>")
    assert rows(run_dir) == rows(resumed)


@pytest.mark.long
@pytest.mark.parametrize("how", ["raise", "_exit", "exit"])
def test_a_reward_function_that_fails_loses_no_finished_iteration(
    how: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations 1 and 2 are complete when the reward of iteration 3 fails; no checkpoint was due before."""
    run_dir = tmp_path / "run"
    settings = [f"runner.output_dir={run_dir}", "runner.save_interval=100", "reward.fn='failing_reward:fn'"]
    settings += ["reward.retries=0", "reward.on_error=raise", "reward.max_concurrency=1", "runner.eval_interval=0"]
    episodes = 4 * 12 // 6  # environments x steps / steps per episode, in every iteration
    monkeypatch.setenv("FAILING_REWARD", f"{how}:{2 * episodes + 1}")
    outcome = embodrl("train", "--config", config, *settings)
    assert outcome.code == 1 and "failing_reward" in outcome.stderr, outcome.stderr
    if how != "raise":
        assert "ended the process with exit code 7" in outcome.stderr
    else:
        assert "the reward service is gone" in outcome.stderr
    assert (run_dir / "checkpoints/step_2").is_dir() and f"embodrl resume {run_dir}" in outcome.stderr
    monkeypatch.delenv("FAILING_REWARD")
    assert resume(run_dir).code == 0
    left = tmp_path / "left"
    settings[0] = f"runner.output_dir={left}"
    if how == "raise":  # one undisturbed run is enough
        assert embodrl("train", "--config", config, *settings).code == 0
        assert rows(run_dir) == rows(left)


@pytest.mark.parametrize(
    "number",
    [signal.SIGUSR1, signal.SIGXCPU, signal.SIGQUIT],
)
@pytest.mark.long
def test_a_preempted_run_is_saved(number: signal.Signals, config: Path, tmp_path: Path, resumed: Path) -> None:
    run_dir = tmp_path / "run"
    outcome = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", stop_at=f"act:6:{number.name}")
    assert outcome.code == 128 + number, outcome.stderr
    assert (run_dir / "checkpoints/step_1").is_dir()
    if number == signal.SIGUSR1:
        assert resume(run_dir).code == 0
        assert rows(run_dir) == rows(resumed)


@pytest.mark.parametrize("fault", ["removed", "lock taken"])
@pytest.mark.long
def test_a_run_that_loses_its_directory_stops_with_1(fault: str, config: Path, tmp_path: Path) -> None:
    import fcntl
    import time

    run_dir = tmp_path / "run"
    process = start("train", "--config", config, f"runner.output_dir={run_dir}", "runner.max_iterations=100000")
    path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
    while not path.is_file() or len(path.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    if fault == "removed":
        run_dir.rename(tmp_path / "moved")
        code = "run-directory-removed"
    else:
        (run_dir / ".lock").unlink()
        other = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(other, fcntl.LOCK_EX)
        code = "run-in-use"
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 1 and f"code: {code}" in stderr, stderr
    assert not (run_dir / "metrics.jsonl").exists() or fault == "lock taken"
