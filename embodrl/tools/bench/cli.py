"""`embodrl bench`."""

from __future__ import annotations

import importlib
import sys
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from embodrl.cli.app import choose, one_of
from embodrl.cli.common import Debug, JsonFile, execute
from embodrl.errors import UsageError


class Benchmark(StrEnum):
    """What is measured."""

    transport = "transport"
    render = "render"
    e2e = "e2e"
    inference = "inference"
    asynchrony = "async"
    tasks = "tasks"
    envs = "envs"
    weight_sync = "weight-sync"
    rollout_backends = "rollout"
    ratios = "all"


IN_REPOSITORY = {
    Benchmark.asynchrony: "asynchrony",
    Benchmark.tasks: "task_runner",
    Benchmark.weight_sync: "weight_sync",
    Benchmark.rollout_backends: "rollout_backends",
}
"""Benchmarks of embodrl itself, which stay out of the wheel; the others measure a user's machine."""


def bench(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="what to measure, see above",
            show_default=False,
            autocompletion=one_of(Benchmark),
        ),
    ],
    json: JsonFile = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="of `all`: compare with the last record of this history", show_default=False),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="of `all`: append the record to this history", show_default=False),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="of `inference`: a model family; may be repeated", show_default=False),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="of `inference`: tiny, or public with random weights", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="of `inference`: cpu or cuda", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure this machine against a baseline.

    \b
    transport  observations through shared memory, against pickled arrays in a queue
    render     camera pictures on this machine, against stock ManiSkill
    e2e        environment steps per second of a whole training iteration, and where the time goes
    inference  actions per second of every model family, against the plain way of their reference implementations
    async      asynchronous against synchronous training, and the theoretical optimum
    tasks      coroutines per second of the asynchronous task runner, against asyncio.gather
    envs       environment steps per second of every simulator here, against its own vectorisation
    weight-sync  weights from a trainer to a rollout by every kind of sync, against memcpy
    rollout    actions per second of the rollout backends native and vLLM, beside transformers' generate
    all        the above on one core in half a minute: processor time of the plain way over ours, per case

    \b
    Examples:
      embodrl bench transport
      embodrl bench render --json render.json
      embodrl bench inference --family pi05 --family smolvla --size public --device cuda
      embodrl bench all --against benchmarks/results/ratios.jsonl

    \b
    Exit codes of `all --against`: 0 as before, 1 a stable ratio has lost more than 10 %.
    """

    def action() -> int | None:
        chosen = Benchmark(choose(name, Benchmark, "benchmark"))
        if json is not None:
            from embodrl.storage.json_file import check_json_file

            check_json_file(json)
        _check_options(chosen, {"--against": against, "--record": record}, Benchmark.ratios)
        _check_options(chosen, {"--family": family, "--size": size, "--device": device}, Benchmark.inference)
        module = load_benchmark(chosen)
        if chosen is Benchmark.ratios:
            return module.main(json, against, record)
        if chosen is Benchmark.inference:
            return module.main(json, module.choose(family or (), size, device))
        return module.main(json)

    execute(action, debug)


def _check_options(chosen: Benchmark, given: dict[str, object], owner: Benchmark) -> None:
    """Raise UsageError if options of one benchmark were given to another."""
    if chosen is not owner and any(value is not None for value in given.values()):
        raise UsageError(
            f"{', '.join(given)} are of `embodrl bench {owner}`, not of {chosen}",
            "leave them out",
            code="bench-option",
        )


def load_benchmark(name: Benchmark) -> ModuleType:
    """Return the module of a benchmark: from the package, or from ``benchmarks/`` of a checkout.

    Raises:
        UsageError: it is only in the repository, and embodrl was installed from a wheel.
    """
    module = IN_REPOSITORY.get(name)
    if module is None:
        return importlib.import_module(f"embodrl.tools.bench.{name.name}")
    directory = Path(__file__).resolve().parents[3] / "benchmarks"
    if not (directory / f"{module}.py").is_file():
        raise UsageError(
            f"the benchmark '{name.value}' is part of the repository, not of the installed package",
            f"clone the repository, then: python benchmarks/{module}.py",
            code="bench-not-installed",
        )
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
    return importlib.import_module(module)
