"""Signals that a library takes for itself, and what a run may do to the process that it is in."""

import signal
import subprocess
import sys
import threading

import pytest

from embodrl.trainer.stop import REPEAT_S, StopSignal

RAY = """
import signal, sys
from embodrl.trainer.stop import StopSignal

with StopSignal() as stop:
    stop.can_save("")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as ray.init does
    stop.arm()
    signal.raise_signal(signal.SIGTERM)
    print("saves")
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
sys.exit(stop.exit_code)
"""
# The wait of the main thread outlasts the exception: only the end of the child ends it.
HANGING = """
import os, signal, subprocess, sys, threading
from embodrl.errors import EmbodrlError
from embodrl.processes.ending import own_process
from embodrl.processes.guard import VARIABLE, family
from embodrl.trainer.stop import StopSignal

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
if sys.argv[1] == "command line":
    own_process()
environ = os.environ | {VARIABLE: family()}
try:
    with StopSignal(0.3) as stop:
        stop.can_save("resume it")
        child = subprocess.Popen(["sleep", "600"], env=environ)
        signal.raise_signal(signal.SIGINT)
        try:
            threading.Event().wait()
        finally:
            child.wait()
except EmbodrlError as error:
    print(error.code, error.exit_code, error.hint)
assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
"""
ADVANCING = """
import signal, sys, threading
from embodrl.processes.liveness import report_work
from embodrl.trainer.stop import StopSignal

with StopSignal(1.0) as stop:
    stop.can_save("")
    signal.raise_signal(signal.SIGTERM)
    for _ in range(13):
        threading.Event().wait(0.1)
        report_work()
    print("updated")
sys.exit(stop.exit_code)
"""


def run(program: str, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_signals_are_taken_again_from_a_library() -> None:
    assert run(RAY)[:2] == (143, "saves\n")


def test_a_process_of_the_users_gets_an_error_where_the_command_line_ends() -> None:
    assert run(HANGING, "notebook")[:2] == (0, "stopped-unsaved 130 resume it\n")
    code, out, err = run(HANGING, "command line")
    assert (code, out) == (130, "") and "code: stopped-unsaved" in err and "hint: resume it" in err


def test_an_update_that_advances_is_finished() -> None:
    assert run(ADVANCING)[:2] == (143, "updated\n")


HANGS = """
import ctypes, signal, threading, time
from embodrl.processes.ending import own_process
from embodrl.trainer.stop import StopSignal

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
own_process()
with StopSignal(timeout_s=1.0) as stop:
    stop.can_save("resume it")
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
from embodrl.trainer.stop import StopSignal

own_process()
signal.signal(signal.SIGCHLD, lambda *_: None)
for _ in range(2):
    with StopSignal(timeout_s=0.2) as stop:
        stop.can_save("resume it")
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


def test_a_second_signal_counts_after_its_time_only() -> None:
    now = [100.0]
    with pytest.raises(SystemExit) as ended, StopSignal(clock=lambda: now[0]) as stop:
        stop.can_save("")
        signal.raise_signal(signal.SIGTERM)
        now[0] += 0.9 * REPEAT_S
        signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGTERM
        now[0] += 0.1 * REPEAT_S
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


def test_a_signal_while_nothing_can_be_saved_ends_at_once() -> None:
    with pytest.raises(SystemExit), StopSignal(clock=lambda: 0.0):
        signal.raise_signal(signal.SIGTERM)


TWICE = """
import ctypes, sys
from embodrl.processes.ending import own_process
from embodrl.trainer.stop import StopSignal

own_process()
with StopSignal() as stop:
    stop.can_save("")
    ctypes.PyDLL(None).system(b"kill $PPID; /bin/true; kill $PPID")  # no Python code runs between the two
    print("saves")
sys.exit(stop.exit_code)
"""


def test_two_signals_at_once_leave_time_to_save() -> None:
    code, out, err = run(TWICE)
    assert (code, out, len(err.splitlines())) == (143, "saves\n", 1)


# The thread gets the signals when they arrive; the handlers run once the native call is over.
IN_NATIVE_CODE = """
import ctypes, signal, sys
from embodrl.processes.ending import own_process
from embodrl.trainer.stop import StopSignal

signal.signal(signal.SIGHUP, signal.SIG_DFL)
own_process()
with StopSignal() as stop:
    stop.can_save("")
    if sys.argv[1]:
        signal.raise_signal(signal.SIGTERM)
    ctypes.CDLL(None).system(sys.argv[2].encode())
    print("saves")
sys.exit(0 if stop else 1)
"""


@pytest.mark.parametrize(
    ("handled", "command"),
    [("handled", "kill -TERM $PPID; sleep 1.1"), ("", "kill -TERM $PPID; kill -HUP $PPID; sleep 1.1")],
)
def test_signals_count_when_they_arrive(handled: str, command: str) -> None:
    code, out, err = run(IN_NATIVE_CODE, handled, command)
    assert (code, out, len(err.splitlines())) == (0, "saves\n", 1)


def test_a_handler_that_runs_late_takes_the_time_of_the_arrival() -> None:
    late_s = [0.0]

    def clock() -> float:
        return late_s[0] if threading.current_thread() is threading.main_thread() else 0.0

    with StopSignal(clock=clock) as stop:
        stop.can_save("")
        signal.raise_signal(signal.SIGTERM)
        late_s[0] = 1.4 * REPEAT_S
        signal.raise_signal(signal.SIGTERM)
    assert stop.number == signal.SIGTERM
