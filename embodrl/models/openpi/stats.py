"""State and action statistics in the layouts of openpi, RLinf and lerobot.

openpi keeps them in assets/ID/norm_stats.json, RLinf in ID/norm_stats.json. lerobot keeps tensors like
``observation.state.mean`` and ``action.q01`` in a safetensors file; policy_preprocessor.json names the file and the
normalisation method.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.errors import CheckpointError, PolicyFileError, StatisticsMissingError
from embodrl.fields import Fields
from embodrl.models.common.checkpoint import check_link, write_json
from embodrl.models.common.config_file import fields_of, read_file
from embodrl.models.common.norm_stats import (
    COMPUTE,
    MeanStd,
    Quantiles,
    StatsSets,
    choose_key,
    note_still,
    read_range,
    read_values,
)
from embodrl.models.openpi.config import Method, Normalization, method
from embodrl.storage.files import write_safetensors
from embodrl.storage.tensor_files import load_arrays

Scaling = MeanStd | Quantiles

ASSETS = "assets"
STATS_FILE = "norm_stats.json"
LEROBOT_FILE = "policy_preprocessor.json"
LEROBOT_AFTER_FILE = "policy_postprocessor.json"
LEROBOT_KEY = "lerobot"
_FIELDS: dict[Method, tuple[str, ...]] = {"mean_std": ("mean", "std"), "quantiles": ("q01", "q99"), "identity": ()}
_LEROBOT_NAMES = {"state": "observation.state", "actions": "action"}
_RELATIVE_STEPS = frozenset({"relative_actions_processor", "absolute_actions_processor"})
_KNOWN_STEPS = _RELATIVE_STEPS | {
    "rename_observations_processor",
    "to_batch_processor",
    "device_processor",
    "normalizer_processor",
    "unnormalizer_processor",
    "tokenizer_processor",
    "action_tokenizer_processor",
    "pi0_new_line_processor",
    "smolvla_new_line_processor",
    "pi05_prepare_state_tokenizer_processor_step",
    "pi0_fast_prepare_state_tokenizer_processor_step",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PiStats:
    """Statistics of one dataset; without ``state`` states stay unchanged, ``raw`` is its set in norm_stats.json."""

    key: str
    actions: Scaling
    state: Scaling | None
    raw: Mapping[str, object]


def read_openpi(directory: Path) -> dict[str, Fields]:
    """Return the sets of statistics in a directory by name; may be empty.

    A set is named by its folder, below ``assets`` (openpi) or any other (RLinf).

    Raises:
        PolicyFileError: a file has no statistics, links elsewhere, or differs from another of the same name.
    """
    sets: dict[str, Fields] = {}
    for path in sorted(directory.rglob(STATS_FILE)):
        check_link(path, directory)
        content = read_file(path)
        folder = path.parent.relative_to(directory)
        name = (folder.relative_to(ASSETS) if folder.parts[:1] == (ASSETS,) else folder).as_posix()
        found = content.fields("norm_stats") if "norm_stats" in content else content
        if name in sets and sets[name].content != found.content:
            found.refuse(f"differs from {sets[name].source}, of the same dataset")
        sets[name] = found
    return sets


def lerobot_steps(directory: Path, name: str = LEROBOT_FILE) -> list[Fields]:
    """Return the steps of lerobot's preprocessor file, or of another file; none without the file."""
    path = directory / name
    content = read_file(path) if path.is_file() else fields_of({}, str(path))
    return content.objects("steps") if "steps" in content else []


def read_lerobot(directory: Path) -> tuple[dict[str, Fields], Normalization | None]:
    """Return lerobot's single set of statistics and its normalisation methods; None without the file.

    Raises:
        CheckpointError: a file is corrupt, names an unsupported method, or scales actions back differently than in
            training.
    """
    before = lerobot_steps(directory)
    after = lerobot_steps(directory, LEROBOT_AFTER_FILE)
    _check_steps(directory, [*before, *after])
    found = _normalizer(directory, before, "normalizer_processor")
    if found is None:
        return {}, None
    sets, methods = found
    back = _normalizer(directory, after, "unnormalizer_processor")
    if back is not None:
        _check_inverse(directory, found, back)
    return sets, methods


