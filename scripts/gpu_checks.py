"""The ordered list of checks for a machine with one CUDA GPU; ``gpu_checks.sh`` says how to run it."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
from check_list import LOG_FILE, RESULTS_FILE, Check, CheckFailed, CheckList, Figures, NotHere, Shell, read_rows

from embodrl.reporting.rows import MEASURED

ROOT = Path(__file__).resolve().parents[1]
RECORDINGS = ROOT / "tests" / "parity" / "recordings"
FAMILIES = ("openvla", "openvla_oft", "pi0", "pi05", "pi0_fast", "gr00t", "gr00t_n1_7", "smolvla")
PUBLIC_SIZES = ("pi05", "openvla_oft", "gr00t_n1_7", "smolvla")
WITH_FLOW = "model=smolvla"
WITHOUT_WARM_START = "model.warm_start=null"

COMMON = (
    *("env=toy", "runner=debug", "env.num_processes=1", "env.pin_cpus=false", "env.video.enabled=false"),
    *("cluster.num_threads=1", "runner.logger.console=plain", "runner.logger.tensorboard=false"),
)
SIZES = {
    "cuda": (
        *("env.train.total_num_envs=16", "env.train.max_steps_per_rollout_epoch=20", "env.eval.num_episodes=8"),
        *("actor.global_batch_size=64", "actor.micro_batch_size=16"),
    ),
    "cpu": (
        *("env.train.total_num_envs=8", "env.train.max_steps_per_rollout_epoch=10", "env.eval.num_episodes=2"),
        "env.max_episode_steps=10",
        *("actor.global_batch_size=8", "actor.micro_batch_size=4"),
    ),
}
"""Of the toy runs: on a GPU, and for a rehearsal on a CPU."""
OWN_PROCESSES = ("actor.own_process=true", "rollout.own_process=true")

SHOWN = (
    *("train/policy_loss", "train/loss", "train/grad_norm", "train/ratio_mean", "train/first_minibatch_kl"),
    *("train/logprob_mismatch", "train/logprob_mismatch_max", "time/policy_s", "time/train_s", "time/sync_s"),
    *("memory/gpu_peak_mib", "rollout/restarts", "eval/success_rate"),
)
"""Metrics that a row of the results repeats, of the last iteration."""
MOVED_BY_LOAD = (*MEASURED, "memory/")
FIRST_MINIBATCH_KL = 1e-2
"""Largest KL of the first minibatch, before any step: the policy that trains is the one that acted."""


@dataclass(frozen=True)
class Options:
    """What the checks need to know.

    Attributes:
        python: interpreter of the commands.
        device: ``cpu`` or ``cuda``.
        recordings: directories with parity fixtures.
    """

    python: str
    device: str
    recordings: tuple[Path, ...]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def embodrl(self, *arguments: object) -> list[object]:
        """Return the command line of a verb."""
        return [self.python, "-m", "embodrl", *arguments]

    def toy(self, *settings: str, iterations: int = 1) -> list[str]:
        """Return the settings of a small run on this device; later ones win."""
        count = f"runner.max_iterations={iterations}"
        device = f"cluster.device={self.device}"
        return [*COMMON, device, count, *SIZES[self.device], WITHOUT_WARM_START, *settings]


# What checks read -----------------------------------------------------------------------------------------------------


def metrics(directory: Path) -> list[Figures]:
    """Return the rows of a run's metrics; none if it has written none."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def shown(rows: list[Figures]) -> Figures:
    """Return the metrics of the last iteration that tell most."""
    return {name: rows[-1][name] for name in SHOWN if rows and rows[-1].get(name) is not None}


def not_finite(rows: list[Figures]) -> list[str]:
    """Return which metrics are not finite, as ``NAME in iteration N``."""
    return [
        f"{name} in iteration {row.get('iteration')}"
        for row in rows
        for name, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]


