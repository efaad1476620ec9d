"""Trackers and files that fail: what they cost, and what is said."""

import errno
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from expect import raises_code

from embodrl.config.schema import LoggerConfig
from embodrl.errors import OutputError
from embodrl.reporting import sinks
from embodrl.reporting.report import write_report
from embodrl.reporting.sinks import MetricsLogger

WANDB = LoggerConfig(tensorboard=False, wandb_mode="online")


class FakeRun:
    """A run of Weights & Biases that fails at one step."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at, self.logged = fails_at, 0

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged += 1
        if self.fails_at == "log":
            raise ConnectionError("network is unreachable")

    def finish(self) -> None:
        if self.fails_at == "finish":
            raise ConnectionError("network is unreachable")
        if self.fails_at == "network gone":
            threading.Event().wait()


def fake_wandb(fails_at: str) -> SimpleNamespace:
    def init(**_: object) -> FakeRun:
        if fails_at == "init":
            raise TimeoutError("Run initialization has timed out")
        return FakeRun(fails_at)

    return SimpleNamespace(init=init, Settings=SimpleNamespace)


@pytest.mark.parametrize("fails_at", ["init", "log", "finish", "network gone"])
def test_weights_and_biases_may_fail_anywhere(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(fails_at))
    monkeypatch.setattr(sinks, "WANDB_FINISH_S", 0.01)
    with MetricsLogger(tmp_path, WANDB) as metrics:
        for iteration in (1, 2, 3):
            metrics.log({"iteration": iteration})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "Weights & Biases is disabled" in warning.getMessage()


def test_a_report_that_finds_the_disk_full_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MetricsLogger(tmp_path, LoggerConfig(tensorboard=False)) as metrics:
        metrics.log({"iteration": 1, "time/total_s": 1.0})
    before = write_report(tmp_path).read_bytes()

    def full(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode()[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with raises_code("output", OutputError, "report.html") as caught:
        write_report(tmp_path)
    assert "free disk space" in caught.value.hint
    assert (tmp_path / "report.html").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


@pytest.mark.parametrize(("number", "is_full"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_metrics_that_can_not_be_written_say_why(number: int, is_full: bool, tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, LoggerConfig(tensorboard=False)) as metrics:
        failing = Mock(wraps=metrics._file)
        failing.flush.side_effect = OSError(number, os.strerror(number))
        metrics._file = failing
        with raises_code("output", OutputError, os.strerror(number)) as caught:
            metrics.log({"iteration": 1})
    assert ("disk space" in caught.value.hint) == is_full and "embodrl resume" in caught.value.hint


@pytest.mark.parametrize("resume_iteration", [None, 2])
def test_a_directory_in_the_place_of_the_metrics_is_named(tmp_path: Path, resume_iteration: int | None) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with raises_code("output", OutputError, "metrics.jsonl") as caught:
        MetricsLogger(tmp_path, LoggerConfig(tensorboard=False), resume_iteration)
    assert "metrics.jsonl away" in caught.value.hint
