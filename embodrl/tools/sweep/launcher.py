"""Settings of Hydra's launchers among the arguments of a sweep, for commands that come from other systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from embodrl.errors import UsageError
from embodrl.names import nearest

Value = TypeVar("Value")

KEY = "hydra/launcher"
PREFIX = "hydra.launcher."
LAUNCHERS = {
    "basic": "local",
    "joblib": "local",
    "submitit_local": "local",
    "submitit_slurm": "slurm",
    "slurm": "slurm",
    "ray": "ray",
}
"""Launcher -> backend of `embodrl sweep`."""
JOBS = ("array_parallelism", "n_jobs")
OPTIONS: dict[str, Callable[[str], str]] = {
    "timeout_min": lambda minutes: f"--time={minutes}",
    "mem_gb": lambda gigabytes: f"--mem={gigabytes}G",
    **{
        name: lambda value, name=name: f"--{name.replace('_', '-')}={value}"
        for name in ("account", "comment", "constraint", "cpus_per_task", "exclude", "gpus_per_node")
    },
    **{name: lambda value, name=name: f"--{name}={value}" for name in ("partition", "qos")},
}
"""Setting of submitit's launcher -> option of sbatch. A run is one process on one node at first."""


@dataclass(frozen=True)
class HydraLauncher:
    """What a sweep's arguments say about how its runs start.

    Attributes:
        overrides: the other arguments.
        backend: of the sweep; None where they don't say.
        jobs: runs at a time; None where they don't say.
        slurm: options of sbatch.
    """

    overrides: list[str]
    backend: str | None = None
    jobs: int | None = None
    slurm: tuple[str, ...] = ()


def read_launcher(arguments: Sequence[str]) -> HydraLauncher:
    """Take ``hydra/launcher=NAME`` and ``hydra.launcher.SETTING=VALUE`` out of the arguments of a sweep.

    Raises:
        UsageError: an unknown launcher or setting, no number of runs, or options of Slurm for another launcher.
    """
    overrides = [text for text in arguments if not text.lstrip("+").startswith((f"{KEY}=", PREFIX))]
    texts = [text.lstrip("+") for text in arguments if text not in overrides]
    if bare := [text for text in texts if not text.partition("=")[2]]:
        raise UsageError(f"{', '.join(bare)}: has no value", "write KEY=VALUE", code="sweep-launcher")
    given = dict(text.split("=", 1) for text in texts)
    backend = _known(given.pop(KEY), LAUNCHERS, KEY) if KEY in given else None
    jobs, options = None, []
    for key, value in given.items():
        name = key.removeprefix(PREFIX)
        if name in JOBS:
            jobs = _number(key, value)
        else:
            options.append(_known(name, OPTIONS, "hydra.launcher")(value.strip("'\"")))
    if options and backend != "slurm":
        raise UsageError(
            f"{', '.join(given)}: options of Slurm's jobs, but the runs are not jobs of Slurm",
            f"add {KEY}=submitit_slurm",
            code="sweep-launcher",
        )
    return HydraLauncher(overrides, backend, jobs, tuple(options))


def agreed(option: str, given: Value | None, said: Value | None, default: Value) -> Value:
    """Return the value of an option that is given, or that Hydra's launcher implies, or the default.

    Raises:
        UsageError: both are there and differ.
    """
    if given is not None and said is not None and given != said:
        message = f"{option} is {given}, but Hydra's launcher says {said}"
        raise UsageError(message, "leave one of them out", code="sweep-launcher")
    return next((value for value in (given, said) if value is not None), default)


def _known(name: str, known: dict[str, Value], key: str) -> Value:
    if name not in known:
        near = nearest(name, list(known))
        message = f"{key}: {name!r} is not known" + (f"; nearest: {near}" if near else "")
        raise UsageError(message, f"allowed: {', '.join(sorted(known))}", code="sweep-launcher")
    return known[name]


def _number(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{key}: {text!r} is not a number of runs", "give 1 or more", code="sweep-launcher")
    return int(text)
