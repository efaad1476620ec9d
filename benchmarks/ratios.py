"""The benchmarks of one process in seconds: processor time of the plain way over ours, to notice when one gets worse.

Both sides of a case run in turns in this process on one core. A ratio of processor times depends little on what else
runs, and much less than seconds on the machine; still, only ratios whose rounds agree within 10 % are compared, and
only with a record of the same processor.

A history (``benchmarks/results/ratios.jsonl``) has one record a line: commit, date, hardware, and by case the median
``ratio``, the ``spread`` of its rounds (their interquartile range over the median), and milliseconds of either side.
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import inference
import numpy as np
import render
import torch
from hardware import describe_hardware
from rich.console import Console
from rich.table import Table

from embodrl.errors import MissingDependencyError, OutputError
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver, MemorySender
from embodrl.processes.child import module_command
from embodrl.processes.frames import Frame, Kind, Sender, receive_now, socket_pair
from embodrl.scheduler.channel import SharedChannel
from embodrl.storage.json_file import write_json_result
from embodrl.trainer.provenance import git_state

ROUNDS = 9
STABLE = 0.10
"""Largest spread of rounds that are compared, and the part of a ratio that may be lost."""
REPEATS = 2
"""How often a case that seems to have lost is measured again; its best ratio counts."""
MIN_S = 0.05
"""Processor seconds of a side in a round, at least: the clock may tick every 10 ms."""
SCENES = 8
MESSAGE_SHAPE = (16, 224, 224, 3)
WEIGHTS_BYTES = 32 * 2**20

Side = Callable[[], object]
Sides = tuple[Side, Side]
"""Ours and the plain way, each the same work."""


class CaseFigures(TypedDict):
    """Of one case; see the module."""

    ratio: float
    spread: float
    embodrl_ms: float
    plain_ms: float


class RatioRecord(TypedDict):
    """A line of the history."""

    commit: str | None
    date: str
    hardware: dict[str, object]
    ratios: dict[str, CaseFigures]
    skipped: dict[str, str]


@contextmanager
def steps() -> Iterator[Sides]:
    """Control steps with reward and success: scenes of one process, and as many steps of a stock scene."""
    with _scenes() as (ours, stock):
        from embodrl.envs.maniskill.sim import evaluate

        actions = np.random.default_rng(0).uniform(-0.3, 0.3, (SCENES, 7)).astype(np.float32)

        def step_all() -> None:
            for sim, action in zip(ours, actions, strict=True):
                sim.advance(action[None])
            evaluate(ours, actions)

        def step_stock() -> None:
            for action in actions:
                stock.step(action)
                info = stock.env.get_info()
                stock.env.compute_normalized_dense_reward(obs={}, action=None, info=info)

        yield step_all, step_stock


@contextmanager
def pictures() -> Iterator[Sides]:
    """Pictures of 64 x 64 pixels; the stock scene, too, goes without SAPIEN's reflection table, which takes seconds."""
    with _scenes() as (ours, stock):
        yield ours[0].images, stock.render


@contextmanager
def _scenes() -> Iterator[tuple[list[Any], render.Stock]]:
    os.environ.update(LP_NUM_THREADS="1", SAPIEN_DISABLE_RAY_TRACING="1")  # read when SAPIEN is loaded
    try:
        from embodrl.envs.maniskill.rendering import accept_pci_devices, omit_reflection_table, render_device_name

        device = render_device_name("auto")
        accept_pci_devices()
    except ImportError as error:
        raise MissingDependencyError(
            f"ManiSkill is not installed: {error}", "pip install 'embodrl[maniskill]'", code="bench-needs-maniskill"
        ) from error
    stock = render.Stock(64, device)
    ours = [render.Ours(64, device).sim for _ in range(SCENES)]
    omit_reflection_table(stock.env.scene.sub_scenes[0].render_system, stock.env._sensors.values())
    stock.reset(0)
    for seed, sim in enumerate(ours):
        sim.reset(np.array([seed]), np.zeros(1, np.int64))
    try:
        yield ours, stock
    finally:
        for scene in (stock, *ours):
            scene.close()


@contextmanager
def decisions() -> Iterator[Sides]:
    """Actions of the tiny OpenVLA for a few observations, and one at a time with the whole vocabulary."""
    policy = inference.make_policy("openvla", False, torch.device("cpu"))
    sides = inference.sides(policy, inference.make_observation("openvla", False, 4))
    yield sides["embodrl"], sides["plain"]


@contextmanager
def messages() -> Iterator[Sides]:
    """Pictures of a step between processes, and pickled."""
    pictures = np.random.default_rng(0).integers(0, 256, MESSAGE_SHAPE, np.uint8)
    ours, theirs = socket_pair()
    sender = Sender(ours)

    def send() -> object:
        sender.send(Frame(Kind.ITEM, value=pictures))
        return receive_now(theirs)

    with ours, theirs:
        yield send, lambda: pickle.loads(pickle.dumps(pictures))  # noqa: S301 - its own bytes


