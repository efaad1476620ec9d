"""What a run does when its processes fail: ``python benchmarks/fault_matrix.py [FILE.json] [KIND,...] [FAULT,...]``.

Each cell is an `embodrl train` of the toy environment in a process of its own, with default timeouts. Once the run has
logged its first iteration, one process of the kind gets the fault:

kill        SIGKILL
stop        SIGSTOP
slow        it gets a tenth of its processor time: stopped and continued in turns
memory      it allocates without end, and finds none any more after 256 MiB (RLIMIT_AS)
disconnect  its connection to the parent is shut down; of the driver: its terminal is gone (SIGHUP)

Detection is the time from the fault to the first line of the log, or the end of the run, that comes of it. A cell that
is not over after CELL_S counts as hung. A driver that is stopped can't find out: it gets a second SIGTERM, and ends as
soon as it is continued. A run that continues is then ended by SIGTERM; what a run leaves behind is counted.

The exit code is 1 if a run hangs, ends otherwise than it should, leaves a process, or finds a fault after DETECTED_S.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from hardware import describe_hardware

from embodrl.storage.json_file import write_json_file

CELL_S = 600.0
DETECTED_S = 30.0
"""Longest time that a fault may go unnoticed at default settings."""
SERVER = "policy server"
"""Its cells are evaluations: see fault_matrix_served.py."""
ENDS = {("driver", "kill"): -9, ("driver", "stop"): 143, ("driver", "memory"): 1, ("driver", "disconnect"): 129}
ENDS[SERVER, "stop"] = 1  # the evaluation ends and names the server
"""Exit codes of runs that can't continue; all others have to, and end with 143 after SIGTERM."""
FIRST_ITERATION_S = 600.0
_PIDFD_GETFD = 438
SETTINGS = (
    (Path(__file__).parent / "smallest_run.yaml").read_text()
    + """
presets: {env: toy}
env:
  tasks: [reach-red]
  max_episode_steps: 6
  pin_cpus: false
  cameras: [{height: 16, width: 16}]
  train: {total_num_envs: 4, max_steps_per_rollout_epoch: 12, ignore_terminations: true}
  eval: {total_num_envs: 4, num_episodes: 4, decoding: greedy}
  num_processes: 2
runner:
  max_iterations: 60
  eval_interval: 100
  save_interval: 5
  logger: {tensorboard: false, console: plain}
extensions: [leak]
"""
)
LEAK = """
import resource, signal

def leak(*_):
    kept, has = [], int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + (256 << 20), resource.RLIM_INFINITY))
    while True:
        kept.append(bytearray(8 << 20))

signal.signal(signal.SIGUSR2, leak)
"""
FSDP = ("actor.training_backend=fsdp", "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}")
AHEAD = "runner.max_staleness=1"  # rollouts run while the policy trains
FAULTS = ("kill", "stop", "slow", "memory", "disconnect")
CONTINUES = "continues"


@dataclass(frozen=True)
class Kind:
    """Which process of which run.

    Attributes:
        pattern: found in its command line or log; "" for the driver.
        settings: of the run.
    """

    pattern: str
    settings: tuple[str, ...] = ()


KINDS = {
    "simulator": Kind("bootstrap.py"),
    "rollout process": Kind("rollout_", ("rollout.own_process=true",)),
    "simulator (asynchronous)": Kind("bootstrap.py", (AHEAD,)),
    "rollout process (asynchronous)": Kind("rollout_", (AHEAD, "rollout.own_process=true")),
    "actor process": Kind("actor_", ("actor.own_process=true",)),
    "trainer rank 1 (FSDP)": Kind("actor_1", FSDP),
    "driver": Kind(""),
}


@dataclass(frozen=True)
class Cell:
    """What became of a run.

    Attributes:
        kind: of the process with the fault.
        fault: its name.
        detected_s: from the fault to the first sign of it; None without one.
        outcome: how the run ended or continued.
        exit_code: of the run; None if it had to be killed.
        iterations: that it has logged.
        left: processes that outlived it.
        told: the first line that names the fault.
    """

    kind: str
    fault: str
    detected_s: float | None
    outcome: str
    exit_code: int | None
    iterations: int
    left: int
    told: str


