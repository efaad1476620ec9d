"""Dataset statistics: normalisation from environment units to model units, and back.

``ActionStats`` follows OpenVLA (a mask, and clipping to [-1, 1]); ``MeanStd`` and ``Quantiles`` follow openpi, for
actions and states alike.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embodrl.config.schema import ModelConfig
from embodrl.data.statistics import RobotStatistics, read_statistics
from embodrl.errors import CheckpointError, StatisticsMissingError
from embodrl.fields import Fields
from embodrl.models.common.config_file import fields_of
from embodrl.names import nearest

logger = logging.getLogger(__name__)

COMPUTE = "compute them: `embodrl sft sft.stats=data`, or `embodrl data stats` and model.stats_path"
ROUNDING = 1e-6
"""Relative rounding error of numbers that passed through float32."""
SMALLEST_MOVE = 1e-6
"""Absolute, in environment units (metres, radians, or normalised to about 1): a micrometre or microradian is below the

resolution of robot encoders. Smaller movements are noise, and around 0 no noise is small relative to the values:
normalised by a range of 1e-9, a later movement of a thousandth would become a million.
"""
MAX_STATISTIC = 1e6
"""Environment units are metres, radians, or at most encoder ticks; larger values mean a damaged file."""

StatsSets = Mapping[str, Fields]
"""Statistics by dataset or robot, as in a checkpoint's files."""


def stats_sets(fields: Fields) -> dict[str, Fields]:
    """Return the sets of statistics in an object that contains only those."""
    return {name: fields.fields(name) for name in fields}


def stats_content(sets: StatsSets) -> dict[str, object]:
    """Return the object that ``stats_sets`` reads."""
    return {name: stats.content for name, stats in sets.items()}


def read_values(fields: Fields, name: str, low: float = -MAX_STATISTIC) -> NDArray[np.float64]:
    """Return ``float64[A]``, one finite number per dimension between ``low`` and ``MAX_STATISTIC``."""
    return np.asarray(fields.numbers(name, low=low, high=MAX_STATISTIC), dtype=np.float64)