def difference(rows: list[Figures], others: list[Figures]) -> Figures:
    """Compare the metrics of two runs, but for times and memory: whether they are equal, and where not, first."""
    largest = 0.0
    first: str | None = None if len(rows) == len(others) else f"{len(rows)} rows and {len(others)}"
    for row, other in zip(rows, others, strict=False):
        for name in sorted(row.keys() | other.keys()):
            one, two = row.get(name), other.get(name)
            if name.startswith(MOVED_BY_LOAD) or one == two:
                continue
            first = first or f"{name} in iteration {row.get('iteration')}: {one} and {two}"
            if isinstance(one, (int, float)) and isinstance(two, (int, float)):
                largest = max(largest, abs(one - two) / max(abs(one), abs(two)))
    return {"equal": first is None, "first_difference": first, "largest_relative_difference": largest}


# Checks ---------------------------------------------------------------------------------------------------------------

VERSIONS = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
import torch
from embodrl.processor import processor
found = {"python": platform.python_version(), "cpu": processor().name, "cuda": torch.version.cuda}
for name in ("torch", "transformers", "numpy", "tokenizers", "safetensors", "pydantic", "megatron-core", "mujoco"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
if sys.argv[2] == "cuda":
    facts = torch.cuda.get_device_properties(0)
    found |= {"gpu": facts.name, "gpu_memory_mib": facts.total_memory >> 20, "num_gpus": torch.cuda.device_count()}
    found |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "bf16": torch.cuda.is_bf16_supported()}
json.dump(found, open(sys.argv[1], "w"))
"""


def machine(options: Options) -> Callable[[Shell], Figures]:
    """Hardware and versions; everything else depends on it."""

    def check(shell: Shell) -> Figures:
        found = shell.directory / "versions.json"
        if options.on_gpu:
            shell.run("nvidia-smi")
        shell.run(options.python, "-c", VERSIONS, found, options.device)
        return json.loads(found.read_text())

    return check


def doctor(options: Options) -> Callable[[Shell], Figures]:
    """Packages, drivers and a frame of every simulator that is installed."""

    def check(shell: Shell) -> Figures:
        shell.run(*options.embodrl("doctor"))
        return {}

    return check


def gpu_tests(options: Options) -> Callable[[Shell], Figures]:
    """The unit tests that need a GPU."""

    def check(shell: Shell) -> Figures:
        need(options.on_gpu, "these tests need a GPU")
        tests = ROOT / "tests" / "unit" / "hybrid_engines" / "test_offload.py"
        shell.run(options.python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", tests)
        return {"summary": shell.log.read_text().splitlines()[-1]}

    return check


def parity(options: Options, precision: str) -> Callable[[Shell], Figures]:
    """Recordings of the public implementations."""

    def check(shell: Shell) -> Figures:
        fixtures: list[Figures] = []
        codes: list[int] = []
        for number, directory in enumerate(options.recordings):
            found = shell.directory / f"{number}.json"
            how = ("--device", options.device, "--precision", precision)
            codes.append(shell.wait(shell.start(*options.embodrl("parity", directory, *how, "--json", found))))
            fixtures += json.loads(found.read_text())["fixtures"] if found.is_file() else []
        figures: Figures = {
            fixture["family"]: fixture["error"]
            or {
                one["name"]: {"max_error": one["max_error"], "tolerance": one["tolerance"], "scale": one["scale"]}
                for one in fixture["outputs"]
            }
            for fixture in fixtures
        }
        wrong = [fixture["family"] for fixture in fixtures if not fixture["ok"]]
        if any(codes) or not fixtures:
            reason = f"out of tolerance: {', '.join(wrong)}" if wrong else shell.end_of_log()
            raise CheckFailed(reason, figures)
        return figures

    return check


def need(condition: bool, reason: str) -> None:
    """Raise NotHere unless the condition holds."""
    if not condition:
        raise NotHere(reason)


def need_package(options: Options, shell: Shell, name: str) -> None:
    """Raise NotHere if the interpreter does not find a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    need(shell.wait(shell.start(options.python, "-c", code)) == 0, f"the package {name} is not installed")


def train(options: Options, shell: Shell, name: str, settings: Iterable[str]) -> list[Figures]:
    """Train and return the rows of metrics.

    Raises:
        CheckFailed: the run failed, or a metric is not finite.
    """
    directory = shell.directory / name
    shell.run(*options.embodrl("train", *settings, f"runner.output_dir={directory}"))
    return judged(directory)


