"""Sends random signals to random processes of whole runs, resumes them, and compares them with undisturbed ones.

    python tests/crash/chaos.py [--seconds N] [--seed N] [--learner NAME]... [--json FILE]

A trial is a learner and one to three signals, both drawn from the seed and the trial's number. It holds if the run
ends after three resumes at most, with the rows and the policy of the undisturbed run, and leaves neither a process nor
a file in /dev/shm. Exit code 1: a trial fell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import psutil
from chaos_learners import LEARNERS, Learner, References, check_store, difference, fill_in, run_result
from runs import environment, is_running
from scenarios import Result

from embodrl.errors import EmbodrlError

SIGNALS = ("KILL", "TERM", "INT", "HUP", "USR1", "STOP/CONT", "TERM+KILL")
PROGRAMS = {"simulator": "bootstrap.py", "worker": "process_main", "guard": "guard.py"}
"""Members of a family, by what their command lines contain."""
MEMBERS = ("driver", "driver", "driver", "simulator", "simulator", "worker", "worker", "guard", "family")
STARTING_S, WORKING_S = 8.0, 3.0
RESUMES = 3
HANGS_S = 240.0
GONE_S = 20.0
POLL_S = 0.05
MARK = "EMBODRL_CHAOS"
SHARED_MEMORY = Path("/dev/shm")


class Fell(Exception):
    """A trial that did not hold."""


@dataclass(frozen=True)
class Blow:
    """A signal.

    Attributes:
        signals: one of SIGNALS.
        who: one of MEMBERS; where the family has none of them, the driver.
        pick: between 0 and 1: which of those of a kind, and of the command lines that run beside each other.
        working: it comes once the run makes progress, otherwise counted from its start.
        after_s: seconds from there, or from the blow before it.
    """

    signals: str
    who: str
    pick: float
    working: bool
    after_s: float


@dataclass
class Record:
    """A trial.

    Attributes:
        seed: of all trials.
        number: of this one.
        learner: a key of LEARNERS.
        schedule: what was drawn.
        hit: what was sent to whom.
        codes: with which the command lines ended.
        outcome: held, or fell and why.
        seconds: that it took.
    """

    seed: int
    number: int
    learner: str
    schedule: list[Blow]
    hit: list[str] = field(default_factory=list[str])
    codes: list[int] = field(default_factory=list[int])
    outcome: str = "held"
    seconds: float = 0.0


def draw(seed: int, number: int, learners: Sequence[str]) -> Record:
    """Return the trial that a seed and a number stand for."""
    dice = random.Random(f"{seed}/{number}")
    learner = dice.choice(learners)
    blows: list[Blow] = []
    for _ in range(dice.randint(1, 3)):
        working = dice.random() < 0.75
        after_s = round(dice.uniform(0, WORKING_S if working else STARTING_S), 2)
        blows.append(Blow(dice.choice(SIGNALS), dice.choice(MEMBERS), round(dice.random(), 3), working, after_s))
    return Record(seed, number, learner, blows)


class Role:
    """A command line that is continued until it ends well.

    Args:
        command: to begin with.
        again: to continue with, once there is something to continue.
        run: directory of the run.
        progress: files in it that grow.
    """

    def __init__(self, command: list[str], again: list[str], run: Path, progress: str) -> None:
        self._command, self._again, self._run, self._pattern = command, again, run, progress
        self.token = secrets.token_hex(8)
        self.log = run.with_name(f"{run.name}_{self.token}.log")
        self.codes: list[int] = []
        self._start()

    def _start(self) -> None:
        arguments = self._again if (self._run / "config.yaml").is_file() else self._command
        self._before, self._grown, self.started = self._size(), None, time.monotonic()
        environ = environment() | {MARK: self.token}
        with self.log.open("ab") as log:
            log.write(f"$ embodrl {' '.join(arguments)}\n".encode())
            log.flush()
            command = [sys.executable, "-m", "embodrl", *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, stdin=subprocess.DEVNULL)

    def _size(self) -> int:
        total = 0
        for path in self._run.glob(self._pattern):
            with contextlib.suppress(OSError):  # it has just been renamed
                total += path.stat().st_size
        return total

    def keep_up(self) -> bool:
        """Continue what has ended early; return whether it has ended well.

        Raises:
            Fell: it hangs, or ends early too often.
        """
        if self.codes and self.codes[-1] == 0:
            return True
        code = self.process.poll()
        if code is None and time.monotonic() > self.started + HANGS_S:
            raise Fell(f"hangs for {HANGS_S:g} s")
        if code is None:
            return False
        self.codes.append(code)
        if code != 0 and len(self.codes) > RESUMES:
            raise Fell(f"ended with {self.codes}")
        if code != 0:
            self._start()
        return code == 0

    def begun(self, working: bool) -> float | None:
        """Return when it was started or, if it is to be working, when it began to make progress; None: not yet."""
        if working and self._grown is None and self._size() != self._before:
            self._grown = time.monotonic()
        return self._grown if working else self.started

    def family(self) -> list[psutil.Process]:
        """Return its processes, the driver first; they carry its mark in their environment."""
        mark = f"{MARK}={self.token}".encode()
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes() and is_running(process.pid):
                    found.append(process)
        return sorted(found, key=lambda process: (process.pid != self.process.pid, process.create_time()))

    def kill(self) -> None:
        """Kill its processes, until none is left: what is killed may have been starting another."""
        while found := self.family():
            _send(signal.SIGKILL, found)
            time.sleep(POLL_S)
        self.process.wait()


def members(role: Role, blow: Blow) -> list[psutil.Process]:
    """Return the processes that a blow is for."""
    found = role.family()
    if blow.who in PROGRAMS:
        of_kind = [process for process in found if _executes(process, PROGRAMS[blow.who])]
        found = [of_kind[int(blow.pick * len(of_kind))]] if of_kind else found[:1]
    return found if blow.who == "family" else found[:1]


def _executes(process: psutil.Process, program: str) -> bool:
    try:
        return any(program in part for part in process.cmdline())
    except psutil.Error:
        return False


def deliver(blow: Blow, targets: Sequence[psutil.Process]) -> None:
    """Send the signals of a blow."""
    if blow.signals == "STOP/CONT":
        first, wait_s, second = signal.SIGSTOP, 1.0, signal.SIGCONT
    elif blow.signals == "TERM+KILL":
        first, wait_s, second = signal.SIGTERM, blow.pick, signal.SIGKILL
    else:
        first, wait_s, second = signal.Signals[f"SIG{blow.signals}"], 0.0, None
    _send(first, targets)
    if second is not None:
        time.sleep(wait_s)
        _send(second, targets)


def _send(number: signal.Signals, targets: Sequence[psutil.Process]) -> None:
    for process in targets:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process.send_signal(number)


class Trial:
    """A disturbed run."""

    def __init__(self, record: Record, references: References, place: Path) -> None:
        self.record, self._references = record, references
        self._learner: Learner = LEARNERS[record.learner]
        self._run = place / f"run_{record.number}"
        self._roles: list[Role] = []
        self._hit_at = 0.0

    def run(self) -> None:
        """Run it to its end and judge it; its record says how it went."""
        self._references.prepare(self._learner)
        expected = self._references.result(self.record.learner) if self._learner.resumes else None
        shared, began = _shared_files(), time.monotonic()
        try:
            self._disturb()
            self.record.codes = [code for role in self._roles for code in role.codes]
            self._check_leftovers(shared)
            wrong = self._judge(expected)
            if wrong:
                raise Fell(wrong)
        except Fell as error:
            self.record.outcome = f"fell: {error}"
        finally:
            for role in self._roles:
                role.kill()
        self.record.seconds = round(time.monotonic() - began, 1)

    def logs(self) -> str:
        """Return what its command lines have said."""
        return "\n".join(role.log.read_text(errors="replace") for role in self._roles)

    def clear(self) -> None:
        """Remove its files."""
        shutil.rmtree(self._run, ignore_errors=True)
        for role in self._roles:
            role.log.unlink()

    def _judge(self, expected: Result | None) -> str:
        try:
            if expected is None:
                return check_store(self._run)
            return difference(expected, run_result(self._run), self._learner.exact)
        except (OSError, ValueError, KeyError, StopIteration, AssertionError, EmbodrlError) as error:
            return f"exit 0, and the result can't be read: {type(error).__name__} {error}"

    def _disturb(self) -> None:
        inputs = self._references.place
        resume = ["resume", str(self._run)]
        for template in self._learner.roles:
            command = fill_in(template, self._run, inputs)
            again = resume if self._learner.resumes else command
            self._roles.append(Role(command, again, self._run, self._learner.progress))
        blows = list(self.record.schedule)
        while not self._done():
            if blows and self._is_due(blows[0]):
                self._hit(blows.pop(0))
            time.sleep(POLL_S)

    def _done(self) -> bool:
        ended = [role.keep_up() for role in self._roles]  # each is asked
        return all(ended)

    def _role(self, blow: Blow) -> Role:
        return self._roles[int(blow.pick * len(self._roles))]

    def _is_due(self, blow: Blow) -> bool:
        begun = self._role(blow).begun(blow.working)
        return begun is not None and time.monotonic() >= max(begun, self._hit_at) + blow.after_s

    def _hit(self, blow: Blow) -> None:
        role = self._role(blow)
        targets = members(role, blow)
        names = [_name(process, role) for process in targets]
        deliver(blow, targets)
        self._hit_at = time.monotonic()
        self.record.hit.append(f"{blow.signals} to {', '.join(names)} after {time.monotonic() - role.started:.1f} s")

    def _check_leftovers(self, shared: set[str]) -> None:
        deadline = time.monotonic() + GONE_S
        while left := [process for role in self._roles for process in role.family()]:
            if time.monotonic() > deadline:
                raise Fell(f"{[' '.join(process.cmdline()[-3:]) for process in left]} outlived the run")
            time.sleep(POLL_S)
        if files := _shared_files() - shared - _mapped():
            raise Fell(f"{sorted(files)} are left in {SHARED_MEMORY}")


def _name(process: psutil.Process, role: Role) -> str:
    if process.pid == role.process.pid:
        return "driver"
    return next((name for name, program in PROGRAMS.items() if _executes(process, program)), "other")


def _shared_files() -> set[str]:
    return {str(path) for path in SHARED_MEMORY.rglob("*")}


def _mapped() -> set[str]:
    """Return the files of /dev/shm that processes of others have."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found |= {line.split()[-1] for line in maps.read_text().splitlines() if str(SHARED_MEMORY) in line}
    return found


