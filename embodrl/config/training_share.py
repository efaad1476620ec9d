"""``cluster.training_share: auto``: training's share of the work, measured by an earlier run with these settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from embodrl.config.nodes import Node, Origin, lookup
from embodrl.config.processes import AUTO, cache_path, machine
from embodrl.config.schema.cluster import ClusterConfig
from embodrl.deployment import read_machine
from embodrl.fields import MAX_JSON_BYTES, read_regular_file
from embodrl.version import __version__

KEY = "cluster.training_share"
# Increase when the measurement changes, which invalidates older results.
MEASUREMENT = 1
SECTIONS = ("actor", "algorithm", "cluster", "env", "model", "pipeline", "reward", "rollout")
"""Sections that determine how long training and rollouts take; of ``runner`` only the staleness does."""
IGNORED_KEYS = {
    "env": ("eval", "video", "start_timeout_s", "reset_timeout_s", "step_timeout_s", "max_restarts"),
    "cluster": ("training_share", "rebalance", "ray_address", "heartbeat_timeout_s", "stall_timeout_s"),
}
MODEL_FILES = ("model_path", "warm_start", "lora_path")


@dataclass(frozen=True)
class ShareChoice:
    """Number that stands for ``auto``.

    Attributes:
        training_share: measured share; the default until there is a measurement.
        measured: whether it was measured.
        settings: everything that the measurement depends on.
    """

    training_share: float
    measured: bool
    settings: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """File of the measurement."""
        return cache_path(self.settings, "training_share")

    @property
    def line(self) -> str:
        """Where the number comes from, in words."""
        if self.measured:
            return f"{KEY}: auto is {self.training_share:g}, as measured in {self.path}; delete it to measure again"
        missing = f"{KEY}: auto has not been measured for these settings; using {self.training_share:g}"
        return f"{missing}, and the first two iterations of `embodrl train` measure it"

    def with_processes(self, number: int) -> ShareChoice:
        """Return the choice for another number of simulator processes."""
        sections: Mapping[str, Any] = self.settings["settings"]
        env = {**sections["env"], "num_processes": number}
        return choice_of({**self.settings, "settings": {**sections, "env": env}})


def fill_training_share(tree: Node) -> ShareChoice | None:
    """Replace ``auto`` by a number; return the choice, or None if the user gave a number.

    Comes after all others that fill in values, on which the measurement depends.
    """
    node = lookup(tree, KEY)
    if node is None or node.value != AUTO:
        return None
    sections = {name: _section(tree, name) for name in SECTIONS}
    staleness = lookup(tree, "runner.max_staleness")
    model = sections["model"]
    settings = {
        "machine": {**machine(), "gpus": [gpu.name for gpu in read_machine().topology.gpus]},
        "version": __version__,
        "measurement": MEASUREMENT,
        "settings": sections,
        "max_staleness": None if staleness is None else staleness.plain(),
        "files": {name: _files(model[name]) for name in MODEL_FILES if isinstance(model.get(name), str)},
    }
    choice = choice_of(settings)
    node.value = choice.training_share
    node.origin = Origin(node.origin.kind, f"{node.origin.source} ({KEY}=auto)", node.origin.line)
    return choice


def choice_of(settings: Mapping[str, Any]) -> ShareChoice:
    """Return the measured share for settings, else the default."""
    unmeasured = ShareChoice(ClusterConfig().training_share, False, settings)
    share = read_share(unmeasured.path, settings)
    return unmeasured if share is None else ShareChoice(share, True, settings)


def read_share(path: Path, settings: Mapping[str, object]) -> float | None:
    """Return the share measured with these settings; None if there is no valid measurement."""
    try:
        content: Any = json.loads(read_regular_file(path, MAX_JSON_BYTES))
        share = content["training_share"]
        known = content["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = known == json.loads(json.dumps(settings, default=str))
    return share if same and type(share) is float and 0 < share < 1 else None


def _section(tree: Node, name: str) -> dict[str, Any]:
    node = lookup(tree, name)
    plain: object = node.plain() if node is not None else {}
    section = cast(dict[str, Any], plain) if isinstance(plain, dict) else {}
    return {key: value for key, value in section.items() if key not in IGNORED_KEYS.get(name, ())}


def _files(text: str) -> list[list[object]]:
    """Return name and size of a path's files, since another model may have been put there."""
    path = Path(text).expanduser().absolute()
    if not path.is_dir():
        return [[str(path), path.stat().st_size]] if path.is_file() else []
    return [[str(found), found.stat().st_size] for found in sorted(path.iterdir()) if found.is_file()]
