"""Watching processes for somebody on another machine."""

import os
import signal
import subprocess
import sys

from embodrl.processes.liveness import Limits
from embodrl.scheduler.launchers.ray.watcher import Watcher

BEATS = """
import os, sys
from embodrl.processes.liveness import start_beating
heartbeat = os.memfd_create("heartbeat")
start_beating(heartbeat)
print(heartbeat, flush=True)
sys.stdin.read()
"""


def test_a_process_that_beats_is_alive_until_it_is_stopped() -> None:
    command = [sys.executable, "-c", BEATS]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    heartbeat, watcher = int(child.stdout.readline()), Watcher(Limits(heartbeat_s=1.0, stall_s=600.0))
    assert watcher.look(child.pid, heartbeat, busy=False, hurried=False) == ""
    os.kill(child.pid, signal.SIGSTOP)
    while not (reason := watcher.look(child.pid, heartbeat, busy=False, hurried=False)):
        os.sched_yield()
    assert reason.startswith("is stopped by a signal (state T): no heartbeat")
    watcher.dump_stack(child.pid)  # which would end it, as it has no handler
    watcher.end(child.pid)
    assert child.wait(60.0) == -signal.SIGKILL
    assert watcher.look(child.pid, heartbeat, busy=False, hurried=False) == ""
    watcher.end(child.pid)
    assert Watcher(Limits()).look(child.pid, heartbeat, busy=False, hurried=False) == ""
