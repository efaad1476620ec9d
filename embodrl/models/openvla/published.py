"""Conventions of published OpenVLA and OpenVLA-OFT fine-tunes on LIBERO. Imports no torch.

Their datasets count the gripper from 0 (closed) to 1 (open) and were randomly cropped; LIBERO closes with a positive
number, so unconverted actions never open the gripper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from embodrl.config.policy_card import CARD_FILE, checkpoint_name, policy_directory
from embodrl.config.rules.base import Context, path_kind
from embodrl.config.schema import ModelConfig
from embodrl.errors import EmbodrlError
from embodrl.fields import Fields, read_fields
from embodrl.interface import LIBERO, ZERO_CLOSES, Interface
from embodrl.rule_set import Finding, RuleSet

PUBLISHED = RuleSet()


@PUBLISHED.note(
    "env.env_type",
    "model.model_type",
    "model.model_path",
    "model.warm_start",
    "model.unnorm_key",
    "model.center_crop",
)
def libero_checkpoint_was_cropped(context: Context) -> Iterator[Finding]:
    """Published LIBERO fine-tunes were trained with random crops, and are evaluated with a centre crop."""
    model = context.config.model
    directory = policy_directory(model)
    ours = directory is not None and (directory / CARD_FILE).exists()
    is_random = directory is None and model.model_path is None
    if context.resuming or ours or is_random or context.config.env.env_type != "libero":
        return
    of_libero = next(filter(_is_libero, checkpoint_names(model)), None)
    if of_libero is not None and not model.center_crop and not context.by_user("model.center_crop"):
        yield Finding(
            "model.center_crop",
            f"is false, and '{of_libero}' is of LIBERO, whose checkpoints were trained with random crops of 90 % of the"
            " area",
            "set model.center_crop=true, as in the published evaluations",
        )


def interface(context: Context) -> Interface | None:
    """Return the conventions of published OpenVLA checkpoints' datasets, by the name of the statistics.

    LIBERO's gripper is not stated if the statistics show another convention (positions below 0), or if the user sets
    ``model.gripper`` for a checkpoint whose statistics are not local.
    """
    model = context.config.model
    names = checkpoint_names(model)
    if any(map(_is_libero, names)):
        lowest = _lowest_gripper(model)
        is_other = context.by_user("model.gripper") if lowest is None else lowest < 0
        return replace(LIBERO, gripper=None if is_other else ZERO_CLOSES, state=None, cameras=None)
    if any(name.startswith("bridge") for name in names):
        return Interface(action="delta_pose", rotation="euler_xyz", frame="base", gripper=ZERO_CLOSES)
    return None


def _is_libero(name: str) -> bool:
    return "libero" in name.lower()


def checkpoint_names(model: ModelConfig) -> list[str]:
    """Return names that identify a checkpoint's data: its chosen or only statistics, or its own name."""
    directory = policy_directory(model)
    sets = [] if directory is None or model.unnorm_key is not None else list(_statistics(directory))
    name = checkpoint_name(model)
    return [model.unnorm_key] if model.unnorm_key is not None else sets if len(sets) == 1 else [name]


def _lowest_gripper(model: ModelConfig) -> float | None:
    """Return the lowest gripper position in the statistics to use; None if unknown."""
    directory = policy_directory(model)
    sets = {} if directory is None else _statistics(directory)
    names = list(sets) if model.unnorm_key is None else [model.unnorm_key, f"{model.unnorm_key}_no_noops"]
    chosen = next((sets[name] for name in names if name in sets), None)
    try:
        action = None if chosen is None else chosen.fields("action")
        return next((action.numbers(name)[-1] for name in ("min", "q01") if action and name in action), None)
    except (EmbodrlError, IndexError):
        return None  # reported when the checkpoint is loaded


def _statistics(directory: Path) -> dict[str, Fields]:
    """Return a checkpoint's statistics by dataset; empty for a damaged file, which loading reports."""
    sets: dict[str, Fields] = {}
    try:
        if path_kind(str(directory / "config.json")) == "file":
            stored = read_fields(directory / "config.json").fields("norm_stats", {})
            sets |= {name: stored.fields(name) for name in stored}
        if path_kind(str(directory / "dataset_statistics.json")) == "file":
            stored = read_fields(directory / "dataset_statistics.json")
            sets |= {name: stored.fields(name) for name in stored}
    except (EmbodrlError, OSError):
        return {}
    return sets
