"""``env.num_processes: auto``: the fastest number measured on this machine with these settings."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from embodrl.config.nodes import Node, Origin, lookup
from embodrl.config.schema import Config
from embodrl.fields import MAX_JSON_BYTES, read_regular_file
from embodrl.processor import processor
from embodrl.specs import ENVS
from embodrl.version import __version__

AUTO = "auto"
KEY = "env.num_processes"
MAX_CANDIDATES = 4
# Increase when the measurement changes, which invalidates older results.
MEASUREMENT = 2
# Settings of section env that do not affect the speed of a step.
IGNORED_KEYS = (
    *("num_processes", "train", "eval", "video", "start_timeout_s", "reset_timeout_s", "step_timeout_s"),
    *("max_restarts", "max_abs_reward", "max_abs_state"),
)
COUNT_KEYS = ("env.train.total_num_envs", "env.eval.total_num_envs", "algorithm.group_size", "rollout.pipeline_stages")


@dataclass(frozen=True)
class ProcessChoice:
    """Number that stands for ``auto``.

    Attributes:
        num_processes: chosen number of processes.
        measured: whether the number was measured; otherwise it is a fitting one until there is a measurement.
        candidates: numbers that fit the other settings, to be measured.
        path: file of the measurement.
    """

    num_processes: int
    measured: bool
    candidates: tuple[int, ...]
    path: Path


def fill_processes(tree: Node, schema: type[Config]) -> ProcessChoice | None:
    """Replace ``auto`` by a number; return the choice, or None if the user gave a number or keys are invalid."""
    node = lookup(tree, KEY)
    if node is None or node.value != AUTO:
        return None
    defaults: dict[str, Any] = json.loads(schema().model_dump_json())
    counts = [value_or_default(tree, defaults, key) for key in COUNT_KEYS]
    if any(type(count) is not int or count < 1 for count in counts):
        node.value = 1  # the invalid keys are reported, not their consequences
        return None
    env_type = value_or_default(tree, defaults, "env.env_type")
    batched_by = ENVS.entry(env_type).batched_by if env_type in ENVS else None
    one_process = batched_by is not None and value_or_default(tree, defaults, f"env.{batched_by[0]}") == batched_by[1]
    found = candidates(*counts, cores=len(os.sched_getaffinity(0)), most=1 if one_process else None)
    env = {name: value for name, value in _section(tree, "env").items() if name not in IGNORED_KEYS}
    settings = {"env": env, "counts": counts, "chunk": value_or_default(tree, defaults, "model.num_action_chunks")}
    path = cache_path({"machine": machine(), "version": __version__, "measurement": MEASUREMENT, "settings": settings})
    measured = read_choice(path)
    number = measured if measured in found else min(found, key=lambda n: abs(n - len(os.sched_getaffinity(0))))
    choice = ProcessChoice(number, measured in found or len(found) == 1, found, path)
    node.value = number
    node.origin = Origin(node.origin.kind, f"{node.origin.source} ({KEY}=auto)", node.origin.line)
    return choice


def candidates(
    train_envs: int, eval_envs: int, group_size: int, stages: int, *, cores: int, most: int | None = None
) -> tuple[int, ...]:
    """Return the process counts that fit the other settings and are nearest to ``cores``, in ascending order.

    Args:
        train_envs: training environments, spread evenly.
        eval_envs: evaluation environments, spread evenly.
        group_size: environments of a group, which share a process.
        stages: pipeline stages, each of whole processes.
        cores: available cores; at most twice as many processes are tried.
        most: upper limit of processes.
    """
    limit = min(2 * cores, most or 2 * cores)
    shared = math.gcd(train_envs, eval_envs)
    fitting = [
        n
        for n in range(1, min(shared, limit) + 1)
        if shared % n == 0 and (train_envs // n) % group_size == 0 and n % stages == 0
    ]
    nearest = sorted(fitting, key=lambda n: abs(math.log(n / cores)))[:MAX_CANDIDATES]
    return tuple(sorted(nearest)) or (stages,)  # where nothing fits, the rules report why


def machine() -> dict[str, object]:
    """Return the properties of this machine that determine its simulation speed."""
    return {"host": platform.node(), "processor": processor().name, "cores": len(os.sched_getaffinity(0))}


def cache_path(settings: Mapping[str, object], kind: str = "processes") -> Path:
    """Return the file of the measurement of a kind for these settings, below the user's cache directory."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "embodrl" / kind / f"{digest[:32]}.json"


def read_choice(path: Path) -> int | None:
    """Return the measured number; None if there is no valid measurement."""
    try:
        content: Any = json.loads(read_regular_file(path, MAX_JSON_BYTES))
        number = content["num_processes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if type(number) is int and number > 0 else None


def _section(tree: Node, key: str) -> dict[str, object]:
    node = lookup(tree, key)
    plain: object = node.plain() if node is not None else {}
    return cast(dict[str, object], plain) if isinstance(plain, dict) else {}


def value_or_default(tree: Node, defaults: dict[str, Any], key: str) -> Any:
    """Return the value of a key, or the schema's default."""
    node = lookup(tree, key)
    if node is not None:
        return node.plain()
    value: Any = defaults
    for part in key.split("."):
        value = value[part]
    return value