@contextmanager
def weights() -> Iterator[Sides]:
    """Weights by memory from sender to receiver, and memcpy."""

    class Target:
        """A policy of one tensor."""

        def update_weights(self, weights: Any, version: int) -> None:
            for _, tensor in weights:
                held.copy_(tensor)

    source = torch.ones(WEIGHTS_BYTES // 4)
    held = torch.zeros(WEIGHTS_BYTES // 4)
    channel = SharedChannel("weights", 4)
    sender = MemorySender([channel], bucket_bytes=WEIGHTS_BYTES)
    receiver = MemoryReceiver(Target(), channel)

    def sync() -> None:
        sender.send([("weights", source)], (sender.version or 0) + 1)
        receiver.receive(1.0)

    try:
        yield sync, lambda: held.copy_(source)
    finally:
        sender.close()
        receiver.close()
        channel.release()


@contextmanager
def start() -> Iterator[Sides]:
    """``embodrl --help``, and Python with typer, its command-line library."""
    yield (
        lambda: subprocess.run([*module_command("embodrl"), "--help"], check=True, stdout=subprocess.DEVNULL),
        lambda: subprocess.run([sys.executable, "-P", "-c", "import typer.main"], check=True),
    )


CASES = (steps, pictures, decisions, messages, weights, start)


def _processor_s() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _timed(side: Side) -> float:
    begin = _processor_s()
    count = 0
    while (spent := _processor_s() - begin) < MIN_S:
        side()
        count += 1
    return spent / count


def measure(sides: Sides, rounds: int = ROUNDS) -> CaseFigures:
    """Return the figures of a case: both sides in turns."""
    for side in sides:
        side()
    ours, plain = np.array([[_timed(side) for side in sides] for _ in range(rounds)]).T
    ratios = plain / ours
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return {
        "ratio": round(float(middle), 3),
        "spread": round(float((high - low) / middle), 3),
        "embodrl_ms": round(float(np.median(ours)) * 1e3, 3),
        "plain_ms": round(float(np.median(plain)) * 1e3, 3),
    }


def run(names: Collection[str] | None = None) -> RatioRecord:
    """Measure cases on one core, all of them by default; one whose packages are missing is skipped, with the reason."""
    cores = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    ratios = dict[str, CaseFigures]()
    skipped = dict[str, str]()
    try:
        for case in CASES:
            if names is not None and case.__name__ not in names:
                continue
            try:
                with case() as sides:
                    ratios[case.__name__] = measure(sides)
            except MissingDependencyError as error:
                skipped[case.__name__] = error.message
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
    return RatioRecord(
        commit=git_state(Path(__file__).resolve().parents[1])["commit"],
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        hardware=describe_hardware(),
        ratios=ratios,
        skipped=skipped,
    )


def last_record(history: Path, hardware: dict[str, object]) -> RatioRecord | None:
    """Return the newest record of a history on the same processor.

    Raises:
        OutputError: it can't be read.
    """
    try:
        records: list[RatioRecord] = [json.loads(line) for line in history.read_text().splitlines()]
        return next((one for one in reversed(records) if _kind(one["hardware"]) == _kind(hardware)), None)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OutputError(
            f"{history} is no history of ratios: {error}", "see docs/benchmarks.md", code="bench-history"
        ) from error


def lost(now: RatioRecord, before: RatioRecord) -> dict[str, float]:
    """Return by case what part of its ratio is left, where more than ``STABLE`` was lost and both are stable."""
    left: dict[str, float] = {}
    for name, figures in before["ratios"].items():
        found = now["ratios"].get(name)
        if found is not None and max(found["spread"], figures["spread"]) <= STABLE:
            left[name] = found["ratio"] / figures["ratio"]
    return {name: part for name, part in left.items() if part < 1 - STABLE}


def _kind(hardware: Mapping[str, object]) -> tuple[object, object]:
    """Return what figures depend on: processors of one name may differ in their instructions."""
    return hardware["cpu"], hardware.get("instructions")


def main(json_path: Path | None = None, against: Path | None = None, record: Path | None = None) -> int:
    """Measure and print a table; return 1 if a ratio is worse than in the last record of ``against``, else 0.

    Args:
        json_path: where the record is written.
        against: a history to compare with.
        record: a history to which the record is appended.
    """
    now = run()
    before = last_record(against, now["hardware"]) if against is not None else None
    for _ in range(REPEATS):  # what is slower stays so; a neighbour on the machine comes and goes
        if before is None or not (worse := lost(now, before)):
            break
        for name, figures in run(worse)["ratios"].items():
            now["ratios"][name] = max(now["ratios"][name], figures, key=lambda found: found["ratio"])
    table = Table(
        "case", "ratio", "spread", "embodrl ms", "plain ms", "before", title="processor time, plain / embodrl"
    )
    for name, figures in now["ratios"].items():
        earlier = before["ratios"].get(name) if before is not None else None
        row = (figures["ratio"], figures["spread"], figures["embodrl_ms"], figures["plain_ms"])
        table.add_row(name, *map(str, row), str(earlier["ratio"]) if earlier is not None else "")
    console = Console()
    console.print(table)
    for name, reason in now["skipped"].items():
        console.print(f"{name}: skipped, {reason}")
    if json_path is not None:
        write_json_result(json_path, now)
    if record is not None:
        with record.open("a") as file:
            file.write(json.dumps(now) + "\n")
    if against is not None and before is None:
        cpu, instructions = _kind(now["hardware"])
        console.print(f"nothing to compare with: {against} has no record of a {cpu} with {instructions}")
    worse = lost(now, before) if before is not None else {}
    for name, part in worse.items():
        console.print(f"{name}: {100 * part:.0f} % of the recorded ratio")
    return 1 if worse else 0
