"""Families of processes: who ends with whom."""

import os
import secrets
import select
import subprocess
import sys

from embodrl.processes.guard import VARIABLE, end_family

# Ends its family, as a driver does at the second signal, but only after it has printed who that is.
DRIVER = """
import os, subprocess, sys
from embodrl.processes.guard import VARIABLE, adopt, end_family, family
if sys.argv[1] == "adopts":
    adopt()
own = subprocess.Popen(["sleep", "600"], env={**os.environ, VARIABLE: f"{family()}/simulator.0"})
print(own.pid, family(), flush=True)
sys.stdin.readline()
end_family(family())
print("ended", flush=True)
sys.stdin.read()
"""


def gone(pidfd: int, seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


def driver(family: str, how: str) -> tuple["subprocess.Popen[str]", int, str]:
    """Start a driver in the environment of a member of a family; return it, a pidfd of its child, and its family."""
    command = [sys.executable, "-c", DRIVER, how]
    started = subprocess.Popen(
        command, env=os.environ | {VARIABLE: family}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    pid, founded = started.stdout.readline().split()
    return started, os.pidfd_open(int(pid)), founded


def test_a_driver_within_another_run_ends_what_is_its_own_and_ends_with_that_run() -> None:
    outer = f"test-{secrets.token_hex(4)}"
    starter = subprocess.Popen(["sleep", "600"], env=os.environ | {VARIABLE: f"{outer}/simulator.0"})
    ends_itself, simulator, founded = driver(f"{outer}/simulator.0", "founds")
    ends_with_the_run, other_simulator, _ = driver(f"{outer}/simulator.0", "founds")
    assert founded.startswith(f"{outer}/simulator.0/run.")
    assert ends_itself.stdin is not None and ends_itself.stdout is not None
    ends_itself.stdin.write("\n")
    ends_itself.stdin.flush()
    assert ends_itself.stdout.readline() == "ended\n" and gone(simulator, 60.0)
    assert starter.poll() is None and not gone(other_simulator, 0.0)
    end_family(outer)
    assert [each.wait(60.0) for each in (starter, ends_itself, ends_with_the_run)] == [-9, -9, -9]
    assert gone(other_simulator, 60.0)


def test_what_a_killed_driver_within_another_run_has_started_ends_with_it() -> None:
    outer = f"test-{secrets.token_hex(4)}"
    started, simulator, _ = driver(f"{outer}/simulator.0", "founds")
    started.kill()
    assert gone(simulator, 60.0) and started.wait(60.0) == -9


def test_a_process_that_embodrl_has_started_belongs_to_the_family_it_was_given() -> None:
    started, simulator, founded = driver(f"test-{(token := secrets.token_hex(4))}/rollout.0", "adopts")
    assert founded == f"test-{token}/rollout.0"
    end_family(founded)
    assert started.wait(60.0) == -9 and gone(simulator, 60.0)


def test_a_member_whose_environment_cannot_be_read_ends_with_its_family() -> None:
    """As that of a process is for a moment while it executes another program."""
    outer = f"test-{secrets.token_hex(4)}"
    parent = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], env={}).pid, flush=True); input()"
    started = subprocess.Popen(
        [sys.executable, "-c", parent],
        env=os.environ | {VARIABLE: f"{outer}/simulator.0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    child = os.pidfd_open(int(started.stdout.readline()))
    end_family(outer)
    assert started.wait(60.0) == -9 and gone(child, 60.0)


def test_a_time_counts_only_where_signals_are_watched() -> None:
    program = """
import sys, time
from embodrl.processes.guard import family, keep_time, release_signals, watch_signals
import os
family()
keep_time(0.0)
reading, _ = os.pipe()
watch_signals(reading, 60.0)
release_signals()
keep_time(0.0)
time.sleep(1.0)
print("lives")
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "lives\n")
