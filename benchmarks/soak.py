"""A long run under random faults: do memory, files and processes stay what they are, and is every step counted?

Simulator processes get the faults of fault_matrix.py at random: killed, stopped, slow for a while, out of memory,
disconnected. So does, if asked for, the rollout process; the training process is killed, and the run resumed from its
last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
from fault_matrix import FAULTS, LEAK, inflict
from hardware import describe_hardware
from rich.console import Console
from rich.table import Table
from soak_verdict import Check, Sample, check_faults, check_leaks, check_memory, check_steps

from embodrl.reporting.metrics_file import METRICS_FILE, read_metrics
from embodrl.storage.json_file import write_json_file

MIB = 1 << 20
MARK = "EMBODRL_SOAK"
POLL_S = 0.2
SAMPLE_S = 2.0
SLOW_S = 10.0  # how long a process is slow
NUM_ENVS, STEPS, CHUNK = 8, 40, 5
END_S = 300.0
GONE_S = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TRAINING_KILLED = "training: kill"
WARM_ITERATIONS = 3  # before the time counts, and before the first fault
SETTINGS = (
    "model=openvla",
    f"model.num_action_chunks={CHUNK}",
    "model.warm_start=null",
    "env.num_processes=2",
    f"env.train.total_num_envs={NUM_ENVS}",
    f"env.train.max_steps_per_rollout_epoch={STEPS}",
    "env.train.ignore_terminations=true",  # so that the number of steps is known
    f"env.max_episode_steps={STEPS // 2}",
    "env.max_restarts=1000000",
    "rollout.max_restarts=1000000",
    f"actor.global_batch_size={NUM_ENVS * STEPS // CHUNK}",
    "actor.micro_batch_size=16",
    "actor.optim.critic_warmup_iterations=0",  # what training needs is there from the first iteration on
    "runner.max_iterations=1000000",
    "runner.eval_interval=0",
    "runner.eval_at_start=false",
    "runner.save_interval=2",  # the first one, whose memory stays, is to lie within the warm-up
    "runner.logger.tensorboard=false",
    "runner.logger.console=plain",
)


@dataclass(frozen=True)
class Plan:
    """What a soak does.

    Attributes:
        minutes: how long.
        output: new directory of the run and of the results.
        settings: arguments of ``embodrl train``, such as env=maniskill.
        fault_every_s: mean time between two faults of simulators.
        rollout_fault_every_s: mean time between two faults of the rollout process; 0: the driver collects rollouts.
        kill_training_every_s: time between two deaths of the training process; 0 for none.
        seed: of the faults.
    """

    minutes: float
    output: Path
    settings: tuple[str, ...]
    fault_every_s: float = 20.0
    rollout_fault_every_s: float = 0.0
    kill_training_every_s: float = 0.0
    seed: int = 0


@dataclass
class Record:
    """What happened.

    Attributes:
        samples: of the processes.
        faults: time in seconds, and what was done.
        resumed: how often the run was resumed.
        exit_code: of the last process of the run.
    """

    samples: list[Sample] = field(default_factory=list[Sample])
    faults: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    resumed: int = 0
    exit_code: int | None = None


def shared_memories(pid: int) -> set[str]:
    """Return the inodes of the memories of simulators that a process maps."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {line.split()[4] for line in maps.splitlines() if "memfd:embodrl-env" in line}


