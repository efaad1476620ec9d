"""metrics.jsonl, trackers, console and report."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from expect import raises_code
from rich.console import Console as RichConsole

from embodrl.config.schema import LoggerConfig
from embodrl.errors import MissingDependencyError, OutputError
from embodrl.reporting import sinks
from embodrl.reporting.console import Console, TimeLeft, sparkline
from embodrl.reporting.metrics_file import read_metrics
from embodrl.reporting.sinks import MetricsLogger, MetricValue, TensorBoardTracker
from embodrl.trainer.schedule import Schedule

QUIET = LoggerConfig(tensorboard=False)


def row(iteration: int, **more: Any) -> dict[str, MetricValue]:
    return {
        "iteration": iteration,
        "env_steps": 100 * iteration,
        "rollout/success_rate": iteration / 10,
        "train/policy_loss": -0.01,
        "time/env_s": 1.0,
        "time/train_s": 0.5,
        "time/total_s": 2.0,
    } | more


class RecordingTracker:
    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.rows: list[tuple[int, dict[str, MetricValue]]] = []
        self.closed = False

    def log(self, metrics: Mapping[str, MetricValue], iteration: int) -> None:
        if iteration == self.fail_at:
            raise ConnectionError("hub is down")
        self.rows.append((iteration, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def test_one_json_object_a_line_on_disk_at_once(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, QUIET) as metrics:
        for iteration in (1, 2):
            metrics.log(row(iteration, **{"train/entropy": float("nan")}))
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert len(lines) == iteration
    second = json.loads(lines[1])
    assert second["iteration"] == 2 and second["train/entropy"] is None
    assert second["time/elapsed_s"] == 4.0
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == second


@pytest.mark.parametrize("torn", ["", '{"iteration": 6, "env', '{"iteration": 6}', "garbage\n"])
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path, torn: str) -> None:
    straight, resumed, saved = tmp_path / "straight", tmp_path / "resumed", b""
    with MetricsLogger(straight, QUIET) as metrics:
        for iteration in range(1, 8):
            metrics.log(row(iteration))
    with MetricsLogger(resumed, QUIET) as metrics:
        for iteration in range(1, 6):
            metrics.log(row(iteration))
            saved = bytes(metrics.content) if iteration == 3 else saved
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write(torn)
    with MetricsLogger(resumed, QUIET, resume_iteration=3, saved=saved) as metrics:
        for iteration in range(4, 8):
            metrics.log(row(iteration))
    assert (resumed / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()


def test_resuming_from_before_the_first_checkpoint_starts_afresh(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, QUIET) as metrics:
        metrics.log(row(0))
    with MetricsLogger(tmp_path, QUIET, resume_iteration=-1) as metrics:
        metrics.log(row(0))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_new_run_does_not_append_to_an_old_one(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, QUIET) as metrics:
        metrics.log(row(1))
    with raises_code("run-exists", OutputError) as caught:
        MetricsLogger(tmp_path, QUIET)
    assert "embodrl resume" in caught.value.hint


def test_a_run_directory_that_can_not_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_code("output", OutputError):
        MetricsLogger(tmp_path / "file" / "run", QUIET)


def test_a_failing_tracker_is_warned_about_once_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = RecordingTracker(fail_at=2), RecordingTracker()
    with (
        caplog.at_level(logging.WARNING),
        MetricsLogger(tmp_path, QUIET, trackers={"bad": bad, "good": good}) as metrics,
    ):
        for iteration in (1, 2, 3):
            metrics.log(row(iteration))
    assert [iteration for iteration, _ in bad.rows] == [1]
    assert [iteration for iteration, _ in good.rows] == [1, 2, 3] and good.closed
    assert sum("bad is disabled" in record.getMessage() for record in caplog.records) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsLogger(tmp_path, LoggerConfig()) as metrics:
        for iteration in (1, 2):
            metrics.log(row(iteration, **{"train/entropy": float("inf")}))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("rollout/success_rate")
    assert [(event.step, round(event.value, 6)) for event in scalars] == [(1, 0.1), (2, 0.2)]
    assert "train/entropy" not in events.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with raises_code("missing-dependency", MissingDependencyError, "pip install"):
        MetricsLogger(tmp_path, LoggerConfig(tensorboard=False, wandb_mode="offline"))


def test_wandb_offline_keeps_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = LoggerConfig(tensorboard=False, wandb_mode="offline")
    with MetricsLogger(tmp_path, config, run_config={"a": 1}) as metrics:
        metrics.log(row(1))
    run_id = (tmp_path / "wandb_id.txt").read_text().strip()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) == 1


def test_late_figures_are_part_of_the_row_of_their_iteration(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    with MetricsLogger(tmp_path, QUIET, trackers={"one": tracker}) as metrics:
        for iteration in (1, 2):
            metrics.log(row(iteration))
        metrics.log_late({"iteration": 1, "eval/success_rate": 0.5, "eval/return": float("nan")})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [each["iteration"] for each in rows] == [1, 2]
    assert rows[0] == row(1) | {"time/elapsed_s": 2.0, "eval/success_rate": 0.5, "eval/return": None}
    assert "eval/success_rate" not in rows[1] and tracker.rows[-1][0] == 1
    content = (tmp_path / "metrics.jsonl").read_bytes()
    assert content == bytes(metrics.content)
    with MetricsLogger(tmp_path, QUIET, resume_iteration=2, saved=content) as resumed:
        assert resumed.log(row(3))["time/elapsed_s"] == 6.0  # the last line has no time of its own


def test_steps_of_wandb_never_go_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logged: list[tuple[dict[str, Any], int]] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((values, step)), finish=lambda: None)
    fake = SimpleNamespace(init=lambda **_: run, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsLogger(tmp_path, LoggerConfig(tensorboard=False, wandb_mode="offline")) as metrics:
        metrics.log({"iteration": 3, "a": 1.0})
        metrics.log_late({"iteration": 2, "eval/success_rate": 0.5})
    assert [step for _, step in logged] == [3, 3]
    assert logged[1][0] == {"iteration": 3, "eval/iteration": 2, "eval/success_rate": 0.5}


def test_the_console_shows_late_evaluations() -> None:
    stream = io.StringIO()
    with Console("plain", 4, "run", terminal(stream, False)) as console:
        console.late({"iteration": 2, "eval/success_rate": 0.5, "eval/episodes": 128.0})
        console.late({"iteration": 3, "eval/success_rate": None})
    first, second = stream.getvalue().splitlines()
    assert first == "evaluation after iteration 2: success 0.500 [0.41, 0.59]"
    assert second == "evaluation after iteration 3: success not known"


def test_importing_metrics_imports_neither_torch_nor_matplotlib_nor_wandb() -> None:
    names = ", ".join(f"embodrl.reporting.{name}" for name in ("sinks", "console", "report"))
    code = f"import sys, {names}; print(sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("torch", "matplotlib", "wandb"):
        assert f"'{name}'" not in modules


def terminal(stream: io.StringIO, is_terminal: bool) -> RichConsole:
    return RichConsole(file=stream, force_terminal=is_terminal, width=100, color_system=None)


def test_without_a_terminal_there_is_one_plain_line_an_iteration() -> None:
    stream = io.StringIO()
    with Console("auto", 12, "run", terminal(stream, False)) as console:
        console.phase("rollout")
        console.update(row(1))
        console.message("saved [bold]step_1[/bold]")
        console.update(row(2, **{"eval/success_rate": 0.375}))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and "\x1b" not in stream.getvalue()
    assert lines[0].startswith("iter  1/12  env_steps 100  success 0.100") and "env 1.0s" in lines[0]
    assert lines[1] == "saved [bold]step_1[/bold]"
    assert "eval 0.375" in lines[2] and "eta 0:20" in lines[2]


def test_the_panel_shows_progress_time_split_and_messages() -> None:
    stream = io.StringIO()
    with Console("auto", 4, "run [x]", terminal(stream, True)) as console:
        assert console.mode == "rich"
        console.phase("training")
        console.message("checkpoint step_2")
        console.update(row(1))
        console.update(row(2, **{"eval/success_rate": 0.5}))
    text = stream.getvalue()
    for expected in ("run [x]", "2/4", "training", "checkpoint step_2", "50 %", "25 %", "50.0 %", "ETA 0:04"):
        assert expected in text


def test_the_time_left_has_the_evaluations_and_counts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("embodrl.reporting.console.time.monotonic", lambda: now)
    schedule = Schedule(total=10, eval_interval=4, save_interval=0, evaluates_first=True, evaluates_last=True)
    left = TimeLeft(10, schedule.evaluations_after)
    left.note({"iteration": 0, "env_steps": 0, "time/total_s": 60.0, "time/eval_s": 50.0})
    assert left.text() == ""
    left.note({"iteration": 1, "env_steps": 100, "time/total_s": 10.0})
    assert left.text() == "4:30"  # nine iterations of 10 s; after 4, 8 and 10 an evaluation of 60 s
    now += 70.0
    assert left.text() == "3:20"
    left.note({"iteration": 4, "env_steps": 400, "time/total_s": 70.0, "time/eval_s": 60.0})
    assert left.text() == "3:00"
    now += 1000.0
    assert left.text() == "0:00"
    unknown = TimeLeft(2, schedule.evaluations_after)
    unknown.note({"iteration": 1, "env_steps": 100, "time/total_s": 10.0})
    assert unknown.text() == "0:10 and evaluations"


@pytest.mark.parametrize(
    "schedule", [Schedule(10, 4, 0), Schedule(10, 5, 0, True, True), Schedule(7, 0, 0, False, True)]
)
def test_evaluations_are_counted_ahead(schedule: Schedule) -> None:
    for done in range(schedule.total + 1):
        ahead = range(done + 1, schedule.total + 1)
        assert schedule.evaluations_after(done) == sum(map(schedule.is_evaluated, ahead))


def test_a_long_phase_prints_how_far_it_is_and_the_panel_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("embodrl.reporting.console.time.monotonic", lambda: now)
    stream = io.StringIO()
    with Console("plain", 12, "run", terminal(stream, False)) as console:
        console.restore([row(3, **{"time/elapsed_s": 60.0})])
        console.phase("rollout", chunks=20)
        for _ in range(10):
            now += 2.5
            console.advance()
        assert stream.getvalue().splitlines() == [
            "iter 3/12 done, now rollout 4/20 chunks, 0:10",
            "iter 3/12 done, now rollout 8/20 chunks, 0:20",
        ]
        stream.truncate(stream.seek(0))
        console.phase("train")
        for done in range(1, 9):
            now += 2.5
            console.step(done, 100)
        assert stream.getvalue().splitlines() == [
            "iter 3/12 done, now train 4/100 updates, 0:10",
            "iter 3/12 done, now train 8/100 updates, 0:20",
        ]
    # The panel counts from the start of the process, after the time of the process before.
    stream = io.StringIO()
    with Console("rich", 12, "run", terminal(stream, True)) as console:
        console.restore([row(3, **{"time/elapsed_s": 60.0})])
        now += 7.0
    assert "1:07 elapsed" in stream.getvalue()


def test_success_is_that_of_started_episodes_and_an_evaluation_has_its_interval() -> None:
    stream = io.StringIO()
    with Console("plain", 12, "run", terminal(stream, False)) as console:
        cut = {"rollout/success_rate_started": 0.08, "rollout/cut_episodes": 5.0}
        console.update(row(1, **cut, **{"eval/success_rate": 0.5, "eval/episodes": 16.0}))
    assert "success 0.080  eval 0.500 [0.28, 0.72]" in stream.getvalue()


def test_off_prints_nothing() -> None:
    stream = io.StringIO()
    with Console("off", 4, "run", terminal(stream, True)) as console:
        console.update(row(1))
        console.message("hello")
    assert stream.getvalue() == ""


def test_sparkline_by_hand() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.1] * 9, width=4) == "▂" * 4


def test_a_full_disk_is_reported_with_the_file_and_the_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing flushes the same row again, and must not hide the error."""
    if not Path("/dev/full").is_char_device():
        pytest.skip("this system has no /dev/full")
    monkeypatch.setattr(sinks, "_open_no_link", lambda _path, flags: os.open("/dev/full", flags))
    metrics = MetricsLogger(tmp_path, LoggerConfig(tensorboard=False), None)
    with raises_code("output", OutputError, "metrics.jsonl", "embodrl resume"):
        try:
            metrics.log({"iteration": 1})
        finally:
            metrics.close()