def judged(directory: Path) -> list[Figures]:
    """Return the rows of a run that has ended.

    Raises:
        CheckFailed: there are none, a metric is not finite, or the policy that trained was not the one that acted.
    """
    rows = metrics(directory)
    wrong = not_finite(rows)
    if not rows or wrong:
        raise CheckFailed(f"not finite: {', '.join(wrong[:5])}" if wrong else "the run wrote no metrics", shown(rows))
    for row in rows:
        moved = row.get("train/first_minibatch_kl") or 0.0
        if abs(moved) > FIRST_MINIBATCH_KL:
            raise CheckFailed(f"the first minibatch has a KL of {moved:.2g} before any step", shown(rows))
    return rows


def trains(options: Options, *settings: str, package: str = "", iterations: int = 1) -> Callable[[Shell], Figures]:
    """A short run ends, and its metrics are finite."""

    def check(shell: Shell) -> Figures:
        if package:
            need_package(options, shell, package)
        return shown(train(options, shell, "run", options.toy(*settings, iterations=iterations)))

    return check


def repeats(options: Options, *others: str) -> Callable[[Shell], Figures]:
    """Two runs of one seed, of which the second may have other settings: are their metrics equal?"""

    def check(shell: Shell) -> Figures:
        plain = options.toy("model=openvla", iterations=3)
        rows = train(options, shell, "first", plain)
        again = train(options, shell, "second", [*plain, *others])
        return {**shown(again), **difference(rows, again)}

    return check


def resumes(options: Options) -> Callable[[Shell], Figures]:
    """A run that is killed after two of three iterations and resumed: are its metrics those of a whole one?"""

    def check(shell: Shell) -> Figures:
        plain = options.toy("model=openvla", iterations=3)
        rows = train(options, shell, "whole", plain)
        directory = shell.directory / "killed"
        process = shell.start(*options.embodrl("train", *plain, f"runner.output_dir={directory}"))
        checkpoint = directory / "checkpoints" / "step_2" / "manifest.json"
        wait_until(shell, lambda: checkpoint.is_file() or process.poll() is not None, "no second checkpoint")
        killed = process.poll() is None
        if killed:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shell.run(*options.embodrl("resume", directory))
        return {"killed_in_time": killed, **difference(rows, judged(directory))}

    return check


def survives_a_kill(options: Options) -> Callable[[Shell], Figures]:
    """A rollout process that is killed is replaced, and the run ends as if nothing had been."""

    def check(shell: Shell) -> Figures:
        directory = shell.directory / "run"
        settings = options.toy("model=openvla", *OWN_PROCESSES, iterations=3)
        process = shell.start(*options.embodrl("train", *settings, f"runner.output_dir={directory}"))
        wait_until(shell, lambda: metrics(directory) or process.poll() is not None, "no first iteration")
        victim = rollout_process(process.pid)
        if victim is not None:
            victim.kill()
        code = shell.wait(process)
        if code or victim is None:
            raise CheckFailed(shell.end_of_log() if code else "no rollout process was found")
        rows = judged(directory)
        restarts = max(row.get("rollout/restarts") or 0 for row in rows)
        if not restarts:
            raise CheckFailed("the rollout process was killed, and no restart is counted", shown(rows))
        return shown(rows)

    return check


def rollout_process(pid: int) -> psutil.Process | None:
    """Return the worker below a driver that has simulators of its own."""

    def runs(process: psutil.Process, module: str) -> bool:
        return any(module in word for word in process.cmdline())

    try:
        for process in psutil.Process(pid).children(recursive=True):
            if runs(process, "process_main") and any(runs(child, "worker_main") for child in process.children()):
                return process
    except psutil.NoSuchProcess:
        pass  # the run has just ended
    return None


def wait_until(shell: Shell, condition: Callable[[], Any], otherwise: str) -> None:
    """Wait for a condition.

    Raises:
        CheckFailed: it is not met in the check's time.
    """
    while not condition():
        if shell.left_s <= 0:
            shell.give_up(otherwise)
        time.sleep(0.05)


LORA = (
    *("model.trainable=lora", "actor.param_dtype=bf16", "env.train.total_num_envs=8"),
    *("env.train.max_steps_per_rollout_epoch=8", "env.eval.num_episodes=4", "actor.global_batch_size=32"),
    *("actor.micro_batch_size=8", "runner.save_interval=10"),
)
LORA_ITERATIONS = 3


