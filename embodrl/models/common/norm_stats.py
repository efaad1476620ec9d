"""Statistics of a dataset: from environment units to what a model learns, and back.

``ActionStats`` is OpenVLA's (a mask, and clipping to [-1, 1]); ``MeanStd`` and ``Quantiles`` are openpi's, of actions
and states alike.
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
"""Relative; of numbers that went through float32."""
SMALLEST_MOVE = 1e-6
"""Absolute, in environment units (metres, radians, or what is normalised to about 1): a micrometre or a microradian is
less than robots' encoders resolve. What moves less is noise, and around 0 no noise is small relative to the values:
normalised by a range of 1e-9, a thousandth of movement later would be a million."""
MAX_STATISTIC = 1e6
"""Environment units are metres, radians, at most encoder ticks; beyond this a file is damaged."""

StatsSets = Mapping[str, Fields]
"""Statistics by dataset or robot, as a checkpoint's files have them."""


def stats_sets(fields: Fields) -> dict[str, Fields]:
    """Return the sets of statistics in an object that has nothing else."""
    return {name: fields.fields(name) for name in fields}


def stats_content(sets: StatsSets) -> dict[str, object]:
    """Return the object that ``stats_sets`` reads."""
    return {name: stats.content for name, stats in sets.items()}


def read_values(fields: Fields, name: str, low: float = -MAX_STATISTIC) -> NDArray[np.float64]:
    """Return one number per dimension, ``float64[A]``, each finite and from ``low`` to ``MAX_STATISTIC``."""
    return np.asarray(fields.numbers(name, low=low, high=MAX_STATISTIC), dtype=np.float64)


