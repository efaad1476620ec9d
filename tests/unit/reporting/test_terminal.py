"""Streams that go away: terminals that are closed, pipes without a reader, full disks."""

from __future__ import annotations

import gc
import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from embodrl.reporting.log import RunLog
from embodrl.reporting.terminal import SafeStream, safe_streams

PROGRAM = """
import logging, os, signal, sys
from pathlib import Path
from embodrl.reporting.console import Console
from embodrl.reporting.log import RunLog
from embodrl.reporting.progress import Progress

kind, log, arrived, go = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
signal.signal(signal.SIGHUP, signal.SIG_IGN)

def wait():
    os.write(arrived, b"x")
    assert os.read(go, 1) == b"x"

with RunLog(log):
    if kind == "progress":
        with Progress("sft", 4, "steps", "rich") as shown:
            shown.update(1)
            wait()
            shown.update(2)
            shown.message("saved")
    else:
        with Console(kind, 4, "run") as console:
            console.message("before")
            wait()
            for iteration in (1, 2):
                console.update({"iteration": iteration, "env_steps": 3})
                logging.getLogger("embodrl.x").warning("warning %d", iteration)
            console.message("after")
    logging.getLogger("embodrl.x").info("reached the end")
"""


@pytest.mark.parametrize("kind", ["rich", "plain", "progress"])
def test_a_terminal_that_is_closed_ends_nothing(tmp_path: Path, kind: str) -> None:
    """A real terminal: after its other end is closed, writing fails with EIO, since SIGHUP is ignored."""
    master, terminal = pty.openpty()
    arrived, go = os.pipe(), os.pipe()
    log = tmp_path / "run.log"
    command = [sys.executable, "-c", PROGRAM, kind, str(log), str(arrived[1]), str(go[0])]
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        pass_fds=(arrived[1], go[0]),
        start_new_session=True,
        env=os.environ | {"TERM": "xterm"},
    )
    for descriptor in (terminal, arrived[1], go[0]):
        os.close(descriptor)
    assert os.read(arrived[0], 1) == b"x"
    os.close(master)
    os.write(go[1], b"x")
    assert process.wait(120) == 0
    content = log.read_text()
    assert content.count("standard output is lost") == 1 and "Input/output error" in content
    assert "reached the end" in content and "Traceback" not in content
    for descriptor in (arrived[0], go[1]):
        os.close(descriptor)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
def test_a_stream_is_dropped_at_its_first_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Path("/dev/full").open("w") as full, caplog.at_level(logging.WARNING):
        stream = SafeStream(full, "standard output")
        for _ in range(3):
            print("x" * 10_000, file=stream, flush=True)
    assert [record.getMessage() for record in caplog.records] == [
        "standard output is lost ([Errno 28] No space left on device); the run continues, with its log file"
    ]


def test_a_stream_that_is_collected_leaves_the_other_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    closed = (tmp_path / "out").open("w")
    safe = SafeStream(closed, "standard output")
    closed.close()
    del safe
    gc.collect()
    assert not caplog.records


def test_what_can_not_be_encoded_is_replaced() -> None:
    encoded = io.BytesIO()
    stream = SafeStream(io.TextIOWrapper(encoded, "ascii"), "standard output")
    stream.write("▁ 5")
    stream.flush()
    assert encoded.getvalue() == b"? 5"


def test_the_streams_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with safe_streams():
        print("out")
        print("err", file=sys.stderr)
        assert isinstance(sys.stdout, SafeStream)
        with safe_streams():
            print("more")
    assert sys.stdout is before
    captured = capsys.readouterr()
    assert captured.out == "out\nmore\n" and captured.err == "err\n"


@pytest.mark.parametrize("kind", ["directory", "full", "file above"])
def test_a_log_that_can_not_be_written_does_not_hide_the_error(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "run.log"
    if kind == "directory":
        path.mkdir(parents=True)
    elif kind == "file above":
        path.parent.write_text("")
    elif not Path("/dev/full").is_char_device():
        pytest.skip("this system has no /dev/full")
    else:
        path.parent.mkdir()
        path.symlink_to("/dev/full")
    with pytest.raises(KeyError, match="the real error"), RunLog(path):
        logging.getLogger("embodrl.x").info("the first line")
        raise KeyError("the real error")
    assert capsys.readouterr().err.count("warning: no log file") == 1
