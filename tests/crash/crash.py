"""Cuts power after each file operation of a command, damages each region of its files, and judges every recovery.

    python tests/crash/crash.py [--scenario NAME]... [--part power|damage] [--sample N] [--jobs N] [--json FILE]

Each distinct directory is recovered once, by a process forked from one that has the imports. Exit code 1: a recovery
gave another result without a word, a traceback, a signal, a hang, or a refusal that names no file; or a checkpoint
that was saved is gone, even if the run that starts over ends with the same result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from damage import DAMAGED, damaged_trees
from disk_model import Disk, State, Tree, joined, read_tree, states, write_tree
from recorder import Op, RecordingError, missing_tool, record
from runs import environment
from scenarios import SCENARIOS, STARTS_OVER, TIMEOUT_S, Bench, Result, Scenario, Verdict

_LEAST_SHM_BYTES = 256 * 2**20
ONLY_WRITTEN = re.compile(r"(logs|tensorboard)/|\.lock$|(.*/)?\.[^/]*(\.partial|staging_|probe)")
"""What recoveries append to, replace or remove; directories that differ only in what these hold are tried once."""

_CHECKPOINT = re.compile(r"checkpoints/step_(\d+)")


@dataclass
class Trial:
    """One recovery.

    Attributes:
        what: cut or damage.
        names: one of which a refusal has to name.
        saved: step of the newest checkpoint that had been reported as saved; None without one.
    """

    what: str
    tree: Tree
    names: Sequence[str]
    saved: int | None = None
    verdict: Verdict | None = None


@dataclass
class Series:
    """The trials of a scenario.

    Attributes:
        name: of the scenario and the kind of trial.
        operations: that were recorded; 0 for damage.
        trials: all, or a sample of them.
        found: distinct states, before sampling.
        seconds: that all trials took.
    """

    name: str
    operations: int
    trials: list[Trial]
    found: int = 0
    seconds: float = 0.0
    count: Counter[str] = field(default_factory=Counter)


def distinct(tree: Tree) -> object:
    """Return the key that distinguishes directories."""
    return frozenset((path, bool(data) if ONLY_WRITTEN.match(path) else data) for path, data in tree.items())


def steps(tree: Tree) -> list[int]:
    """Return the steps of the checkpoints in a directory."""
    found = (match for path in tree if (match := _CHECKPOINT.fullmatch(path)) and f"{path}/manifest.json" in tree)
    return [int(match[1]) for match in found]


def saved_step(done: Sequence[Op], start: Tree) -> int | None:
    """Return the newest checkpoint that is saved after these operations: other work has begun since it was renamed."""
    found = dict.fromkeys(steps(start), True)
    for op in done:
        if op.kind == "rename" and (match := _CHECKPOINT.fullmatch(op.other)):
            found[int(match[1])] = False
        elif not op.path.startswith("checkpoints"):
            found = dict.fromkeys(found, True)
    return max((step for step, is_saved in found.items() if is_saved), default=None)


def is_lost(tree: Tree, saved: int | None) -> bool:
    """Return whether a saved checkpoint is gone, and no newer one is there."""
    return saved is not None and max(steps(tree), default=-1) < saved


class Harness:
    """Records scenarios and tries their recoveries.

    Args:
        place: a new directory.
        jobs: recoveries at the same time.
        sample: states to try of each series, evenly spread; 0 is all of them.
        careless: recorded commands sync nothing, to see that this is found out.
        timeout_s: beyond it a recovery hangs.
    """

    def __init__(
        self, place: Path, jobs: int = 2, sample: int = 0, careless: bool = False, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.place, self.jobs, self.sample = place, jobs, sample
        self.bench = Bench(place / "base", careless, timeout_s)

    def recorded(self, scenario: Scenario) -> tuple[list[Op], Tree, Path]:
        """Record the command of a scenario; return its operations, what there was before, and where it wrote.

        Raises:
            RecordingError: the operations do not lead to the files that are there.
        """
        bench, directory = self.bench, self.place / "recorded" / scenario.name.replace(" ", "_") / "dir"
        for needed in ("interrupted", "raw"):
            if any(needed in part for part in (*scenario.command, scenario.start)):
                bench.prepare(needed)
        if scenario.start:
            shutil.copytree(bench.base / scenario.start, directory, symlinks=True)
        else:
            directory.mkdir(parents=True)
        start = read_tree(directory)
        ops = record(bench.cold_command(scenario.command, directory), directory, environment())
        disk = Disk(start)
        for op in ops:
            disk.apply(op)
        if disk.tree() != (real := read_tree(directory)):
            wrong = sorted(name for name in {*disk.tree(), *real} if disk.tree().get(name) != real.get(name))
            raise RecordingError(f"the recorded operations of {scenario.name} lead to other files: {wrong}")
        return ops, start, directory

    def reference(self, scenario: Scenario, directory: Path) -> Result:
        """Return what recoveries must lead to: the result of the recorded command, or of using what it wrote."""
        if scenario.own_result:
            return scenario.result(directory, directory)
        outcome, result = self.bench.recover(scenario, directory, directory.with_name("out"))
        assert result is not None, outcome.stderr
        return result

    def power_cuts(self, scenario: Scenario) -> Series:
        """Recover every directory that a power cut may leave."""
        ops, start, directory = self.recorded(scenario)
        operations = joined(ops)
        known = {name for op in ops for path in (op.path, op.other) for name in (path, Path(path).name)} - {"", "."}

        def trial(state: State) -> Trial:
            last = operations[state.done - 1] if state.done else "the start"
            return Trial(
                f"cut after {state.done} operations ({last}), {state.variant}",
                state.tree,
                sorted(known),
                saved_step(operations[: state.done], start),
            )

        trials = [trial(state) for state in states(ops, start, distinct)]
        return self._tried(scenario, Series(scenario.name, len(ops), trials), self.reference(scenario, directory))

    def damages(self, name: str) -> Series:
        """Recover a run, a policy or a dataset whose files were changed, one place at a time."""
        made = DAMAGED[name]
        source, reference = made.make(self.bench, self.place / "intact" / made.name.replace(" ", "_"))
        trials = [Trial(what, tree, [path, Path(path).name]) for what, path, tree in damaged_trees(read_tree(source))]
        return self._tried(made.scenario, Series(f"damage: {name}", 0, trials), reference)

    def _tried(self, scenario: Scenario, series: Series, reference: Result) -> Series:
        start, series.found = time.monotonic(), len(series.trials)
        if 0 < self.sample < len(series.trials):
            series.trials = [series.trials[len(series.trials) * i // self.sample] for i in range(self.sample)]
        with ThreadPoolExecutor(self.jobs) as pool:
            for number, trial in enumerate(series.trials):
                pool.submit(self._try, scenario, trial, number, series.name, reference)
        series.seconds = time.monotonic() - start
        series.count = Counter(trial.verdict.kind if trial.verdict else "FAILED" for trial in series.trials)
        return series

    def _try(self, scenario: Scenario, trial: Trial, number: int, name: str, reference: Result) -> None:
        directory = self.place / "trials" / name.replace(" ", "_").replace(":", "") / f"{number}"
        try:
            write_tree(trial.tree, directory / "dir")
            trial.verdict = self.bench.judge(scenario, directory / "dir", reference, trial.names)
            over = trial.verdict.kind == "refused" or trial.verdict.detail == STARTS_OVER
            if is_lost(trial.tree, trial.saved) or (trial.saved is not None and over):
                trial.verdict = Verdict("FAILED", f"a saved checkpoint is lost: {trial.verdict.detail}")
        except Exception as error:  # noqa: BLE001  whatever it is, this trial has failed
            trial.verdict = Verdict("FAILED", f"the harness: {type(error).__name__}: {error}")
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory in memory where there is room, so that syncs cost nothing."""
    shm = Path("/dev/shm")
    in_memory = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > _LEAST_SHM_BYTES
    with tempfile.TemporaryDirectory(prefix="embodrl-crash-", dir=shm if in_memory else None) as place:
        yield Path(place)