def read_range(fields: Fields, low: str, high: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the low and high ends ``float64[A]`` of each dimension's range; a reversed range is refused."""
    lower = read_values(fields, low)
    upper = read_values(fields, high)
    if len(lower) != len(upper):
        fields.refuse(f"'{low}' has {len(lower)} entries, '{high}' {len(upper)}")
    if reversed_ := np.flatnonzero(lower > upper).tolist():
        fields.refuse(f"'{low}[{reversed_[0]}]' is above '{high}[{reversed_[0]}]'")
    return lower, upper


def read_mask(fields: Fields, length: int) -> NDArray[np.bool_]:
    """Return ``mask bool[A]``, the normalised dimensions; by default all."""
    values = fields.items("mask", length) if "mask" in fields else [True] * length
    for index, value in enumerate(values):
        if value not in (0, 1):
            fields.refuse(f"'mask[{index}]' is not true or false")
    return np.asarray(values, dtype=np.bool_)


def is_constant(spread: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the dimensions whose spread is only noise, or rounding of values from ``low`` to ``high``.

    Such a dimension is normalised by 1: divided by its spread, a later movement of a thousandth would become thousands.
    Unnormalised it always has its one value, whatever the model outputs (as in the references, up to their epsilons): a
    joint that never moved in training holds still.
    """
    return spread <= np.maximum(SMALLEST_MOVE, ROUNDING * np.maximum(np.abs(low), np.abs(high)))


def unsaid(values: NDArray[np.floating], constant: NDArray[np.bool_], said: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which of ``values [...,A]`` are in a constant dimension and differ from its value ``said [A]``."""
    return constant & (np.abs(np.asarray(values, np.float64) - said) > ROUNDING * (1.0 + np.abs(said)))


def note_still(constant: NDArray[np.bool_], where: str) -> None:
    """Log the action dimensions ``constant bool[A]`` that a policy holds still; ``where`` names the statistics."""
    if constant.any():
        still = np.flatnonzero(constant).tolist()
        logger.info("%s: action dimensions %s are constant: the policy holds them still", where, still)


@dataclass(frozen=True)
class ActionStats:
    """Quantiles of each action dimension.

    Attributes:
        key: dataset name.
        q01, q99: ``float64[A]``, in environment units.
        mask: ``bool[A]``; False leaves a dimension unchanged (normally the gripper).
    """

    key: str
    q01: NDArray[np.float64]
    q99: NDArray[np.float64]
    mask: NDArray[np.bool_]

    @property
    def action_dim(self) -> int:
        """A."""
        return len(self.q01)

    def unnormalize(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``0.5 (a + 1) (q99 - q01) + q01`` where ``mask``, else ``a``; shape ``[...,A]``."""
        return np.where(self.mask, 0.5 * (actions + 1.0) * (self.q99 - self.q01) + self.q01, actions)

    def normalize(self, actions: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the inverse of ``unnormalize``, clipped to [-1, 1]; a dimension without range gives 0; ``[...,A]``."""
        return np.clip(self._scaled(actions), -1.0, 1.0)

    def outside(self, actions: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return the values ``[...,A]`` that ``normalize`` clips, or that differ from a dimension's constant value."""
        differs = unsaid(actions, self.constant, self.q01)
        return np.where(self.constant, differs, np.abs(self._scaled(actions)) > 1.0 + ROUNDING)

    def _scaled(self, actions: NDArray[np.floating]) -> NDArray[np.float64]:
        values = np.asarray(actions, dtype=np.float64)
        span = np.where(self.constant, 1.0, self.q99 - self.q01)
        scaled = 2.0 * (values - self.q01) / span - 1.0
        return np.where(self.mask, np.where(self.constant, 0.0, scaled), values)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Normalised dimensions without a range, ``bool[A]``."""
        return self.mask & is_constant(self.q99 - self.q01, self.q01, self.q99)


def identity_stats(action_dim: int) -> dict[str, dict[str, object]]:
    """Return statistics (config.json layout) that leave actions in [-1, 1] unchanged."""
    return {"action": {"q01": [-1.0] * action_dim, "q99": [1.0] * action_dim, "mask": [True] * action_dim}}


@dataclass(frozen=True)
class MeanStd:
    """Normalisation to mean 0 and standard deviation 1; ``float64[A]`` in environment units.

    ``eps`` is added to ``std``.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    eps: float = 1e-6

    def normalize(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return ``(values - mean) / (std + eps)``, in a constant dimension ``values - mean``; shape ``[...,A]``."""
        return (np.asarray(values, dtype=np.float64) - self.mean) / self._scale

    def scale(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return ``normalize(values)``, but infinite where ``unnormalize`` can't restore the value; ``[...,A]``."""
        return np.where(unsaid(values, self.constant, self.mean), np.inf, self.normalize(values))

    def unnormalize(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the inverse, ``values * (std + eps) + mean``, in a constant dimension ``mean``; shape ``[...,A]``."""
        return np.where(self.constant, self.mean, values * self._scale + self.mean)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Dimensions without deviation, ``bool[A]``."""
        return is_constant(self.std, self.mean, self.mean)

    @property
    def _scale(self) -> NDArray[np.float64]:
        return np.where(self.constant, 1.0, self.std + self.eps)


@dataclass(frozen=True)
class Quantiles:
    """Normalisation of a quantile range to [-1, 1], without clipping; ``float64[A]`` in environment units.

    ``eps`` is added to the range.
    """

    q01: NDArray[np.float64]
    q99: NDArray[np.float64]
    eps: float = 1e-6

    def normalize(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return ``2 (values - q01) / (q99 - q01 + eps) - 1``, with range 1 for a constant dimension; ``[...,A]``."""
        return (np.asarray(values, dtype=np.float64) - self.q01) / self._span * 2.0 - 1.0

    def scale(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return ``normalize(values)``, but infinite where ``unnormalize`` can't restore the value; ``[...,A]``."""
        return np.where(unsaid(values, self.constant, self.q01), np.inf, self.normalize(values))

    def unnormalize(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the inverse, ``(values + 1) (q99 - q01 + eps) / 2 + q01``; ``q01`` if constant; ``[...,A]``."""
        return np.where(self.constant, self.q01, (values + 1.0) / 2.0 * self._span + self.q01)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Dimensions without a range, ``bool[A]``."""
        return is_constant(self.q99 - self.q01, self.q01, self.q99)

    @property
    def _span(self) -> NDArray[np.float64]:
        return np.where(self.constant, 1.0, self.q99 - self.q01 + self.eps)


def choose_key(keys: Collection[str], key: str | None, source: str, kind: str = "action statistics") -> str:
    """Return the key of the statistics to use.

    Args:
        keys: available sets.
        key: requested key; ``key + "_no_noops"`` is tried second; None takes the only one.
        source: file or checkpoint to name in errors.
        kind: what the keys stand for, for errors.

    Raises:
        CheckpointError: no such key, or several and none chosen.
    """
    listed = ", ".join(sorted(keys)) or "none"
    if key is None:
        if not keys:
            raise StatisticsMissingError(f"{source} has no {kind}", COMPUTE)
        if len(keys) > 1:
            raise CheckpointError(
                f"{source} has {len(keys)} sets of {kind} ({listed})",
                f"choose one with model.unnorm_key, or {COMPUTE}",
                code="statistics-choice",
            )
        return next(iter(keys))
    if key not in keys and f"{key}_no_noops" in keys:
        return f"{key}_no_noops"
    if key not in keys:
        near = nearest(key, list(keys))
        raise StatisticsMissingError(
            f"{source} has no {kind} '{key}'; it has: {listed}",
            f"set model.unnorm_key={near}" if near else f"set model.unnorm_key to one of these, or {COMPUTE}",
        )
    return key


def choose_stats(sets: StatsSets, key: str | None, action_dim: int, source: str) -> ActionStats:
    """Return the action statistics of a key; see ``choose_key``.

    Raises:
        CheckpointError: see ``choose_key``; or another number of dimensions, or an invalid value.
    """
    key = choose_key(sets, key, source)
    action = sets[key].fields("action")
    q01, q99 = read_range(action, "q01", "q99")
    if len(q01) != action_dim:
        raise CheckpointError(
            f"{source}: action statistics '{key}' have {len(q01)} dimensions, not {action_dim}",
            f"set model.action_dim={len(q01)}, choose other statistics, or {COMPUTE}",
            code="statistics-size",
        )
    stats = ActionStats(key, q01, q99, read_mask(action, action_dim))
    note_still(stats.constant, f"{source}: statistics '{key}'")
    return stats


def given_stats(config: ModelConfig) -> RobotStatistics | None:
    """Return the statistics of ``model.stats_path``; None if unset.

    Raises:
        FileDamagedError: the file is invalid.
        CheckpointError: they were computed with another gripper convention.
    """
    if config.stats_path is None:
        return None
    given = read_statistics(Path(config.stats_path).expanduser())
    if given.gripper != config.gripper:
        raise CheckpointError(
            f"{given.source}: statistics of actions with model.gripper={given.gripper}, and it is {config.gripper}",
            f"set model.gripper={given.gripper}, or recompute them: sft.stats=data",
            code="statistics-gripper",
        )
    return given


_PARTS = {"openvla": ("action", "proprio"), "openpi": ("actions", "state"), "gr00t": ("action", "state")}
_KEPT = {"openvla": ("mean", "std", "min", "max", "q01", "q99"), "openpi": ("mean", "std", "q01", "q99")}


def given_sets(config: ModelConfig, layout: Literal["openvla", "openpi", "gr00t"], name: str = "") -> dict[str, Fields]:
    """Return the statistics of ``model.stats_path`` as a checkpoint's only set; empty if unset. See ``given_stats``.

    Args:
        config: section ``model``; ``unnorm_key`` names the set, by default the file's robot name.
        layout: ``openvla`` (dataset_statistics.json; with a gripper convention the mask excludes the last action
            dimension, as in the public files), ``openpi`` (norm_stats.json), or ``gr00t`` (metadata.json).
        name: overrides the file's robot name.
    """
    given = given_stats(config)
    if given is None:
        return {}
    kept = _KEPT.get(layout, _KEPT["openvla"])
    parts: dict[str, dict[str, object]] = {}
    for part, values in zip(_PARTS[layout], (given.action, given.state), strict=True):
        if values is not None:
            parts[part] = {field: values[field] for field in kept if field in values}
    entry: dict[str, object] = {**parts}
    if layout == "openvla":
        mask = [True] * (config.action_dim - 1) + [config.gripper == "as_is"]
        entry["action"] = parts["action"] | {"mask": mask}
        entry |= {"num_transitions": given.num_frames, "num_trajectories": given.num_episodes}
    elif layout == "gr00t":
        statistics: dict[str, object] = {part: {part: values} for part, values in parts.items()}
        entry = {"embodiment_tag": name, "modalities": {}, "statistics": {"state": {}, **statistics}}
    key = config.unnorm_key or name or given.name
    return {key: fields_of({key: entry}, given.source).fields(key)}