def lora_7b(options: Options) -> Callable[[Shell], Figures]:
    """OpenVLA at its public size with adapters, and what `embodrl plan` says of its memory."""

    def check(shell: Shell) -> Figures:
        model = ("model=openvla_7b",) if options.on_gpu else ("model=openvla", "model.num_action_chunks=1")
        settings = options.toy(*model, *LORA, iterations=LORA_ITERATIONS + 1)
        planned = shell.directory / "plan.json"
        plan = [str(word) for word in options.embodrl("plan", "train", *settings, "--json")]
        shell.run("bash", "-c", '"${@:2}" >"$1" || [ $? -eq 1 ]', "plan", planned, *plan)
        memories = json.loads(planned.read_text())["memory"]
        directory = shell.directory / "run"
        process = shell.start(*options.embodrl("train", *settings, f"runner.output_dir={directory}"))
        wait_until(
            shell, lambda: len(metrics(directory)) >= LORA_ITERATIONS or process.poll() is not None, "no third row"
        )
        if process.poll():
            raise CheckFailed(shell.end_of_log(), {"planned": memories, **shown(metrics(directory))})
        shell.stop()  # what follows evaluates and writes whole weights
        rows = judged(directory)
        figures = {"model": model[0], "planned": memories, **shown(rows)}
        for name in ("time/policy_s", "time/train_s"):
            figures[f"{name} by iteration"] = [round(row[name], 2) for row in rows if row.get(name)]
        return figures

    return check


def inference(options: Options, family: str) -> Callable[[Shell], Figures]:
    """Actions per second of a public size, beside the plain way."""

    def check(shell: Shell) -> Figures:
        found = shell.directory / "bench.json"
        size = "public" if options.on_gpu else "tiny"
        how = ("--family", family, "--size", size, "--device", options.device)
        shell.run(options.python, ROOT / "benchmarks" / "bench.py", "inference", *how, "--json", found)
        return json.loads(found.read_text())[size][family]

    return check


GREY = """
import json, sys
import gymnasium
env = gymnasium.make("Reacher-v5", render_mode="rgb_array", width=64, height=64)
env.reset(seed=0)
json.dump({"mean_grey": float(env.render().mean())}, open(sys.argv[1], "w"))
"""


def egl(options: Options) -> Callable[[Shell], Figures]:
    """MuJoCo draws, and a run sees its pictures; ``mean_grey`` is to be compared with that of another machine."""

    def check(shell: Shell) -> Figures:
        need_package(options, shell, "mujoco")
        need_package(options, shell, "gymnasium")
        found = shell.directory / "grey.json"
        shell.run(options.python, "-c", GREY, found, environment={"MUJOCO_GL": "egl"})
        settings = options.toy("env=gymnasium_reacher", "model=openvla", "env.max_episode_steps=20")
        rows = train(options, shell, "run", settings)
        return {**json.loads(found.read_text()), **shown(rows)}

    return check