def test_a_full_disk_drops_tensorboard_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    if not Path("/dev/full").is_char_device():
        pytest.skip("this system has no /dev/full")
    tracker = TensorBoardTracker(tmp_path / "tensorboard", None)
    tracker._file.close()
    tracker._file = Path("/dev/full").open("wb")  # noqa: SIM115 - the tracker closes it
    tracker._writer._writer = tracker._file
    with (
        caplog.at_level(logging.WARNING),
        MetricsLogger(tmp_path, QUIET, trackers={"TensorBoard": tracker}) as metrics,
    ):
        for iteration in range(1, 4):
            metrics.log(row(iteration))
    assert sum("TensorBoard is disabled" in record.getMessage() for record in caplog.records) == 1
    assert len(caplog.records) == 1 and len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert "Traceback" not in capfd.readouterr().err


def test_a_run_directory_that_is_moved_takes_its_sinks_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with caplog.at_level(logging.WARNING), MetricsLogger(tmp_path / "run", LoggerConfig()) as metrics:
        metrics.log(row(1))
        (tmp_path / "run").rename(tmp_path / "moved")
        metrics.log(row(2))
    assert not caplog.records and "Traceback" not in capfd.readouterr().err
    assert len(read_metrics(tmp_path / "moved" / "metrics.jsonl")) == 2
    events = accumulator.EventAccumulator(str(tmp_path / "moved" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("rollout/success_rate")] == [1, 2]


def test_a_resumed_run_hides_later_points_of_the_process_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, last, resumed, process in ((1, 5, None, 9), (3, 4, 2, 10)):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        with MetricsLogger(tmp_path, LoggerConfig(), resume_iteration=resumed) as metrics:
            for iteration in range(first, last + 1):
                metrics.log(row(iteration))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("rollout/success_rate")] == [1, 2, 3, 4]
