"""A child process that ends later than it should."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from expect import raises_code

from embodrl.errors import EmbodrlError
from embodrl.processes import child as children
from embodrl.processes.child import ChildProcess


def test_a_killed_process_that_ends_late_is_still_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    child = ChildProcess(["sleep", "1000"], {})
    monkeypatch.setattr(children, "_REAP_S", 0.01)
    monkeypatch.setattr(children.os, "killpg", lambda pid, number: None)  # as if a driver held it up
    pid = child.pid
    with raises_code("embodrl", EmbodrlError, str(pid)):
        child.kill()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20.0
    while psutil.pid_exists(pid):  # true for a zombie
        assert time.monotonic() < deadline
        time.sleep(0.01)
