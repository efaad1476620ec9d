"""Measure this machine against a baseline: ``python benchmarks/bench.py NAME [--json FILE]``.

transport    observations through shared memory, against pickled arrays in a queue
render       camera pictures on this machine, against stock ManiSkill
e2e          environment steps per second of a whole training iteration, and where the time goes
inference    actions per second of every model family, against the plain way of their reference implementations
async        asynchronous against synchronous training, and the theoretical optimum
tasks        coroutines per second of the asynchronous task runner, against asyncio.gather
envs         environment steps per second of every installed simulator, against its own vectorization
weight-sync  weights from a trainer to a rollout by every kind of sync, against memcpy
rollout      actions per second of the rollout backends native and vLLM, beside transformers' generate
all          the main parts on one core in half a minute: processor time of the plain way over ours, per case
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from embodrl.errors import EmbodrlError
from embodrl.storage.json_file import check_json_file

MODULES = {
    "transport": "transport",
    "render": "render",
    "e2e": "e2e",
    "inference": "inference",
    "async": "asynchrony",
    "tasks": "task_runner",
    "envs": "envs",
    "weight-sync": "weight_sync",
    "rollout": "rollout_backends",
    "all": "ratios",
}
"""Name -> module of this directory, imported when it is measured: some need packages that others don't."""


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments; all but ``name`` and ``json`` are keyword arguments of the module's ``main``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    parsers = {name: verbs.add_parser(name) for name in MODULES}
    for one in parsers.values():
        one.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    history = parsers["all"]
    history.add_argument("--against", type=Path, metavar="FILE", help="exit with 1 if a ratio lost 10 %% since then")
    history.add_argument("--record", type=Path, metavar="FILE", help="append the record to this history")
    models = parsers["inference"]
    models.add_argument("--family", action="append", metavar="NAME", help="a model family; may be repeated")
    models.add_argument("--size", choices=("tiny", "public"), help="default: tiny and, with a GPU, public")
    models.add_argument("--device", choices=("cpu", "cuda"))
    simulators = parsers["envs"]
    simulators.add_argument("--env", action="append", metavar="NAME", help="a simulator; may be repeated")
    simulators.add_argument("settings", nargs="*", help="settings of `embodrl train`, for all simulators")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure what the command line names and return the exit code."""
    options = vars(parse(words))
    name, json = options.pop("name"), options.pop("json")
    try:
        if json is not None:
            check_json_file(json)
        return importlib.import_module(MODULES[name]).main(json, **options)
    except EmbodrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
