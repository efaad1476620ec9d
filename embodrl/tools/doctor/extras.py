"""Checks of optional packages: installed, in a suitable version, and importable."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from embodrl.preflight.findings import MachineFinding

IMPORT_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Extra:
    """An extra of the package.

    Attributes:
        distribution: distribution whose version is compared with the extra's requirement.
        purpose: the only use of the extra.
    """

    name: str
    modules: tuple[str, ...]
    distribution: str
    purpose: str


EXTRAS = (
    Extra("datasets", ("pyarrow.parquet", "imageio_ffmpeg", "PIL.Image"), "pyarrow", "LeRobot datasets"),
    Extra("libero-demos", ("h5py",), "h5py", "`embodrl convert libero`"),
    Extra("ray", ("ray",), "ray", "cluster.launcher=ray"),
    Extra("vllm", ("vllm",), "vllm", "rollout=vllm"),
    Extra("megatron", ("megatron.core",), "megatron-core", "actor=megatron"),
    Extra("lora", ("peft",), "peft", "adapters in PEFT's layout"),
    Extra("serve", ("aiohttp", "msgpack", "zmq", "PIL.Image"), "aiohttp", "`embodrl serve` and model=remote"),
    Extra("store", ("fsspec", "pyarrow", "imageio_ffmpeg", "PIL.Image"), "fsspec", "`embodrl store`"),
    Extra("redis", ("redis",), "redis", "store.url=redis://HOST:PORT/DB/PREFIX"),
    Extra("mcp", ("mcp",), "mcp", "tools of MCP servers in a workflow"),
    Extra("driving", ("highway_env",), "highway-env", "env=gymnasium_racetrack"),
    Extra("spacemouse", ("pyspacemouse",), "pyspacemouse", "store.intervention=spacemouse"),
    Extra("wandb", ("wandb",), "wandb", "W&B"),
    Extra("mlflow", ("mlflow",), "mlflow", "MLflow"),
    Extra("swanlab", ("swanlab",), "swanlab", "SwanLab"),
)


def check_extras(extras: tuple[Extra, ...] = EXTRAS, timeout_s: float = IMPORT_TIMEOUT_S) -> list[MachineFinding]:
    """Check every extra; installed ones are imported in separate processes, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda extra: check_extra(extra, timeout_s), extras))


def check_extra(extra: Extra, timeout_s: float = IMPORT_TIMEOUT_S) -> MachineFinding:
    """Check one extra; its absence is not a problem."""
    name = f"extra {extra.name}"
    hint = f"pip install 'embodrl[{extra.name}]'"
    absent = [module for module in extra.modules if not _is_there(module)]
    if len(absent) == len(extra.modules):
        return MachineFinding(name, "ok", f"not installed; for {extra.purpose} only", hint)
    if absent:
        return MachineFinding(name, "warning", f"partially installed, without {', '.join(absent)}", hint)
    wanted = _unmet_version(extra)
    if wanted:
        return MachineFinding(name, "warning", wanted, hint)
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *extra.modules],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return MachineFinding(name, "warning", f"not imported within {timeout_s:g} s", hint)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"]
        return MachineFinding(name, "warning", f"can't be imported: {lines[-1]}", hint)
    return MachineFinding(name, "ok", f"{extra.distribution} {_version(extra.distribution) or 'of unknown version'}")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _unmet_version(extra: Extra) -> str:
    """Return the version required by the extra if another one is installed; "" if unknown."""
    try:
        from packaging.requirements import Requirement

        asked = [Requirement(text) for text in requires("embodrl") or ()]
    except (ImportError, PackageNotFoundError):
        return ""
    found = _version(extra.distribution)
    for requirement in asked:
        mine = requirement.marker is not None and requirement.marker.evaluate({"extra": extra.name})
        if not mine or requirement.name != extra.distribution or found is None:
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            return f"{extra.distribution} {found} is installed, {requirement.specifier} is needed"
    return ""
