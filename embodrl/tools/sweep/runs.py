"""`embodrl sweep`: several runs in parallel on this machine, on a Ray cluster or as Slurm jobs; their comparison."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embodrl.config.compose import arguments_of_file, foreign_code
from embodrl.config.trust import approve, is_approved
from embodrl.deployment.topology import read_machine
from embodrl.errors import ConfigError, ConfigProblem, EmbodrlError, OutputError, UsageError
from embodrl.fields import open_descriptor, read_fields
from embodrl.pipelines.load import load_config
from embodrl.processes.ending import stop_with_parent
from embodrl.reporting.metrics_file import METRICS_FILE, read_metrics
from embodrl.reporting.progress import Progress
from embodrl.scheduler.launchers.ray.launcher import import_ray
from embodrl.storage.json_file import write_json_file, write_text_file
from embodrl.tools.compare.comparison import comparison_page
from embodrl.tools.sweep.combinations import SweptRun, expand_sweep
from embodrl.tools.sweep.ray_runs import RayRuns, read_resources
from embodrl.tools.sweep.spec import SWEEP_FILE
from embodrl.tools.sweep.sweep import EMBODRL, LOGS, SETTINGS, Sweep
from embodrl.trainer.afterwards import afterwards
from embodrl.trainer.lock import run_lock
from embodrl.trainer.stop import StopSignal

COMPARISON_FILE = "comparison.html"
SCRIPT_FILE = "sweep.sbatch"
BACKENDS = ("local", "slurm", "ray")
APPROVAL = "approval"
"""Key in sweep.json: digest of the other entries, keyed with the secret of the user who started the sweep."""
STOP_S = 30.0
POLL_S = 1.0


def is_sweep(directory: Path) -> bool:
    """Whether a directory is a sweep's."""
    return (directory / SWEEP_FILE).is_file()


