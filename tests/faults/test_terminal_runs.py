"""A whole run in a terminal that is closed."""

import fcntl
import os
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from runs import TINY, embodrl, environment, metrics

pytestmark = pytest.mark.long
SOON_S = 240.0


def test_a_run_whose_terminal_is_closed_saves_and_ends_as_by_sighup(tmp_path: Path) -> None:
    config, run_dir = tmp_path / "tiny.yaml", tmp_path / "run"
    config.write_text(TINY)
    arguments = ["train", "--config", str(config), f"runner.output_dir={run_dir}", "runner.max_iterations=100000"]
    master, terminal = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    run = subprocess.Popen(
        [sys.executable, "-c", "from embodrl.cli.main import main; main()", *arguments],
        env=environment(),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(terminal)
    try:
        said = b""
        while b"iter " not in said:
            said += os.read(master, 4096)
        os.close(master)  # the kernel sends SIGHUP to the session, and writing to the terminal fails from here on
        assert run.wait(SOON_S) == 129
    finally:
        run.kill()
    done = max(row["iteration"] for row in metrics(run_dir))
    resumed = embodrl("resume", run_dir, f"runner.max_iterations={done + 1}")
    assert resumed.code == 0, resumed.stderr
    assert f"step_{done}" in resumed.stdout
