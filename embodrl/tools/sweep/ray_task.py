"""What a task of Ray does for a sweep. Imports no torch, since each task imports this in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import time

from embodrl.fields import open_descriptor
from embodrl.processes.ending import stop_with_parent
from embodrl.tools.sweep.sweep import Sweep

_LOOK_S = 0.2


def run_one(sweep: Sweep, index: int, directory: str) -> int:
    """Run one run of a sweep on this machine, in ``directory``; return its exit code.

    When Ray cancels the task, the run gets SIGTERM, on which it saves.

    Raises:
        FileNotFoundError: the directory of the sweep is not here.
    """
    with open(sweep.log(index), "ab", opener=open_descriptor) as log:
        process = subprocess.Popen(
            sweep.command(index),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            start_new_session=True,
            preexec_fn=stop_with_parent,
        )
    try:
        while process.poll() is None:  # the interrupt of Ray ends no system call
            time.sleep(_LOOK_S)
        return process.returncode
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        return process.wait()
