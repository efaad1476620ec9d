"""What is recorded and how it is recovered: training, resuming, fine-tuning, collecting, exporting; and the verdict.

A recovery is right if it ends as the uninterrupted command did, bit for bit, or if it refuses and names what is
damaged. A different result without a word, a traceback, a signal or a hang is a failure.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fork_server import ForkServer
from runs import TINY, Outcome, environment

from embodrl.reporting.rows import is_measured

TIMEOUT_S = 240.0
"""Beyond it a recovery hangs; on a busy machine `--timeout-s` allows more."""
STARTS_OVER = "it starts over"
"""What `resume` says of a run without a checkpoint, and the detail of a verdict on one."""
SMALL = """
runner:
  max_iterations: 3
  eval_interval: 3
  save_interval: 1
  keep_last_n: 1
  eval_at_start: false
  logger: {tensorboard: false, console: plain}
env:
  num_processes: 1
  max_episode_steps: 6
  train: {total_num_envs: 2, max_steps_per_rollout_epoch: 12, ignore_terminations: true}
  eval: {total_num_envs: 2, num_episodes: 2, decoding: greedy}
collect: {num_episodes: 3, output_dir: OUT}
sft: {max_steps: 4, batch_size: 4, save_interval: 2, log_interval: 1, lr_warmup_steps: 1}
"""
Result = dict[str, object]
"""What must be equal; the keys name the parts in reports."""


@dataclass(frozen=True)
class Verdict:
    """Of a recovery.

    Attributes:
        kind: identical, refused, noted (the same policy; what is missing elsewhere is said), FAILED.
        detail: the difference, or the first line of the refusal.
    """

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Scenario:
    """A command and its recovery. In arguments ``{dir}`` is the directory, ``{out}`` a new one, ``{base}`` the inputs.

    Attributes:
        name: in the table.
        command: what is recorded.
        recovery: command lines, of which the last one's result counts; the first that refuses ends it.
        result: of the recovery, from ``dir`` and ``out``.
        start: directory in ``base`` that ``dir`` is a copy of; empty: ``dir`` is new.
        stop_at: a point at which the recorded command is stopped.
        own_result: the recorded command has a result itself, which the recovery must reach.
    """

    name: str
    command: Sequence[str]
    recovery: Sequence[Sequence[str]]
    result: Callable[[Path, Path], Result]
    start: str = ""
    own_result: bool = True


def run_result(directory: Path, _out: Path) -> Result:
    """Return metrics and the hash of the final policy."""
    return {"metrics.jsonl": rows(directory / "metrics.jsonl"), "policy": digest(directory / "policy")}


def sft_result(directory: Path, _out: Path) -> Result:
    """Return metrics and the policy of a fine-tuning."""
    return {"sft.jsonl": rows(next(directory.glob("sft*.jsonl"))), "policy": digest(directory / "policy")}


def trained_on(_directory: Path, out: Path) -> Result:
    """Return what fine-tuning on a dataset has led to."""
    return sft_result(out / "sft", out)


def evaluated(_directory: Path, out: Path) -> Result:
    """Return the episodes of an evaluation, and which weights it had."""
    content = json.loads((out / "eval" / "eval.json").read_text())
    settings = content["settings"]
    same = ("environment", "tasks", "model", "weights SHA-256", "actions per chunk", "step limit", "reset seeds")
    return {"eval.json": [content["per_episode"], {name: settings[name] for name in same}]}


def rows(path: Path) -> list[dict[str, object]]:
    """Return metrics without what depends on the clock and the machine."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{n: value for n, value in row.items() if not is_measured(n) and n != "time_s"} for row in found]


def digest(policy: Path) -> str:
    """Return a hash of the weights of a policy."""
    files = sorted(policy.glob("*.safetensors"))
    assert files, f"{policy} holds no weights"
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


FINE_TUNE = ("sft", "--config", "{base}/tiny.yaml", "sft.output_dir={out}/sft", "sft.save_interval=0")
COLLECT = (
    *("collect", "--config", "{base}/tiny.yaml", "collect.output_dir={dir}/set", "collect.format=raw"),
    "env.max_episode_steps=21",
)
EVALUATE = ("eval", "--output", "{out}/eval", "--config", "{base}/tiny.yaml")
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "train",
            ("train", "--config", "{base}/tiny.yaml", "runner.output_dir={dir}"),
            [("resume", "{dir}")],
            run_result,
        ),
        Scenario("resume", ("resume", "{dir}"), [("resume", "{dir}")], run_result, start="interrupted"),
        Scenario(
            "sft",
            ("sft", "--config", "{base}/tiny.yaml", "sft.data_dir={base}/raw/set", "sft.output_dir={dir}"),
            [("resume", "{dir}")],
            sft_result,
        ),
        Scenario("collect", COLLECT, [(*FINE_TUNE, "sft.data_dir={dir}/set")], trained_on, own_result=False),
        Scenario(
            "collect lerobot",
            (*COLLECT, "collect.format=lerobot"),
            [(*FINE_TUNE, "sft.data_dir={dir}/set")],
            trained_on,
            own_result=False,
        ),
        Scenario(
            "export",
            ("export", "{base}/interrupted", "{dir}/policy"),
            [("eval", "{dir}/policy", *EVALUATE[1:])],
            evaluated,
            own_result=False,
        ),
    )
}