def table(series: Sequence[Series]) -> str:
    """Return the counts as Markdown."""
    lines = ["| | operations | states | tried | identical | refused, named | noted | FAILED | s |", "|" + "---|" * 9]
    for one in series:
        counts = " | ".join(str(one.count[kind]) for kind in ("identical", "refused", "noted", "FAILED"))
        lines.append(
            f"| {one.name} | {one.operations or ''} | {one.found} | {len(one.trials)} | {counts} | {one.seconds:.0f} |"
        )
    return "\n".join(lines)


def failures(series: Sequence[Series]) -> list[str]:
    """Return a line for each failed trial."""
    return [
        f"{one.name}: {trial.what}: {trial.verdict.detail if trial.verdict else 'not tried'}"
        for one in series
        for trial in one.trials
        if trial.verdict is None or trial.verdict.kind == "FAILED"
    ]


def main() -> int:
    """Run what the arguments ask for; return the exit code."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves nothing behind
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", help=f"of {', '.join([*SCENARIOS, *DAMAGED])}; default: all")
    parser.add_argument("--part", choices=("power", "damage"), help="only one kind of trial")
    parser.add_argument("--sample", type=int, default=0, help="states to try of each series; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="recoveries at the same time")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="beyond it a recovery hangs")
    parser.add_argument("--careless", action="store_true", help="record without syncs: failures must show")
    parser.add_argument("--json", type=Path, help="write every trial to this file")
    options = parser.parse_args()
    wanted: Callable[[str], bool] = lambda name: not options.scenario or name in options.scenario  # noqa: E731
    done: list[Series] = []
    start = time.monotonic()
    with scratch() as place:
        harness = Harness(place, options.jobs, options.sample, options.careless, options.timeout_s)
        if options.part != "damage":
            if problem := missing_tool():
                print(f"operations can't be recorded: {problem}", file=sys.stderr)
                return 2
            todo: list[Callable[[], Series]] = [
                lambda scenario=scenario: harness.power_cuts(scenario)
                for name, scenario in SCENARIOS.items()
                if wanted(name)
            ]
        else:
            todo = []
        if options.part != "power":
            todo += [lambda name=name: harness.damages(name) for name in DAMAGED if wanted(name)]
        for task in todo:
            done.append(task())
            print(table(done[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(done)}\n")
    minutes = (time.monotonic() - start) / 60
    print(f"{sum(len(one.trials) for one in done)} states in {minutes:.1f} minutes")
    if options.json:
        content = [
            {
                "name": one.name,
                "operations": one.operations,
                "states": one.found,
                "seconds": round(one.seconds, 1),
                "trials": [{"what": trial.what, **vars(trial.verdict or Verdict("FAILED"))} for trial in one.trials],
            }
            for one in done
        ]
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    failed = failures(done)
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