class Soak:
    """One soak: ``run`` returns what happened; nothing of it is left."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run_dir = plan.output / "run"
        self.record = Record()
        self._token = secrets.token_hex(8)
        self._dice = random.Random(plan.seed)
        self._start = time.monotonic()
        self._driver: subprocess.Popen[bytes] | None = None
        # One simulator lives as long as the training process: those that are killed are too young to show a leak.
        self._spared = 0
        self._over = threading.Event()  # for processes that are slow

    def run(self) -> Record:
        """Train until the time is over, with faults; an error or a signal leaves no process."""
        self.plan.output.mkdir(parents=True, exist_ok=True)
        (self.plan.output / "leak.py").write_text(LEAK)
        own = [f"rollout.own_process={str(self._own_rollout).lower()}", "extensions=[leak]"]
        every = self.plan.kill_training_every_s
        try:
            self._launch("train", f"runner.output_dir={self.run_dir}", *SETTINGS, *own, *self.plan.settings)
            self._wait_for(WARM_ITERATIONS)
            self._start = time.monotonic()
            end = self._start + 60 * self.plan.minutes
            next_fault, next_sample = self._after(self.plan.fault_every_s), self._start
            next_rollout_fault = self._after(self.plan.rollout_fault_every_s)
            next_death = self._start + every if every else float("inf")
            while (now := time.monotonic()) < end and self._process.poll() is None:
                if now >= next_sample:
                    self._sample()
                    next_sample = now + SAMPLE_S
                if now >= next_fault and self._fault_of_simulator():
                    next_fault = self._after(self.plan.fault_every_s)
                if now >= next_rollout_fault and self._fault_of_rollout():
                    next_rollout_fault = self._after(self.plan.rollout_fault_every_s)
                if now >= next_death and list(self.run_dir.glob("checkpoints/step_*")):
                    self._kill_training()
                    next_death = time.monotonic() + every
                time.sleep(POLL_S)
            self._over.set()
            self._process.terminate()
            self.record.exit_code = self._process.wait(END_S)
        except BaseException:
            self._kill_all()
            raise
        finally:
            self._over.set()
        return self.record

    def _kill_all(self) -> None:
        """Kill what carries the mark, until nothing does: what is killed may have been starting another process."""
        while left := self.leftovers():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def leftovers(self) -> list[int]:
        """Return the processes of the run that are still there; they carry its mark in their environment."""
        mark = f"{MARK}={self._token}".encode()
        found: list[int] = []
        for process in psutil.process_iter():
            try:
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes() and process.status() != "zombie":
                    found.append(process.pid)
            except (OSError, psutil.Error):
                continue
        return found

    @property
    def _iterations(self) -> int:
        return len(read_metrics(self.run_dir / METRICS_FILE))

    def _wait_for(self, iterations: int) -> None:
        while self._iterations < iterations and self._process.poll() is None:
            time.sleep(POLL_S)

    @property
    def _own_rollout(self) -> bool:
        return self.plan.rollout_fault_every_s > 0

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._driver is not None
        return self._driver

    def _launch(self, *arguments: str) -> None:
        path = f"{self.plan.output}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environ = {**os.environ, MARK: self._token, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, "-m", "embodrl", *arguments]
        with (self.plan.output / "output.log").open("ab") as log:
            self._driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)

    def _after(self, mean_s: float) -> float:
        return time.monotonic() + self._dice.uniform(0.5, 1.5) * mean_s if mean_s else float("inf")

    def _descendants(self, script: str) -> list[psutil.Process]:
        """Return the processes of the run that execute a script and share memory with simulators, the oldest first."""
        found: list[psutil.Process] = []
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
            for child in sorted(children, key=lambda child: child.create_time()):
                with contextlib.suppress(psutil.Error, OSError):  # it has just gone
                    if any(script in part for part in child.cmdline()) and shared_memories(child.pid):
                        found.append(child)
        except psutil.Error:
            return []  # the run has
        return found

    def _simulators(self) -> list[psutil.Process]:
        """Return the simulator processes that are ready: they have mapped what they share."""
        return self._descendants("bootstrap.py")

    def _owner(self) -> psutil.Process | None:
        """Return the process that the simulators belong to, if it is there."""
        if not self._own_rollout:
            return psutil.Process(self._process.pid)
        return next(iter(self._descendants("process_main")), None)

    def _sample(self) -> None:
        try:
            driver, owner = psutil.Process(self._process.pid), self._owner()
            workers = tuple(child.memory_full_info().uss / MIB for child in self._simulators())
            self.record.samples.append(
                Sample(
                    round(time.monotonic() - self._start, 1),
                    round(driver.memory_full_info().uss / MIB, 2),
                    tuple(round(size, 2) for size in workers),
                    driver.num_fds(),
                    0 if owner is None else len(shared_memories(owner.pid)),
                    len(driver.children(recursive=True)),
                )
            )
        except (psutil.Error, OSError):
            pass  # one of them has just gone

    def _fault_of_simulator(self) -> bool:
        """Let a simulator other than the one that is spared have a fault; return whether there was one."""
        ready = self._simulators()
        if not ready:
            return False
        if self._spared not in [process.pid for process in ready]:
            self._spared = ready[0].pid
        others = [process for process in ready if process.pid != self._spared]
        if not others:
            return False
        return self._inflict(self._dice.choice(others), "simulator")

    def _fault_of_rollout(self) -> bool:
        """Let the rollout process have a fault; return whether it was there."""
        found = self._descendants("process_main")
        return bool(found) and self._inflict(found[0], "rollout")

    def _inflict(self, victim: psutil.Process, kind: str) -> bool:
        fault, over = self._dice.choice(FAULTS), threading.Event()
        try:
            if victim.status() == psutil.STATUS_STOPPED:
                return False  # it has had its fault
            inflict(fault, victim, False, over)
        except (psutil.Error, OSError, ValueError):
            return False  # it has just gone
        if fault == "slow":
            timer = threading.Timer(SLOW_S, over.set)
            timer.daemon = True
            timer.start()
        self.record.faults.append((round(time.monotonic() - self._start, 1), f"{kind}: {fault}"))
        return True

    def _kill_training(self) -> None:
        self._process.kill()
        self._process.wait()
        self.record.faults.append((round(time.monotonic() - self._start, 1), TRAINING_KILLED))
        self.record.resumed += 1
        done = self._iterations
        self._launch("resume", str(self.run_dir))
        self._wait_for(done + 1)  # what fails while a run starts ends it at once, by design


def describe(pid: int) -> str:
    """Return a process's id and command."""
    with contextlib.suppress(psutil.Error):
        return f"{pid} ({' '.join(psutil.Process(pid).cmdline())[:80]})"
    return str(pid)