def trials(seed: int, seconds: float, learners: Sequence[str], place: Path, keep: bool) -> Iterator[Record]:
    """Run trials until the time is over."""
    references = References(place / "inputs")
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        trial = Trial(draw(seed, number, learners), references, place)
        trial.run()
        if trial.record.outcome != "held":
            print(trial.logs(), file=sys.stderr)
        if trial.record.outcome == "held" or not keep:
            trial.clear()
        yield trial.record
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn if not given")
    parser.add_argument("--learner", action="append", choices=LEARNERS, help="only these; can be repeated")
    parser.add_argument("--json", type=Path, help="a file that gets a line for each trial")
    parser.add_argument("--keep", type=Path, help="a directory for the runs that fell")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="embodrl-chaos-", dir=options.keep))
    held: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    try:
        for record in trials(seed, options.seconds, options.learner or list(LEARNERS), place, bool(options.keep)):
            line = json.dumps(asdict(record))
            print(line, flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(f"{line}\n")
            tried[record.learner] += 1
            held[record.learner] += record.outcome == "held"
    finally:
        if not options.keep:
            shutil.rmtree(place, ignore_errors=True)
    for learner, count in sorted(tried.items()):
        print(f"{learner:28} {held[learner]} of {count} held")
    return 0 if held.total() == tried.total() else 1


if __name__ == "__main__":
    sys.exit(main())
