"""Runs a list of checks within a time limit and records each as a line of JSON; what has a line is not run again.

Used by ``gpu_checks.py``. The output directory has two files, however many checks there are: ``results.jsonl`` and
``checks.log``, to which the output of a check's commands is appended when it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

RESULTS_FILE = "results.jsonl"
LOG_FILE = "checks.log"
MIN_SECONDS = 5.0
"""A check does not begin with less time left."""
GRACE_S = 5.0
ERROR = re.compile(r"error:|The configuration has|[\w.]*(Error|Exception)\b|Fatal Python error")
"""How a line begins that says what went wrong."""

Figures = dict[str, Any]


class CheckFailed(Exception):
    """A check did not find what it wants.

    Args:
        reason: of the failure.
        figures: that were found nevertheless.
    """

    def __init__(self, reason: str, figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.figures = figures or {}


class NotHere(Exception):
    """A check can't run on this machine; the message says why."""


class Clock:
    """The time that the whole list has.

    Args:
        limit_s: seconds from now.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def stop(self) -> None:
        """End the time now."""
        self._end = time.monotonic()


@dataclass
class Shell:
    """Runs the commands of one check and keeps their output.

    Args:
        name: of the check.
        directory: that the check may write to.
        environment: of the commands.
        timeout_s: seconds that the check has, of all its commands together.
        clock: of the whole list.
        root: where commands run.
    """

    name: str
    directory: Path
    environment: Mapping[str, str]
    timeout_s: float
    clock: Clock
    root: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log = self.directory / "output.log"
        self._end = time.monotonic() + self.timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until this check is stopped."""
        return min(self._end - time.monotonic(), self.clock.left_s)

    def start(self, *command: object, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command in a process group of its own, its output to the check's log."""
        words = [str(word) for word in command]
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(words)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                words,
                cwd=self.root,
                env={**os.environ, **self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Return the exit code of a command.

        Raises:
            CheckFailed: it took longer than the check may.
        """
        try:
            return process.wait(max(0.0, self.left_s))
        except subprocess.TimeoutExpired:
            self.give_up(f"not done after {self.timeout_s:.0f} s")

    def run(self, *command: object, environment: Mapping[str, str] | None = None) -> None:
        """Run a command.

        Raises:
            CheckFailed: it failed, or see ``wait``.
        """
        code = self.wait(self.start(*command, environment=environment))
        if code:
            raise CheckFailed(f"exit code {code}: {self.end_of_log()}")

    def give_up(self, reason: str) -> NoReturn:
        """End the commands of a check that has no time left.

        Raises:
            CheckFailed: with the reason and the end of the log.
        """
        self.stop()
        raise CheckFailed(f"{reason}; the log ends with: {self.end_of_log()}")

    def end_of_log(self) -> str:
        """Return what the log ends with: from its last error on, else its last lines."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [number for number, line in enumerate(lines) if ERROR.match(line)]
        start = errors[-1] if errors else max(0, len(lines) - 3)
        return " | ".join(lines[start:][:6])[:700]

    def stop(self) -> None:
        """End the commands that still run, with all their processes."""
        for process in self.running:
            if process.poll() is None:
                _signal_group(process, signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                _signal_group(process, signal.SIGKILL)
                process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.killpg(process.pid, number)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: of its line in the results.
        run: returns figures; raises CheckFailed or NotHere.
        timeout_s: seconds that it may take.
        alone: nothing else runs meanwhile: it measures time, or needs the memory of the machine.
    """

    name: str
    run: Callable[[Shell], Figures]
    timeout_s: float
    alone: bool = False


class CheckList:
    """Runs checks in order and records them.

    Args:
        output: directory of the results.
        work: directory that checks may write to.
        environment: of their commands.
        limit_s: seconds that all of them have.
        workers: checks that run at once, of those that need not be alone.
        root: where commands run.
    """

    def __init__(
        self, output: Path, work: Path, environment: Mapping[str, str], limit_s: float, workers: int, root: Path
    ) -> None:
        self.output = output
        self.work = work
        self.environment = environment
        self.clock = Clock(limit_s)
        self.workers = workers
        self.root = root
        self._lock = threading.Lock()
        self._shells: list[Shell] = []

    def run(self, checks: Iterable[Check]) -> list[str]:
        """Run the checks that have no result yet; return the names of those that time did not suffice for."""
        self.output.mkdir(parents=True, exist_ok=True)
        results = self.output / RESULTS_FILE
        if results.is_file() and not results.read_bytes().endswith(b"\n"):
            results.write_bytes(results.read_bytes() + b"\n")  # a machine that was lost has cut the last line off
        done = {row["name"] for row in read_rows(self.output)}
        pending = [check for check in checks if check.name not in done]
        left: list[str] = []
        for group in _groups(pending):
            with ThreadPoolExecutor(self.workers) as pool:
                left += [name for name in pool.map(self._one, group) if name is not None]
        return left

    def stop(self) -> None:
        """End the commands of all checks, which have no time any more."""
        self.clock.stop()
        for shell in self._shells:
            shell.stop()

    def _one(self, check: Check) -> str | None:
        """Run a check; return its name if there was no time for it."""
        if self.clock.left_s < MIN_SECONDS:
            return check.name
        shell = Shell(check.name, self.work / check.name, self.environment, check.timeout_s, self.clock, self.root)
        self._shells.append(shell)
        start = time.monotonic()
        try:
            row: Figures = {"status": "ok", "figures": check.run(shell), "reason": None}
        except NotHere as problem:
            row = {"status": "skipped", "figures": {}, "reason": str(problem)}
        except CheckFailed as problem:
            row = {"status": "failed", "figures": problem.figures, "reason": problem.reason}
        except Exception as problem:  # noqa: BLE001 - a check must not end the others
            row = {"status": "failed", "figures": {}, "reason": f"{type(problem).__name__}: {problem}"}
        finally:
            shell.stop()
        seconds = round(time.monotonic() - start, 1)
        self._keep_log(shell)
        if row["status"] == "failed" and self.clock.left_s <= 0:  # cut short: it says nothing
            return check.name
        self._record({"name": check.name, "ok": row["status"] == "ok", "seconds": seconds, **row})
        return None

    def _record(self, row: Figures) -> None:
        with self._lock:
            with (self.output / RESULTS_FILE).open("a") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
            print(f"{row['status']:<8}{row['seconds']:>7.1f} s  {row['name']}  {row['reason'] or ''}", flush=True)

    def _keep_log(self, shell: Shell) -> None:
        if not shell.log.is_file():
            return
        with self._lock, (self.output / LOG_FILE).open("ab") as file:
            file.write(f"==== {shell.name}\n".encode() + shell.log.read_bytes())


def _groups(checks: Iterable[Check]) -> list[list[Check]]:
    """Return checks in order: neighbours that may run at once together, the others one by one."""
    groups: list[list[Check]] = []
    for check in checks:
        if check.alone or not groups or groups[-1][0].alone:
            groups.append([check])
        else:
            groups[-1].append(check)
    return groups


def read_rows(output: Path) -> list[Figures]:
    """Return the results so far; a line that was cut off is left out."""
    path = output / RESULTS_FILE
    rows: list[Figures] = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