def new_sweep(
    overrides: list[str],
    config_file: Path | None,
    directory: Path | None,
    jobs: int = 1,
    backend: str = "local",
    slurm: Sequence[str] = (),
    trust: bool = False,
    ray: Sequence[str] = (),
) -> Sweep:
    """Check all runs of a sweep and write its directory; starts nothing.

    ``overrides`` are arguments of ``embodrl train``, at least one of them with several values. Without ``directory``,
    the sweep gets a new one below outputs/.

    Raises:
        ConfigError: a run has an invalid configuration: all problems of all runs.
        EmbodrlError: the machine has too few cores or GPUs for the concurrent runs, no sbatch, or no Ray.
        UsageError: options are for another backend.
        OutputError: the directory has an earlier sweep, or can't be written.
    """
    check_backend(backend, jobs, slurm, ray)
    threads = [f"cluster.num_threads={int(read_resources(ray)['num_cpus']) or 1}"] * (backend == "ray")
    runs = expand_sweep([*threads, *overrides])
    directory = (directory or Path("outputs") / f"sweep-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    file = None if config_file is None else config_file.absolute()
    iterations = _check(runs, file, trust)
    if is_sweep(directory):
        hint = f"`embodrl resume {directory}` continues it; or choose another --output"
        raise OutputError(f"{directory} holds an earlier sweep", hint, code="sweep-exists")
    sweep = Sweep(directory, tuple(runs), file, tuple(iterations), jobs, backend, tuple(slurm), True, trust, tuple(ray))
    _check_script(sweep)
    (directory / LOGS).mkdir(parents=True, exist_ok=True)
    content: dict[str, object] = {
        "config_file": None if file is None else str(file),
        "jobs": jobs,
        "backend": backend,
        "slurm": list(slurm),
        "ray": list(ray),
        "runs": [
            {"name": run.name, "overrides": list(run.overrides), "max_iterations": count}
            for run, count in zip(runs, iterations, strict=True)
        ],
    }
    write_json_file(directory / SWEEP_FILE, content | {APPROVAL: approve(content)})
    return sweep


def check_backend(backend: str, jobs: int, slurm: Sequence[str], ray: Sequence[str]) -> None:
    """Check that runs can be started; see ``new_sweep``."""
    for name, options in (("slurm", slurm), ("ray", ray)):
        if options and name != backend:
            message = f"--{name} has options, but the backend is {backend}"
            raise UsageError(message, f"add --backend {name}, or leave out --{name}", code="sweep-backend")
    if backend == "local":
        make_slots(jobs)
    elif backend == "slurm":
        check_slurm()
    else:
        import_ray()
        read_resources(ray)


def _check(runs: Sequence[SweptRun], config_file: Path | None, trust: bool) -> list[int]:
    """Load the configuration of every run; return their numbers of iterations."""
    found: dict[ConfigProblem, list[str]] = {}
    iterations: list[int] = []
    for run in runs:
        overridden = [text for text in run.overrides if text.partition("=")[0] in ("runner.output_dir", "runner.name")]
        for text in overridden:
            hint = "leave it out: the runs of a sweep are named by their values; --output names the sweep's directory"
            problem = ConfigProblem(text.partition("=")[0], "is set by the sweep", hint=hint, code="sweep-directory")
            found.setdefault(problem, []).append(run.name)
        try:
            iterations.append(
                load_config(list(run.overrides), config_file, "train", trust).config.runner.max_iterations
            )
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(run.name)
    if found:
        raise ConfigError([_with_run_names(problem, names, len(runs)) for problem, names in found.items()])
    return iterations


def _with_run_names(problem: ConfigProblem, names: list[str], total: int) -> ConfigProblem:
    if len(names) == total:
        return problem
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return replace(problem, message=f"{problem.message} (in {shown})")


def read_sweep(directory: Path, trust: bool = False) -> Sweep:
    """Read the sweep of a directory; with ``trust``, code it names may run though this user has not started it.

    Raises:
        ConfigError: it names code, and this user has not started it.
        OutputError: sweep.json is damaged.
    """
    path = directory.absolute() / SWEEP_FILE
    found = read_fields(path, OutputError, "start the sweep again in another directory")
    file = found.text("config_file", None)
    entries = found.objects("runs")
    runs = tuple(SweptRun(entry.text("name"), tuple(entry.texts("overrides"))) for entry in entries)
    for run in runs:
        if run.name in ("", "..", LOGS, SETTINGS) or Path(run.name).name != run.name:
            found.refuse(f"{run.name!r} is not the name of a directory")
    iterations = tuple(entry.integer("max_iterations") for entry in entries)
    jobs = found.integer("jobs", low=1)
    backend = found.text("backend")
    if backend not in BACKENDS:
        found.refuse(f"'backend' is {backend!r}, not {' or '.join(BACKENDS)}")
    content = {name: value for name, value in found.content.items() if name != APPROVAL}
    approved = trust or is_approved(content, found.text(APPROVAL, ""))
    config_file = None if file is None else Path(file)
    slurm = tuple(found.texts("slurm"))
    ray = tuple(found.texts("ray")) if "ray" in found.content else ()
    sweep = Sweep(path.parent, runs, config_file, iterations, jobs, backend, slurm, approved, trust, ray)
    _check_script(sweep)
    if not approved and (problems := _foreign_code(sweep, str(path))):
        raise ConfigError(problems)
    return sweep


def _foreign_code(sweep: Sweep, source: str) -> list[ConfigProblem]:
    """Return the entries of a sweep that run code."""
    named = {
        "config_file": "" if sweep.config_file is None else f"{sweep.config_file}: settings of all runs",
        "slurm": f"jobs of Slurm with the options {shlex.join(sweep.slurm)!r}" if sweep.backend == "slurm" else "",
    }
    hint = "look at the file and what it names; then repeat the command with --trust (or EMBODRL_TRUST=1)"
    problems = [
        ConfigProblem(
            key, f"names {what}; this user has not started this sweep", source, hint=hint, code="settings-run-code"
        )
        for key, what in named.items()
        if what
    ]
    for run in sweep.runs:
        arguments, wrong = arguments_of_file(list(run.overrides), source)
        problems += wrong + foreign_code(arguments, source)
    return list(dict.fromkeys(problems))


def _check_script(sweep: Sweep) -> None:
    """Refuse text that would add a line to the job script, or is not an sbatch option, with a UsageError."""
    if sweep.backend != "slurm":
        return
    options = [text for text in sweep.slurm if not (text.startswith("-") and text.isprintable())]
    names = [text for text in (str(sweep.directory),) if not text.isprintable()]
    for text in (*options, *names):
        message = f"{text!r} can't stand in a line '#SBATCH ...' of the job script"
        hint = "give options as --NAME=VALUE on one line, and a directory without control characters"
        raise UsageError(message, hint, code="sweep-slurm-line")


@dataclass(frozen=True)
class Slot:
    """Share of this machine for one concurrent run: logical CPUs, and CUDA_VISIBLE_DEVICES entries or None."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] | None


def make_slots(jobs: int) -> list[Slot]:
    """Divide the cores and GPUs that this process may use; raises EmbodrlError if runs outnumber them."""
    cores = sorted(os.sched_getaffinity(0))
    gpus = read_machine().gpus
    for what, count in (("cores", len(cores)), ("GPUs", len(gpus))):
        if count < jobs and (what == "cores" or count):
            message = f"--jobs {jobs} needs as many {what}, and there are {count}"
            raise EmbodrlError(message, f"give --jobs {count} or less", code="sweep-jobs")

    def share(index: int, items: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(items[index * len(items) // jobs : (index + 1) * len(items) // jobs])

    return [Slot(share(index, cores), share(index, gpus) if gpus else None) for index in range(jobs)]


class LocalRuns:
    """Runs as processes of this machine, each on its share of it.

    Raises:
        EmbodrlError: the machine has too few cores or GPUs.
    """

    started = "started"

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._free = list(reversed(make_slots(sweep.jobs)))
        self._running: dict[subprocess.Popen[bytes], tuple[int, Slot]] = {}

    @property
    def indices(self) -> list[int]:
        return [index for index, _ in self._running.values()]

    def has_room(self) -> bool:
        return bool(self._free)

    def start(self, index: int) -> None:
        slot = self._free.pop()
        environment = dict(os.environ)
        if slot.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)

        def bind() -> None:
            os.sched_setaffinity(0, slot.cores)
            stop_with_parent()

        with open(self._sweep.log(index), "ab", opener=open_descriptor) as log:
            process = subprocess.Popen(
                self._sweep.command(index),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=bind,
            )
        self._running[process] = (index, slot)

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        """Wait until a run has ended, at most that long; return index and exit code of each that has."""
        with selectors.DefaultSelector() as selector:
            descriptors = [os.pidfd_open(process.pid) for process in self._running]
            try:
                for descriptor in descriptors:
                    selector.register(descriptor, selectors.EVENT_READ)
                selector.select(seconds)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        ended = []
        for process in [process for process in self._running if process.poll() is not None]:
            index, slot = self._running.pop(process)
            self._free.append(slot)
            ended.append((index, process.returncode))
        return ended

    def end(self) -> None:
        """Stop the remaining runs, which save."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self._running:
            process.wait()
        self._running = {}

    def close(self) -> None:
        """Nothing is held between runs."""


def run_sweep(sweep: Sweep) -> int:
    """Run the unfinished runs, each on its share of the machine or as a task of Ray; write the comparison.

    A failing run does not stop the others. SIGTERM and Ctrl-C stop the sweep and all runs, which save first.

    Returns:
        0; 1 if a run has failed; 128 + the signal's number if one has stopped it.

    Raises:
        EmbodrlError: the machine has too few cores or GPUs, or Ray is not installed.
    """
    runs = RayRuns(sweep) if sweep.backend == "ray" else LocalRuns(sweep)
    with contextlib.closing(runs), run_lock(sweep.directory), StopSignal(STOP_S) as stop:
        sweep.write_settings()
        stop.can_save(f"`embodrl resume {sweep.directory}` continues the sweep")
        with Progress("sweep", sum(sweep.max_iterations), "iterations", is_even=False) as progress:
            failed = _Queue(sweep, runs, stop, progress).work()
        _compare(sweep)
        return stop.exit_code or (1 if failed else 0)


class _Queue:
    def __init__(self, sweep: Sweep, runs: LocalRuns | RayRuns, stop: StopSignal, progress: Progress) -> None:
        self._sweep = sweep
        self._runs = runs
        self._stop = stop
        self._progress = progress
        self._waiting = sweep.unfinished()
        self._failed: list[int] = []

    def work(self) -> list[int]:
        runs = self._runs
        try:
            while runs.indices or (self._waiting and not self._stop):
                while self._waiting and runs.has_room() and not self._stop:
                    index = self._waiting.pop(0)
                    runs.start(index)
                    self._progress.message(f"{self._sweep.runs[index].name}: {runs.started}")
                for index, code in runs.wait(POLL_S):
                    self._ended(index, code)
                if self._stop:
                    runs.end()
                self._report()
        finally:
            runs.end()
        return self._failed

    def _ended(self, index: int, code: int) -> None:
        run = self._sweep.runs[index]
        if code == 0:
            self._progress.message(f"{run.name}: finished")
        elif not self._stop:
            self._failed.append(index)
            self._progress.message(f"{run.name}: failed with exit code {code}, see {self._sweep.log(index)}")

    def _report(self) -> None:
        self._progress.update(*self._progress_of_runs())

    def _progress_of_runs(self) -> tuple[int, str]:
        sweep = self._sweep
        total = len(self._sweep.runs)
        done = [_iterations_done(sweep, index) for index in range(total)]
        indices = self._runs.indices
        running = [f"{sweep.runs[index].name} {done[index]}/{sweep.max_iterations[index]}" for index in indices]
        ended = total - len(self._waiting) - len(running)
        return sum(done), "; ".join([f"{ended} of {total} runs done", *running])


def _iterations_done(sweep: Sweep, index: int) -> int:
    try:
        rows = read_metrics(sweep.path(index) / METRICS_FILE)
    except OutputError:  # reported by the run itself; the other runs continue
        return 0
    return rows[-1]["iteration"] if rows else 0


def _compare(sweep: Sweep) -> None:
    path = sweep.directory / COMPARISON_FILE
    again = f"embodrl compare {shlex.quote(str(sweep.directory))} --html {shlex.quote(str(path))}"
    with afterwards(COMPARISON_FILE, again):
        if views := sweep.views():
            write_text_file(path, comparison_page(views))


def check_slurm() -> None:
    """Check that jobs can be submitted; raises EmbodrlError without sbatch."""
    if shutil.which("sbatch") is None:
        hint = "run it on a login node of the cluster, or leave out --backend slurm"
        raise EmbodrlError("sbatch is not installed here", hint, code="sweep-slurm")


def submit_to_slurm(sweep: Sweep) -> str:
    """Submit the unfinished runs as a job array; each resumes its run if requeued.

    The directory of the sweep must be shared by all nodes.

    Returns:
        Id of the array; "" if all runs are finished.

    Raises:
        EmbodrlError: sbatch is missing or refuses.
    """
    check_slurm()
    if not sweep.unfinished():
        return ""
    sweep.write_settings()
    script = sweep.directory / SCRIPT_FILE
    write_text_file(script, slurm_script(sweep))
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"sbatch refused {script}: {done.stderr.strip()}"
        raise EmbodrlError(message, "correct the options of --slurm", code="sweep-slurm")
    return done.stdout.strip()


def slurm_script(sweep: Sweep) -> str:
    """Return the job script of the unfinished runs."""
    waiting = sweep.unfinished()
    logs = str(sweep.directory / LOGS).replace("%", "%%")
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={shlex.quote(sweep.directory.name)}",
        f"#SBATCH --array={','.join(map(str, waiting))}%{sweep.jobs}",
        f"#SBATCH --output={shlex.quote(logs)}/slurm-%A_%a.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@60",  # B: otherwise only what srun starts gets it, which is nothing
        *(f"#SBATCH {shlex.quote(option)}" for option in sweep.slurm),
        "",
        f"cd {shlex.quote(str(Path.cwd()))}",
        "case $SLURM_ARRAY_TASK_ID in",
    ]
    for index in waiting:
        path = shlex.quote(str(sweep.path(index)))
        lines += [
            f"{index})",
            f"  if compgen -G {path}'/checkpoints/step_*' > /dev/null || [ -f {path}/{METRICS_FILE} ]; then",
            f"    exec {shlex.join([*EMBODRL, 'resume', *['--trust'] * sweep.trust, str(sweep.path(index))])}",
            "  fi",
            f"  exec {shlex.join(sweep.command(index))} ;;",
        ]
    return "\n".join([*lines, "esac", ""])
