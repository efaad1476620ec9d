"""Signals that a library takes for itself."""

import subprocess
import sys

PROGRAM = """
import signal, sys
from embodrl.runs.stop import StopSignal

with StopSignal() as stop:
    stop.graceful = True
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as ray.init does
    stop.arm()
    signal.raise_signal(signal.SIGTERM)
    print("saves")
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
sys.exit(stop.exit_code)
"""


def test_signals_are_taken_again_from_a_library() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (143, "saves\n")
