"""Normalisation of states and actions in openpi's layout (assets/ID/norm_stats.json) and in lerobot's.

lerobot keeps statistics in a safetensors file that policy_preprocessor.json names, as tensors like
``observation.state.mean`` and ``action.q01``, and says there how to use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from embodrl.errors import CheckpointError
from embodrl.models.common.checkpoint import read_json
from embodrl.models.common.norm_stats import MeanStd, Quantiles, choose_key
from embodrl.models.pi.config import Method, Normalization

Scaling = MeanStd | Quantiles

ASSETS = "assets"
STATS_FILE = "norm_stats.json"
LEROBOT_FILE = "policy_preprocessor.json"
LEROBOT_KEY = "lerobot"
_FIELDS: dict[Method, tuple[str, ...]] = {"mean_std": ("mean", "std"), "quantiles": ("q01", "q99"), "identity": ()}
_LEROBOT_METHODS: dict[str, Method] = {"MEAN_STD": "mean_std", "QUANTILES": "quantiles", "IDENTITY": "identity"}
_LEROBOT_NAMES = {"state": "observation.state", "actions": "action"}


@dataclass(frozen=True)
class PiStats:
    """Statistics of one data set.

    Attributes:
        key: its name.
        actions: of the A action dimensions.
        state: of the robot's state; None leaves states as they are.
        raw: the set as in norm_stats.json.
    """

    key: str
    actions: Scaling
    state: Scaling | None
    raw: dict[str, Any]


def read_openpi(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the sets of statistics in a directory, by name; without any, nothing.

    Raises:
        CheckpointError: a file is no statistics.
    """
    root = directory / ASSETS
    sets: dict[str, dict[str, Any]] = {}
    for path in sorted(root.rglob(STATS_FILE)):
        content = read_json(path)
        sets[path.parent.relative_to(root).as_posix()] = content.get("norm_stats", content)
    return sets


def read_lerobot(directory: Path) -> tuple[dict[str, dict[str, Any]], Normalization | None]:
    """Return lerobot's statistics, as the one set that there is, and how they are used; None without the file.

    Raises:
        CheckpointError: a file is corrupt or names a method that is not supported.
    """
    path = directory / LEROBOT_FILE
    if not path.is_file():
        return {}, None
    steps = [step for step in read_json(path).get("steps", []) if step.get("registry_name") == "normalizer_processor"]
    if not steps:
        return {}, None
    step = steps[0]
    modes = {part: step["config"]["norm_map"].get(part, "IDENTITY") for part in ("STATE", "ACTION")}
    unknown = [mode for mode in modes.values() if mode not in _LEROBOT_METHODS]
    if unknown:
        raise CheckpointError(
            f"{path}: normalisation {unknown[0]} is not supported; known: {', '.join(_LEROBOT_METHODS)}",
            "use a checkpoint with one of these",
        )
    methods = Normalization(
        _LEROBOT_METHODS[modes["STATE"]], _LEROBOT_METHODS[modes["ACTION"]], step["config"].get("eps", 1e-8)
    )
    if "state_file" not in step:
        return {}, methods
    try:
        tensors = load_file(directory / step["state_file"])
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory / step['state_file']} can't be read: {error}", "fetch it again") from error
    entry: dict[str, Any] = {}
    for part, name in _LEROBOT_NAMES.items():
        fields = {f: tensors[f"{name}.{f}"].tolist() for f in ("mean", "std", "q01", "q99") if f"{name}.{f}" in tensors}
        if fields:
            entry[part] = fields
    return {LEROBOT_KEY: entry}, methods


def choose(
    sets: Mapping[str, dict[str, Any]], key: str | None, methods: Normalization, action_dim: int, source: str
) -> PiStats:
    """Return the statistics of that key.

    Args:
        sets: by name.
        key: which; None takes the only one.
        methods: how they are used.
        action_dim: A, to check against.
        source: named in errors.

    Raises:
        CheckpointError: no such key, several and none chosen, or they lack what is needed.
    """
    if not sets and key is None and methods.actions != "identity":
        raise CheckpointError(
            f"{source} has no action statistics: no {ASSETS}/ID/{STATS_FILE}, and no state_file in {LEROBOT_FILE}",
            f"put the statistics of your data set in {ASSETS}/ID/{STATS_FILE}",
        )
    key = choose_key(sets, key, source) if sets or key is not None else LEROBOT_KEY
    entry = sets.get(key, {})
    where = f"{source}: statistics '{key}'"
    if methods.actions == "identity":
        actions: Scaling | None = _identity(action_dim)
    else:
        actions = _scaling(entry.get("actions"), methods.actions, methods.eps, f"{where}, actions")
    if actions is None:
        raise CheckpointError(f"{where} have no actions", "choose others with model.unnorm_key")
    state = _scaling(entry.get("state"), methods.state, methods.eps, f"{where}, state")
    return PiStats(key, cut(actions, action_dim, f"{where}, actions", "model.action_dim"), state, dict(entry))


def identity_set(action_dim: int) -> dict[str, Any]:
    """Return statistics (norm_stats.json layout) of actions that fill [-1, 1] with deviation 1."""
    ones = [1.0] * action_dim
    lows = [-1.0] * action_dim
    return {"actions": {"mean": [0.0] * action_dim, "std": ones, "q01": lows, "q99": ones}}


def cut(scaling: Scaling, dims: int, where: str, setting: str) -> Scaling:
    """Return statistics of the first ``dims`` dimensions; those beyond must be padding, which has no range.

    Raises:
        CheckpointError: there are fewer, or those beyond vary.
    """
    low, high = _ends(scaling)
    if len(low) < dims or bool(np.any(high[dims:] != low[dims:])):
        raise CheckpointError(
            f"{where} have {len(low)} dimensions, not {dims}",
            f"set {setting} to {len(low)}, or choose other statistics",
        )
    if isinstance(scaling, MeanStd):
        return MeanStd(scaling.mean[:dims], scaling.std[:dims], scaling.eps)
    return Quantiles(scaling.q01[:dims], scaling.q99[:dims], scaling.eps)


def _ends(scaling: Scaling) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if isinstance(scaling, MeanStd):
        return np.zeros_like(scaling.std), scaling.std
    return scaling.q01, scaling.q99


def _identity(dims: int) -> MeanStd:
    return MeanStd(np.zeros(dims), np.ones(dims), 0.0)


def _scaling(entry: Mapping[str, Any] | None, method: Method, eps: float, where: str) -> Scaling | None:
    if entry is None or method == "identity":
        return None
    lacking = [name for name in _FIELDS[method] if entry.get(name) is None]
    if lacking:
        raise CheckpointError(f"{where}: no {' and no '.join(lacking)}", "compute them from the data set")
    first, second = (np.asarray(entry[name], dtype=np.float64) for name in _FIELDS[method])
    if first.ndim != 1 or first.shape != second.shape:
        raise CheckpointError(f"{where}: {' and '.join(_FIELDS[method])} differ in shape", "compute them again")
    return MeanStd(first, second, eps) if method == "mean_std" else Quantiles(first, second, eps)