class Run:
    """A training run in a process of its own.

    Args:
        directory: gets everything.
        settings: further ones.
    """

    def __init__(self, directory: Path, settings: tuple[str, ...]) -> None:
        self.run_dir = directory / "run"
        config = directory / "config.yaml"
        config.write_text(SETTINGS)
        (directory / "leak.py").write_text(LEAK)
        command = [sys.executable, "-m", "embodrl", "train", "--config", str(config), "cluster.device=cpu"]
        self._output = (directory / "output").open("wb")
        self.process = subprocess.Popen(
            [*command, f"runner.output_dir={self.run_dir}", *settings],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            start_new_session=True,
        )
        self.output = directory / "output"
        self.family: list[psutil.Process] = []

    @property
    def rows(self) -> int:
        """Iterations in its metrics."""
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    @property
    def log(self) -> list[str]:
        """Lines of its output, which has all that its log has."""
        return self.output.read_text(errors="replace").replace(str(self.run_dir), "RUN").splitlines()

    def wait_for(self, rows: int, seconds: float) -> bool:
        """Wait for so many iterations, or the end of the run."""
        deadline = time.monotonic() + seconds
        while self.rows < rows and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.rows >= rows

    def victim(self, kind: Kind) -> psutil.Process:
        """Return the process that gets the fault."""
        driver = psutil.Process(self.process.pid)
        self.family = driver.children(recursive=True)
        if not kind.pattern:
            return driver
        return next(found for found in self.family if kind.pattern in _description(found))

    def terminate(self) -> int | None:
        """Ask the run to end; return its exit code, None if it does not."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CELL_S)
        return self.process.poll()

    def close(self) -> int:
        """End what is left; return how many processes outlived the driver."""
        if self.process.poll() is None:
            self.family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
        gone, alive = psutil.wait_procs(self.family, timeout=10)
        del gone
        left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        self._output.close()
        return len(left)


def _description(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return " ".join(process.cmdline()) + " " + str(Path(f"/proc/{process.pid}/fd/1").readlink())
    return ""


def inflict(fault: str, victim: psutil.Process, is_driver: bool, over: threading.Event) -> None:
    """Let a process have a fault; those that last do so until ``over``."""
    if fault == "kill":
        victim.kill()
    elif fault == "stop":
        victim.suspend()
    elif fault == "slow":
        threading.Thread(target=_slow_down, args=(victim, over), daemon=True).start()
    elif fault == "memory":
        victim.send_signal(signal.SIGUSR2)
    elif is_driver:
        victim.send_signal(signal.SIGHUP)
    else:
        _disconnect(victim)


def _slow_down(victim: psutil.Process, over: threading.Event) -> None:
    with contextlib.suppress(psutil.Error):
        while not over.wait(0.05):
            victim.suspend()
            over.wait(0.45)
            victim.resume()


def _disconnect(victim: psutil.Process) -> None:
    """Shut down the socket whose number is the last argument of the process."""
    pidfd = os.pidfd_open(victim.pid)
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, int(victim.cmdline()[-1]), 0)
    os.close(pidfd)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    with socket.socket(fileno=descriptor) as shared:
        shared.shutdown(socket.SHUT_RDWR)


def try_cell(name: str, fault: str) -> Cell:
    """Run a cell."""
    if name == SERVER:
        import fault_matrix_served

        return fault_matrix_served.try_cell(name, fault)
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as directory:
        run, over = Run(Path(directory), kind.settings), threading.Event()
        try:
            if not run.wait_for(2, FIRST_ITERATION_S):
                return Cell(
                    name, fault, None, "did not start", run.process.poll(), run.rows, 0, "\n".join(run.log[-20:])
                )
            known, start = len(run.log), time.monotonic()
            rows = run.rows
            inflict(fault, run.victim(kind), not kind.pattern, over)
            if not kind.pattern and fault == "stop":
                return _stopped_driver(name, run, start)
            detected, told = None, ""
            while run.process.poll() is None and time.monotonic() - start < CELL_S:
                told = told or _first_sign(run.log[known:])
                if told and detected is None:
                    detected = time.monotonic() - start
                if (detected is not None or fault == "slow") and run.rows >= rows + 2:
                    break  # it continues
                time.sleep(0.1)
            code = run.process.poll()
            if code is not None:
                detected = time.monotonic() - start if detected is None else detected
                told = _first_sign(run.log[known:])
                outcome = f"ends with {code}"
            elif run.rows >= rows + 2:
                over.set()
                outcome, code = CONTINUES, run.terminate()
            else:
                outcome = "HANGS"
            return Cell(name, fault, detected, outcome, code, run.rows, run.close(), told.strip())
        finally:
            over.set()
            run.close()


def _stopped_driver(name: str, run: Run, start: float) -> Cell:
    """SIGTERM, and then SIGCONT: it saves and ends; nothing can be done while it is stopped."""
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGCONT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(CELL_S)
    code, seconds = run.process.poll(), time.monotonic() - start
    outcome = "HANGS" if code is None else f"SIGTERM, SIGCONT: saves, ends with {code}"
    return Cell(name, "stop", seconds, outcome, code, run.rows, run.close(), "")


def _first_sign(lines: list[str]) -> str:
    """Return the first line that comes of the fault, of those that name the process if there is one."""
    for signs in (
        ("restart ", "is stopped by a signal", "hangs", "killed by", "raised", "exited"),
        ("error", "stopped by"),
    ):
        for line in lines:
            if any(sign in line for sign in signs):
                return line
    return ""


def wrongs(cell: Cell) -> list[str]:
    """Return what should not have been."""
    code = ENDS.get((cell.kind, cell.fault))
    found = [f"{cell.left} processes are left"] if cell.left else []
    if code is None and cell.outcome != CONTINUES:
        found.append(f"{cell.outcome}, and should continue")
    if cell.exit_code != (code or 143):
        found.append(f"exit code {cell.exit_code}, not {code or 143}")
    if cell.detected_s is None and cell.fault != "slow":  # a slow process is no fault to find
        found.append("never found")
    if cell.detected_s is not None and cell.detected_s > DETECTED_S:
        found.append(f"found after {cell.detected_s:.0f} s, more than {DETECTED_S:.0f}")
    return found


def main() -> None:
    """Run all cells, or those of the kinds and faults that are named, and print the table."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the runs would ignore it, too
    arguments = sys.argv[1:]
    target = Path(arguments.pop(0)) if arguments and arguments[0].endswith(".json") else None
    kinds = arguments[0].split(",") if arguments else [*KINDS, SERVER]
    faults = arguments[1].split(",") if len(arguments) > 1 else FAULTS
    cells: list[Cell] = []
    print("| process | fault | detected | outcome | left | first sign |\n|---|---|---|---|---|---|", flush=True)
    for kind in kinds:
        for fault in faults:
            cells.append(cell := try_cell(kind, fault))
            seconds = "-" if cell.detected_s is None else f"{cell.detected_s:.1f} s"
            print(f"| {kind} | {fault} | {seconds} | {cell.outcome} | {cell.left} | {cell.told[:110]} |", flush=True)
    longest = max((cell.detected_s or 0.0 for cell in cells), default=0.0)
    wrong = {cell: reasons for cell in cells if (reasons := wrongs(cell))}
    print(f"\nlongest detection {longest:.1f} s, {len(wrong)} of {len(cells)} went wrong")
    for cell, reasons in wrong.items():
        print(f"{cell.kind}, {cell.fault}: {', '.join(reasons)}")
    if target is not None:
        write_json_file(target, {"hardware": describe_hardware(), "cells": [asdict(cell) for cell in cells]})
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
