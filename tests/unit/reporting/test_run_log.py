"""The log of a run: how much of it there is, whatever is logged."""

import logging
import os
import warnings
from pathlib import Path

import pytest

from embodrl.reporting import log as module
from embodrl.reporting.log import RunLog


def flood(count: int) -> None:
    for number in range(count):
        logging.getLogger("embodrl.x").info("round %d", number)


def test_a_full_log_becomes_an_older_file_and_the_oldest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    path = tmp_path / "embodrl.log"
    with RunLog(path):
        flood(100)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["embodrl.log", "embodrl.log.1", "embodrl.log.2"]
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    assert "round 99\n" in path.read_text() and "round 0\n" not in (tmp_path / "embodrl.log.2").read_text()


def test_a_flood_is_cut_down_and_others_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    path = tmp_path / "embodrl.log"
    with RunLog(path):
        flood(module.PER_WINDOW + 5)
        logging.getLogger("embodrl.x").info("another place")
        clock[0] += module.WINDOW_S
        flood(module.PER_WINDOW + 3)
    text = path.read_text()
    assert text.count(": round ") == 2 * module.PER_WINDOW
    assert "round 0 [5 like it were left out]" in text and "another place" in text
    assert "3 records of embodrl.x" in text


def test_screen_and_file_drop_the_same_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "embodrl.log"
    with RunLog(path):
        for number in range(module.PER_WINDOW + 5):
            logging.getLogger("embodrl.x").warning("round %d", number)
    assert path.read_text().count(": round ") == capsys.readouterr().err.count(": round ") == module.PER_WINDOW


def test_warnings_of_different_places_are_counted_apart(tmp_path: Path) -> None:
    path = tmp_path / "embodrl.log"
    with RunLog(path), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        for number in range(module.PER_WINDOW + 5):
            warnings.warn_explicit(f"of the first {number}", UserWarning, "first.py", 1)
        warnings.warn_explicit("of the second", UserWarning, "second.py", 1)
    text = path.read_text()
    assert text.count("of the first") == module.PER_WINDOW and "of the second" in text


def test_a_clock_that_is_set_back_silences_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wall = [1000.0], [1e6]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("logging.time.time", lambda: wall[0])
    monkeypatch.setattr("logging.time.time_ns", lambda: int(wall[0] * 1e9), raising=False)
    path = tmp_path / "embodrl.log"
    with RunLog(path):
        flood(module.PER_WINDOW)
        clock[0] += module.WINDOW_S
        wall[0] -= 86400
        flood(module.PER_WINDOW)
    assert path.read_text().count(": round ") == 2 * module.PER_WINDOW


def test_text_that_has_no_encoding_does_not_end_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's would pass it on to what can't send it
    path = tmp_path / "embodrl.log"
    with RunLog(path):
        logging.getLogger("embodrl.x").info("file \udce9")
        logging.getLogger("embodrl.x").info("later")
    assert "file \\udce9" in path.read_text() and "later" in path.read_text()


def test_a_pipe_in_the_place_of_the_log_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "embodrl.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    for _ in range(2):  # with a reader, and without one
        with RunLog(path):
            flood(1)
        assert "no log file" in capsys.readouterr().err
        if reader >= 0:
            os.close(reader)
            reader = -1


def test_the_terminal_gets_no_escape_sequences_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path / "log"):
        logging.getLogger("embodrl.x").warning("a simulator said %s", "\x1b]0;title\x07")
    assert "\\x1b]0;title\\x07" in capsys.readouterr().err