def judge(soak: Soak, processes: int = 2) -> list[Check]:
    """Return all checks of a soak that is over."""
    record, rows = soak.record, read_metrics(soak.run_dir / METRICS_FILE)
    sent = sum(1 for _, what in record.faults if what != TRAINING_KILLED and not what.endswith("slow"))
    of_rollout = sum(1 for _, what in record.faults if what.startswith("rollout"))
    deadline = time.monotonic() + GONE_S
    while (left := soak.leftovers()) and time.monotonic() < deadline:  # what is killed last takes a moment to end
        time.sleep(POLL_S)
    code = record.exit_code
    checks = [Check("the run ends as it should", code == 128 + signal.SIGTERM, f"exit code {code} after SIGTERM")]
    checks.append(Check(f"no process is left after {GONE_S:.0f} s", not left, ", ".join(map(describe, left)) or "none"))
    if len(record.samples) < 2:
        return [*checks, Check("samples", False, f"{len(record.samples)}: it ended too soon, see output.log")]
    checks += [*check_memory(record.samples), *check_leaks(record.samples, processes, processes + bool(of_rollout))]
    # A fault just before the end of the process that would have noticed it is not noticed.
    unnoticed = processes * (1 + record.resumed + of_rollout)
    restarts = sum(int(rows[-1].get(name, 0)) for name in ("env/restarts", "rollout/restarts")) if rows else 0
    faults = check_faults(restarts, sent, unnoticed)
    return [*checks, *check_steps(rows, NUM_ENVS * STEPS, CHUNK), faults]


def draw(record: Record, path: Path, title: str) -> None:
    """Plot the memory of driver and simulators, with a line for every fault."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    minutes = [sample.time_s / 60 for sample in record.samples]
    axis.plot(minutes, [sample.driver_mib for sample in record.samples], label="driver")
    spared = [s.workers_mib[0] if s.workers_mib else float("nan") for s in record.samples]
    axis.plot(minutes, spared, label="the simulator process that is spared")
    for time_s, what in record.faults:
        axis.axvline(time_s / 60, color="tab:red" if what == TRAINING_KILLED else "0.85", lw=0.8, zorder=0)
    axis.set(xlabel="minutes", ylabel="memory of its own (MiB)", title=title, ylim=(0, None))
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(plan: Plan, console: Console | None = None) -> int:
    """Soak, judge, write ``soak.json`` and ``soak.png``; return 0 if everything was as it should be."""
    console = console or Console()
    soak = Soak(plan)
    record = soak.run()
    checks = judge(soak)
    passed = all(check.passed for check in checks)
    minutes = round((record.samples[-1].time_s if record.samples else 0.0) / 60, 1)
    content: dict[str, Any] = {
        "passed": passed,
        "minutes": minutes,
        "settings": [*SETTINGS, *plan.settings],
        "faults": {
            what: sum(1 for _, w in record.faults if w == what) for what in sorted({w for _, w in record.faults})
        },
        "checks": [asdict(check) for check in checks],
        "hardware": describe_hardware(),
        "samples": [asdict(sample) for sample in record.samples],
        "faults_at_s": record.faults,
    }
    write_json_file(plan.output / "soak.json", content)
    draw(record, plan.output / "soak.png", f"{minutes} minutes, {len(record.faults)} faults")
    table = Table(title=f"soak of {minutes} minutes, {len(record.faults)} faults")
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row("[green]ok[/]" if check.passed else "[bold red]failed[/]", check.name, check.found)
    console.print(table)
    console.print(f"[green]passed[/]: {plan.output}" if passed else f"[bold red]failed[/]: see {plan.output}")
    return 0 if passed else 1


def plan() -> Plan:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description="Train for a long time while processes are killed at random.")
    parser.add_argument("--minutes", type=float, default=120.0, help="how long")
    parser.add_argument("--fault-every-s", type=float, default=20.0, help="mean time between two faults of simulators")
    parser.add_argument("--rollout-fault-every-s", type=float, default=0.0, help="0: no rollout process of its own")
    parser.add_argument("--kill-training-every-s", type=float, default=0.0, help="0: the training process lives")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--output", type=Path, help="new directory; by default outputs/soak-<date and time>")
    parser.add_argument("settings", nargs="*", default=["env=toy"], help="of `embodrl train`, such as env=maniskill")
    given = parser.parse_args()
    output = given.output or Path("outputs") / time.strftime("soak-%Y%m%d-%H%M%S")
    if output.exists():
        parser.error(f"{output} is there already; name a new directory")
    settings = tuple(given.settings)
    return Plan(
        given.minutes,
        output.absolute(),
        settings,
        given.fault_every_s,
        given.rollout_fault_every_s,
        given.kill_training_every_s,
        given.seed,
    )


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End with the usual exit code of a signal, once; further signals do not interrupt the cleaning up."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    for each in SIGNALS:
        signal.signal(each, _leave)
    sys.exit(main(plan()))
