"""`embodrl bench`."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Annotated

import typer

from embodrl.cli.common import Debug, JsonFile, execute


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


def bench(
    name: Annotated[Benchmark, typer.Argument(help="what to measure", show_default=False)],
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Measure this machine against a baseline.

    \b
    transport  observations through shared memory, against pickled arrays in a queue
    render     camera pictures on this machine, against stock ManiSkill
    e2e        environment steps a second of a whole training iteration, and where the time goes
    inference  actions a second of every model family, against the plain way of their reference implementations
    async      rollouts beside training, against taking turns, and the ideal of both
    tasks      coroutines a second of the asynchronous task runner, against asyncio.gather
    envs       environment steps a second of every simulator here, against its own vectorisation
    weight-sync  weights from a trainer to a rollout by every kind of sync, against memcpy
    rollout    actions a second of the rollout backends native and vLLM, beside transformers' generate

    \b
    Examples:
      embodrl bench transport
      embodrl bench render --json render.json
    """

    def action() -> int | None:
        if json is not None:
            from embodrl.storage.json_file import check_json_file

            check_json_file(json)
        return importlib.import_module(f"embodrl.bench.{name.name}").main(json)

    execute(action, debug)