def all_checks(options: Options) -> list[Check]:
    """Return the checks in order: what says most comes first, what measures time comes last and alone."""
    openvla = "model=openvla"
    checks = [
        Check("machine", machine(options), 90, alone=True),
        Check("parity_fp32", parity(options, "fp32"), 120),
        Check("parity_bf16", parity(options, "bf16"), 120),
        *(Check(f"family_{name}", trains(options, f"model={name}"), 150) for name in FAMILIES),
        Check("same_seed", repeats(options), 180),
        Check("resume", resumes(options), 240),
        Check("grpo", trains(options, openvla, "algorithm=grpo"), 120),
        Check("fpo", trains(options, WITH_FLOW, "algorithm=fpo"), 120),
        Check("pi_nft", trains(options, WITH_FLOW, "algorithm=pi_nft"), 120),
        Check("dagger", trains(options, openvla, "algorithm=dagger"), 120),
        Check("sac", trains(options, "model=cnn", "algorithm=sac"), 120),
        Check("residual", trains(options, openvla, "algorithm=residual", "model.warm_start=builtin"), 120),
        *(
            Check(
                f"sync_{kind}",
                trains(options, openvla, *OWN_PROCESSES, f"rollout.weight_sync={kind}", iterations=2),
                120,
            )
            for kind in ("memory", "collective", "disk")
        ),
        Check("staleness_1", trains(options, openvla, *OWN_PROCESSES, "runner.max_staleness=1", iterations=3), 150),
        Check("offload_one_process", repeats(options, "actor.enable_offload=true"), 180),
        Check(
            "offload_own_processes",
            repeats(options, *OWN_PROCESSES, "actor.enable_offload=true", "rollout.enable_offload=true"),
            240,
        ),
        Check("rollout_killed", survives_a_kill(options), 180),
        Check("fsdp", trains(options, openvla, "actor=fsdp", iterations=2), 120),
        Check(
            "megatron",
            trains(
                options, openvla, "actor=megatron", "actor.tensor_parallel_size=1", package="megatron", iterations=2
            ),
            120,
        ),
        Check("gpu_tests", gpu_tests(options), 120),
        Check("mujoco_egl", egl(options), 120),
        Check("doctor", doctor(options), 60),
        Check("lora_7b", lora_7b(options), 240, alone=True),
        *(Check(f"inference_{name}", inference(options, name), 120, alone=True) for name in PUBLIC_SIZES),
    ]
    return checks


# Command line ---------------------------------------------------------------------------------------------------------


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_checks.sh", description=__doc__)
    parser.add_argument("output", type=Path, help="directory of results.jsonl and checks.log; what it has is kept")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses at tiny sizes")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the commands")
    parser.add_argument("--limit", type=float, default=720.0, metavar="SECONDS", help="of all checks together")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these checks; a name may end in *")
    parser.add_argument("--workers", type=int, metavar="N", help="checks at once; half of the cores, at most 8")
    parser.add_argument(
        "--recordings", type=Path, action="append", metavar="DIR", help="parity fixtures beside the repository's"
    )
    parser.add_argument("--list", action="store_true", help="print the names and end")
    return parser.parse_args(words)


def chosen(checks: list[Check], only: str) -> list[Check]:
    """Return the checks that ``--only`` names, and always the first, which says what the others ran on.

    Raises:
        SystemExit: a name is of no check.
    """
    wanted = [name for name in only.split(",") if name]
    if not wanted:
        return checks

    def matches(check: Check, name: str) -> bool:
        return check.name.startswith(name[:-1]) if name.endswith("*") else check.name == name

    unknown = [name for name in wanted if not any(matches(check, name) for check in checks)]
    if unknown:
        known = ", ".join(check.name for check in checks)
        raise SystemExit(f"error: no check {', '.join(unknown)}\n  hint: known: {known}")
    return [checks[0], *(check for check in checks[1:] if any(matches(check, name) for name in wanted))]


def main() -> int:
    """Run the checks; return 1 if one failed or had no time, else 0."""
    given = arguments()
    options = Options(given.python, given.device, (RECORDINGS, *(path.resolve() for path in given.recordings or [])))
    checks = chosen(all_checks(options), given.only)
    if given.list:
        print("\n".join(check.name for check in checks))
        return 0
    cores = len(os.sched_getaffinity(0))
    workers = given.workers or max(1, min(8, cores // 2))
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1"}
    if not options.on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="gpu_checks_", ignore_cleanup_errors=True) as work:
        listed = CheckList(given.output, Path(work), environment, given.limit, workers, ROOT)

        def end(number: int, _: FrameType | None) -> NoReturn:
            listed.stop()
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        left = listed.run(checks)
    return summary(given.output, checks, left)


def summary(output: Path, checks: list[Check], left: list[str]) -> int:
    """Print what came out; return the exit code."""
    names = {check.name for check in checks}
    rows = [row for row in read_rows(output) if row["name"] in names]
    failed = [row["name"] for row in rows if row["status"] == "failed"]
    skipped = [row["name"] for row in rows if row["status"] == "skipped"]
    passed = len(rows) - len(failed) - len(skipped)
    print(f"{passed} of {len(checks)} checks passed: {output / RESULTS_FILE}, {output / LOG_FILE}")
    for what, found in (("failed", failed), ("can't run here", skipped), ("no time left, run it again for", left)):
        if found:
            print(f"{what}: {', '.join(found)}")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