class Bench:
    """Runs command lines in forked processes, and makes what scenarios begin with.

    Args:
        base: a new directory for inputs.
        careless: recorded commands sync nothing, to see that this is found out.
        timeout_s: beyond it a command hangs.
    """

    def __init__(self, base: Path, careless: bool = False, timeout_s: float = TIMEOUT_S) -> None:
        self.base, self.careless, self.timeout_s = base, careless, timeout_s
        self.server = ForkServer(1)
        base.mkdir(parents=True, exist_ok=True)
        (base / "tiny.yaml").write_text(_merged())
        self._ready: set[str] = set()

    def prepare(self, name: str) -> None:
        """Make an input: ``interrupted``, a run that SIGTERM has ended after an iteration; ``raw``, a dataset."""
        if name in self._ready:
            return
        target = self.base / name
        if name == "interrupted":
            arguments = ("train", "--config", "{base}/tiny.yaml", "runner.output_dir={dir}")
            done = self.run(arguments, target, stop_at="act:7:SIGTERM")
            assert done.code == 143, done.stderr
        else:
            done = self.run(COLLECT, target)
            assert done.code == 0, done.stderr
        self._ready.add(name)

    def arguments(self, template: Sequence[str], directory: Path, out: Path | None = None) -> list[str]:
        """Fill in the paths."""
        return [part.format(base=self.base, dir=directory, out=out) for part in template]

    def run(self, template: Sequence[str], directory: Path, out: Path | None = None, stop_at: str = "") -> Outcome:
        """Run a command line to its end.

        Raises:
            TimeoutError: it hangs.
        """
        arguments = self.arguments(template, directory, out)
        return Outcome(*self.server.run(arguments, environment(stop_at), self.timeout_s))

    def cold_command(self, template: Sequence[str], directory: Path) -> list[str]:
        """Return the command line of a process of its own."""
        code = "from embodrl.cli.main import main; main()"
        if self.careless:
            code = f"import os; os.fsync = lambda descriptor: None; {code}"
        return [sys.executable, "-c", code, *self.arguments(template, directory)]

    def recover(self, scenario: Scenario, directory: Path, out: Path) -> tuple[Outcome, Result | None]:
        """Recover; return how it ended and, if it did not refuse, the result."""
        outcome = Outcome(0, "", "")
        for arguments in scenario.recovery:
            outcome = self.run(arguments, directory, out)
            if outcome.code != 0:
                return outcome, None
        return outcome, scenario.result(directory, out)

    def judge(self, scenario: Scenario, directory: Path, reference: Result, names: Sequence[str]) -> Verdict:
        """Recover a directory and compare.

        Args:
            scenario: of the directory.
            directory: changed by the recovery.
            reference: what it must lead to.
            names: one of which a refusal has to contain.
        """
        out = directory.with_name(f"{directory.name}.out")
        try:
            outcome, result = self.recover(scenario, directory, out)
        except TimeoutError as error:
            return Verdict("FAILED", f"hangs: {error}")
        except (OSError, ValueError, KeyError, StopIteration, AssertionError) as error:
            return Verdict("FAILED", f"exit 0, and the result can't be read: {type(error).__name__} {error}")
        finally:
            shutil.rmtree(out, ignore_errors=True)
        own = str(directory.resolve())  # of all files: it names none
        said = (text.replace(own, "DIR").replace(str(directory), "DIR") for text in (outcome.stdout, outcome.stderr))
        return verdict(Outcome(outcome.code, *said), result, reference, names)


def verdict(outcome: Outcome, result: Result | None, reference: Result, names: Sequence[str]) -> Verdict:
    """Judge how a recovery ended; ``result`` is None if it did not end well."""
    said = outcome.stdout + outcome.stderr
    if "Traceback (most recent call last)" in said:
        return Verdict("FAILED", f"a traceback: {said.strip().splitlines()[-1]}")
    named = any(name in said for name in names)
    if result is None:
        first = next((line for line in outcome.stderr.splitlines() if "error" in line), outcome.stderr[:200])
        if outcome.code < 0 or not first:
            return Verdict("FAILED", f"ended with {outcome.code} and no message")
        return Verdict("refused", first) if named else Verdict("FAILED", f"a refusal that names no file: {first}")
    different = [name for name in reference if result[name] != reference[name]]
    if not different:
        return Verdict("identical", STARTS_OVER if STARTS_OVER in said else "")
    where = ", ".join(different)
    if different == ["metrics.jsonl"] and named and _is_part(result[where], reference[where]):
        return Verdict("noted", "rows are missing, and the file is named")
    return Verdict("FAILED", f"a different run{'' if named else ' without a word'}: {where}")


def _is_part(found: object, reference: object) -> bool:
    return isinstance(found, list) and isinstance(reference, list) and all(row in reference for row in found)


def _merged() -> str:
    """TINY with SMALL over it, as YAML."""
    import yaml

    def merge(below: dict[str, object], above: dict[str, object]) -> dict[str, object]:
        for key, value in above.items():
            old = below.get(key)
            below[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        return below

    return yaml.safe_dump(merge(yaml.safe_load(TINY), yaml.safe_load(SMALL.replace("OUT", "/nonexistent"))))