def _check_steps(directory: Path, steps: Sequence[Fields]) -> None:
    for step in steps:
        if step.text("registry_name", "") in _RELATIVE_STEPS and step.fields("config", {}).flag("enabled", False):
            raise CheckpointError(
                f"{step.source}: lerobot's actions relative to the state ({step.text('registry_name')}) are not"
                " supported",
                "use a checkpoint trained on absolute actions",
                code="checkpoint-unsupported",
            )
    names = [step.text("registry_name", "") or step.text("class", "without a name") for step in steps]
    unknown = sorted(set(names) - _KNOWN_STEPS)
    if unknown:
        logger.warning(
            "%s: lerobot's processors have the steps %s, which are ignored: if one of them changes images,"
            " states or actions, the policy acts differently than in lerobot",
            directory,
            ", ".join(unknown),
        )


def _check_inverse(
    directory: Path, found: tuple[dict[str, Fields], Normalization], back: tuple[dict[str, Fields], Normalization]
) -> None:
    """Check that both files agree: lerobot trains with the first file's statistics and acts with the second's."""
    entries = [sets[LEROBOT_KEY].fields("actions", {}) for sets, _ in (found, back) if sets]
    names = _FIELDS[found[1].actions] if len(entries) == 2 else ()
    values = [[entry.numbers(name) for name in names if name in entry] for entry in entries]
    if found[1].actions != back[1].actions or (names and values[0] != values[1]):
        raise PolicyFileError(
            f"{directory}: {LEROBOT_AFTER_FILE} scales actions back differently than {LEROBOT_FILE} scales them",
            "write both files from the same dataset",
        )


def _normalizer(directory: Path, steps: Sequence[Fields], name: str) -> tuple[dict[str, Fields], Normalization] | None:
    """Return the statistics and methods of the first step called ``name``; None without such a step."""
    steps = [step for step in steps if step.text("registry_name", "") == name]
    if not steps:
        return None
    settings = steps[0].fields("config")
    norm_map = fields_of(
        {"STATE": "IDENTITY", "ACTION": "IDENTITY", **settings.fields("norm_map").content}, steps[0].source
    )
    eps = settings.number("eps", 1e-8, low=0.0, high=1.0)
    methods = Normalization(method(norm_map, "STATE"), method(norm_map, "ACTION"), eps)
    if "state_file" not in steps[0]:
        return {}, methods
    name = steps[0].text("state_file")
    path = directory / name
    if Path(name).name != name:
        steps[0].refuse(f"'state_file' is '{name}', not a file name")
    try:
        tensors = load_arrays(path)
    except OSError as error:
        raise PolicyFileError(f"{path} can't be read: {error.strerror or error}", "fetch it again") from error
    entry: dict[str, object] = {}
    for part, prefix in _LEROBOT_NAMES.items():
        found = {f: tensors[f"{prefix}.{f}"] for f in ("mean", "std", "q01", "q99") if f"{prefix}.{f}" in tensors}
        if found:
            entry[part] = {name: values.tolist() for name, values in found.items()}
    return {LEROBOT_KEY: fields_of(entry, str(path))}, methods