def read_range(fields: Fields, low: str, high: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ends of each dimension's range, ``float64[A]`` each; none may be reversed."""
    lower = read_values(fields, low)
    upper = read_values(fields, high)
    if len(lower) != len(upper):
        fields.refuse(f"'{low}' has {len(lower)} entries, '{high}' {len(upper)}")
    if reversed_ := np.flatnonzero(lower > upper).tolist():
        fields.refuse(f"'{low}[{reversed_[0]}]' is above '{high}[{reversed_[0]}]'")
    return lower, upper


def read_mask(fields: Fields, length: int) -> NDArray[np.bool_]:
    """Return ``mask``, ``bool[A]``: which dimensions are normalised; by default all."""
    values = fields.items("mask", length) if "mask" in fields else [True] * length
    for index, value in enumerate(values):
        if value not in (0, 1):
            fields.refuse(f"'mask[{index}]' is not true or false")
    return np.asarray(values, dtype=np.bool_)


def is_constant(spread: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return of which dimensions the spread is nothing but noise, or rounding of values from ``low`` to ``high``.

    Such a dimension is normalised by 1: by its spread, a thousandth of movement later would be thousands. Back from a
    model it has its one value, whatever the model says, as the references have it up to their epsilons: a joint that
    training never moved holds still.
    """
    return spread <= np.maximum(SMALLEST_MOVE, ROUNDING * np.maximum(np.abs(low), np.abs(high)))


def unsaid(values: NDArray[np.floating], constant: NDArray[np.bool_], said: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which of ``values [...,A]`` are in a constant dimension, and not what it always says (``said [A]``)."""
    return constant & (np.abs(np.asarray(values, np.float64) - said) > ROUNDING * (1.0 + np.abs(said)))


def note_still(constant: NDArray[np.bool_], where: str) -> None:
    """Say which action dimensions a policy holds still, by its statistics.

    Args:
        constant: ``bool[A]``, those that never moved in training.
        where: the statistics.
    """
    if constant.any():
        still = np.flatnonzero(constant).tolist()
        logger.info("%s: action dimensions %s are constant: the policy holds them still", where, still)


@dataclass(frozen=True)
class ActionStats:
    """Quantiles of each action dimension.

    Attributes:
        key: name of the dataset.
        q01, q99: ``float64[A]``, in environment units.
        mask: ``bool[A]``; False passes a dimension through (a gripper, as a rule).
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
        """Return which values ``normalize`` clips, or whose dimension has no range and another value; ``[...,A]``."""
        differs = unsaid(actions, self.constant, self.q01)
        return np.where(self.constant, differs, np.abs(self._scaled(actions)) > 1.0 + ROUNDING)

    def _scaled(self, actions: NDArray[np.floating]) -> NDArray[np.float64]:
        values = np.asarray(actions, dtype=np.float64)
        span = np.where(self.constant, 1.0, self.q99 - self.q01)
        scaled = 2.0 * (values - self.q01) / span - 1.0
        return np.where(self.mask, np.where(self.constant, 0.0, scaled), values)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """``bool[A]``, which dimensions are normalised and have no range."""
        return self.mask & is_constant(self.q99 - self.q01, self.q01, self.q99)


def identity_stats(action_dim: int) -> dict[str, dict[str, object]]:
    """Return statistics (config.json layout) that leave actions of [-1, 1] as they are."""
    return {"action": {"q01": [-1.0] * action_dim, "q99": [1.0] * action_dim, "mask": [True] * action_dim}}


@dataclass(frozen=True)
class MeanStd:
    """Normalisation to mean 0 and standard deviation 1.

    Attributes:
        mean, std: ``float64[A]``, in environment units.
        eps: added to ``std``.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    eps: float = 1e-6

    def normalize(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return ``(values - mean) / (std + eps)``, in a constant dimension ``values - mean``; shape ``[...,A]``."""
        return (np.asarray(values, dtype=np.float64) - self.mean) / self._scale

    def scale(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return what ``normalize`` does, infinite where ``unnormalize`` can't give the value back; ``[...,A]``."""
        return np.where(unsaid(values, self.constant, self.mean), np.inf, self.normalize(values))

    def unnormalize(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the inverse, ``values * (std + eps) + mean``, in a constant dimension ``mean``; shape ``[...,A]``."""
        return np.where(self.constant, self.mean, values * self._scale + self.mean)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """``bool[A]``, which dimensions have no deviation."""
        return is_constant(self.std, self.mean, self.mean)

    @property
    def _scale(self) -> NDArray[np.float64]:
        return np.where(self.constant, 1.0, self.std + self.eps)


@dataclass(frozen=True)
class Quantiles:
    """Normalisation of the range between two quantiles to [-1, 1], without clipping.

    Attributes:
        q01, q99: ``float64[A]``, in environment units.
        eps: added to the range.
    """

    q01: NDArray[np.float64]
    q99: NDArray[np.float64]
    eps: float = 1e-6

    def normalize(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return ``2 (values - q01) / (q99 - q01 + eps) - 1``, with 1 for the range of a constant; ``[...,A]``."""
        return (np.asarray(values, dtype=np.float64) - self.q01) / self._span * 2.0 - 1.0

    def scale(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return what ``normalize`` does, infinite where ``unnormalize`` can't give the value back; ``[...,A]``."""
        return np.where(unsaid(values, self.constant, self.q01), np.inf, self.normalize(values))

    def unnormalize(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the inverse, ``(values + 1) (q99 - q01 + eps) / 2 + q01``, of a constant ``q01``; ``[...,A]``."""
        return np.where(self.constant, self.q01, (values + 1.0) / 2.0 * self._span + self.q01)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """``bool[A]``, which dimensions have no range."""
        return is_constant(self.q99 - self.q01, self.q01, self.q99)

    @property
    def _span(self) -> NDArray[np.float64]:
        return np.where(self.constant, 1.0, self.q99 - self.q01 + self.eps)


def choose_key(keys: Collection[str], key: str | None, source: str, kind: str = "action statistics") -> str:
    """Return which of the sets of statistics to use.

    Args:
        keys: the sets that there are.
        key: which; ``key + "_no_noops"`` is tried second; None takes the only one.
        source: named in errors.
        kind: what the keys name.

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
    """Return the action statistics of that key; ``key + "_no_noops"`` is tried second, None takes the only one.

    Raises:
        CheckpointError: no such key, several keys and none chosen, another number of dimensions than ``action_dim``,
            or an invalid value.
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
    """Return the statistics of ``model.stats_path``; None without.

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
    """Return the statistics of ``model.stats_path`` as the one set of a checkpoint; nothing without.

    Args:
        config: section ``model``; ``unnorm_key`` names the set, which by default has the file's name for the robot.
        layout: ``openvla`` (dataset_statistics.json; with a gripper convention the last action dimension is not
            masked in, as in the public files), ``openpi`` (norm_stats.json), or ``gr00t`` (metadata.json).
        name: in place of the file's.

    Raises:
        CheckpointError, FileDamagedError: see ``given_stats``.
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
