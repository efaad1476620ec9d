"""What makes a soak fail, and what is left of one that is stopped."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from soak_verdict import Sample, check_faults, check_leaks, check_memory, check_steps, growth

FLAT = [Sample(float(t), 100.0, (40.0, 42.0), 30, 2, 2) for t in range(100)]


def failed(checks: list) -> list[str]:
    return [check.name for check in checks if not check.passed]


def test_growth_compares_the_last_third_with_the_first() -> None:
    assert growth([10, 10, 10, 99, 0, 5, 11, 11, 11]) == 11 / 10 - 1


def test_flat_memory_passes_and_a_warm_up_does_not_count() -> None:
    assert failed(check_memory(FLAT)) == []
    warming = [replace(s, driver_mib=10.0, workers_mib=(5.0,)) if s.time_s < 20 else s for s in FLAT]
    assert failed(check_memory(warming)) == []


def test_a_slow_leak_fails() -> None:
    leaking = [replace(s, driver_mib=100 + 0.2 * s.time_s) for s in FLAT]  # 115 to 120 in the last quarter
    assert failed(check_memory(leaking)) == ["memory of the driver"]
    # A process that is killed now and then is young whenever it is looked at; one is never killed.
    leaking = [replace(s, workers_mib=(40 + 0.1 * s.time_s, 40 + s.time_s % 7)) for s in FLAT]
    assert failed(check_memory(leaking)) == ["memory of the simulator process that is spared"]
    assert len(failed(check_memory(FLAT[:5]))) == 2  # too few to tell


def test_what_piles_up_fails() -> None:
    assert failed(check_leaks(FLAT, 2, 2)) == []
    piling = [replace(s, driver_fds=30 + int(s.time_s) // 10, memory_files=3, children=4) for s in FLAT]
    assert failed(check_leaks(piling, 2, 2)) == [
        "open files of the driver",
        "shared memories in use",
        "child processes",
    ]


def row(iteration: int, env_steps: int, lost: int = 0, restarts: int = 0) -> dict:
    return {
        "iteration": iteration,
        "env_steps": env_steps,
        "rollout/lost_episodes": float(lost),
        "env/restarts": restarts,
    }


def test_every_step_is_counted_but_those_lost() -> None:
    good = [row(1, 100), row(2, 190, lost=2), row(3, 290)]
    assert failed(check_steps(good, 100, 5)) == []
    assert failed(check_steps([row(1, 100), row(2, 195, lost=2)], 100, 5)) == ["step counter"]
    assert failed(check_steps([row(1, 100), row(3, 200)], 100, 5)) == ["iterations"]
    assert failed(check_steps([row(1, 100), row(1, 200)], 100, 5)) == ["iterations"]
    assert failed(check_steps([], 100, 5)) == ["iterations", "step counter"]


def test_every_fault_costs_a_restart() -> None:
    assert check_faults(16, 16, 2).passed and check_faults(14, 16, 2).passed
    assert not check_faults(13, 16, 2).passed  # one was not noticed
    assert not check_faults(17, 16, 2).passed  # something else failed
    assert not check_faults(0, 0, 2).passed


def marked(script: int, output: Path) -> list[int]:
    """Return the processes of the run that a soak has started."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except psutil.Error:
            continue
        if process.pid != script and "EMBODRL_SOAK" in environ and str(output) in environ.get("PYTHONPATH", ""):
            found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("number", "processes"),
    [(signal.SIGTERM, 1), pytest.param(signal.SIGINT, 3, marks=pytest.mark.long)],  # the driver, two simulators
)
def test_a_signal_leaves_no_process(number: signal.Signals, processes: int, tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "soak.py"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = tmp_path / "soak"
    command = [sys.executable, str(script), "--minutes", "5", "--output", str(output)]
    soak = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        while len(marked(soak.pid, output)) < processes:
            assert soak.poll() is None, soak.communicate()[1]
            time.sleep(0.05)
        soak.send_signal(number)
        assert soak.wait(60) == 128 + number
        assert not marked(soak.pid, output)
    finally:
        for pid in (soak.pid, *marked(soak.pid, output)):
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        soak.communicate()
