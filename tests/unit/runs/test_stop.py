"""Signals that a library takes for itself."""

import signal
import subprocess
import sys

import pytest

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


HANGS = """
import ctypes, threading, time
from embodrl.processes.ending import own_process
from embodrl.runs.stop import StopSignal

own_process()
with StopSignal(timeout_s=1.0) as stop:
    stop.graceful = True
    print("ready", flush=True)
    threading.Thread(target=ctypes.PyDLL(None).sleep, args=(60,), daemon=True).start()  # holds the interpreter lock
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_process_whose_interpreter_lock_is_held(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode in (-number, -signal.SIGKILL)  # a handler that has run takes the signal again
    assert "code: stopped-unsaved" in stderr


LIVES = """
import signal, sys, time
from embodrl.processes.ending import own_process
from embodrl.runs.stop import StopSignal

own_process()
signal.signal(signal.SIGCHLD, lambda *_: None)
for _ in range(2):
    with StopSignal(timeout_s=0.2) as stop:
        stop.graceful = True
        signal.raise_signal(signal.SIGCHLD)  # one that asks for nothing
        with stop.saving():
            signal.raise_signal(signal.SIGCHLD)
        time.sleep(1.0)
time.sleep(1.0)
print("lives")
"""


def test_the_guard_lets_be_what_reacts() -> None:
    done = subprocess.run([sys.executable, "-c", LIVES], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "lives\n")