def choose(sets: StatsSets, key: str | None, methods: Normalization, action_dim: int, source: str) -> PiStats:
    """Return the statistics of a key with the normalisation ``methods``; see ``norm_stats.choose_key``.

    Raises:
        CheckpointError: no such key, several and none chosen, missing entries, or an invalid value.
    """
    if not sets and key is None and methods.actions != "identity":
        raise StatisticsMissingError(
            f"{source} has no action statistics: no {STATS_FILE} in any folder, and no state_file in {LEROBOT_FILE}",
            f"put the statistics of your dataset in {ASSETS}/ID/{STATS_FILE}, or {COMPUTE}",
        )
    key = choose_key(sets, key, source) if sets or key is not None else LEROBOT_KEY
    entry = sets.get(key, fields_of({}, source))
    if methods.actions == "identity":
        actions: Scaling | None = MeanStd(np.zeros(action_dim), np.ones(action_dim), 0.0)
    else:
        actions = _scaling(entry, "actions", methods.actions, methods.eps)
    where = f"{source}: statistics '{key}'"
    if actions is None:
        raise CheckpointError(f"{where} have no actions", "choose others with model.unnorm_key", code="statistics-size")
    state = _scaling(entry, "state", methods.state, methods.eps)
    actions = cut(actions, action_dim, f"{where}, actions", "model.action_dim")
    note_still(actions.constant, where)
    return PiStats(key, actions, state, entry.content)


def identity_set(action_dim: int) -> dict[str, object]:
    """Return statistics (norm_stats.json layout) of actions that fill [-1, 1] with deviation 1."""
    ones = [1.0] * action_dim
    lows = [-1.0] * action_dim
    return {"actions": {"mean": [0.0] * action_dim, "std": ones, "q01": lows, "q99": ones}}


def cut(scaling: Scaling, dims: int, where: str, setting: str) -> Scaling:
    """Return the statistics of the first ``dims`` dimensions; the rest must be padding without range.

    Raises ``CheckpointError`` if there are fewer dimensions, or the padding varies.
    """
    low, high = _ends(scaling)
    if len(low) < dims or bool(np.any(high[dims:] != low[dims:])):
        raise CheckpointError(
            f"{where} have {len(low)} dimensions, not {dims}",
            f"set {setting} to {len(low)}, choose other statistics, or {COMPUTE}",
            code="statistics-size",
        )
    if isinstance(scaling, MeanStd):
        return MeanStd(scaling.mean[:dims], scaling.std[:dims], scaling.eps)
    return Quantiles(scaling.q01[:dims], scaling.q99[:dims], scaling.eps)


def _ends(scaling: Scaling) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if isinstance(scaling, MeanStd):
        return np.zeros_like(scaling.std), scaling.std
    return scaling.q01, scaling.q99


def _scaling(entry: Fields, part: str, method: Method, eps: float) -> Scaling | None:
    if entry.content.get(part) is None or method == "identity":
        return None
    stats = entry.fields(part)
    lacking = [name for name in _FIELDS[method] if stats.content.get(name) is None]
    if lacking:
        has = ", ".join(sorted(stats.content)[:8]) or "nothing"
        stats.refuse(f"no {' and no '.join(lacking)}: compute them from the dataset; it has {has}")
    if method == "quantiles":
        return Quantiles(*read_range(stats, "q01", "q99"), eps)
    mean = read_values(stats, "mean")
    std = read_values(stats, "std", low=0.0)
    if len(mean) != len(std):
        stats.refuse(f"'mean' has {len(mean)} entries, 'std' {len(std)}")
    return MeanStd(mean, std, eps)


def write_pipeline(directory: Path, name: str, steps: Sequence[tuple[str, dict[str, object]]], stats: PiStats) -> None:
    """Write a file of lerobot's processor ``steps`` (registered name and settings), and the statistics they use."""
    stem = name.removesuffix(".json")
    written: list[dict[str, object]] = []
    for index, (registry_name, settings) in enumerate(steps):
        step: dict[str, object] = {"registry_name": registry_name, "config": settings}
        if "norm_map" in settings:
            step["state_file"] = f"{stem}_step_{index}_{registry_name}.safetensors"
            write_safetensors(directory / str(step["state_file"]), _tensors(stats))
        written.append(step)
    write_json(directory / name, {"name": stem, "steps": written})


def _tensors(stats: PiStats) -> dict[str, Tensor]:
    raw = fields_of(stats.raw, stats.key)
    return {
        f"{prefix}.{field}": torch.tensor(values, dtype=torch.float32)
        for part, prefix in _LEROBOT_NAMES.items()
        if part in raw
        for field, values in raw.fields(part).content.items()
    }
