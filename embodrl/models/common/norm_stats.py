"""Statistics of a data set: from environment units to what a model learns, and back.

``ActionStats`` is OpenVLA's (a mask, and clipping to [-1, 1]); ``MeanStd`` and ``Quantiles`` are openpi's, of actions
and states alike.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import CheckpointError
from embodrl.names import nearest


@dataclass(frozen=True)
class ActionStats:
    """Quantiles of each action dimension.

    Attributes:
        key: name of the data set.
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
        values = np.asarray(actions, dtype=np.float64)
        span = self.q99 - self.q01
        scaled = 2.0 * (values - self.q01) / np.where(span == 0.0, 1.0, span) - 1.0
        return np.clip(np.where(self.mask, np.where(span == 0.0, 0.0, scaled), values), -1.0, 1.0)


def identity_stats(action_dim: int) -> dict[str, Any]:
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
        """Return ``(values - mean) / (std + eps)``; shape ``[...,A]``."""
        return (np.asarray(values, dtype=np.float64) - self.mean) / (self.std + self.eps)

    def unnormalize(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``values * (std + eps) + mean``; shape ``[...,A]``."""
        return values * (self.std + self.eps) + self.mean


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
        """Return ``2 (values - q01) / (q99 - q01 + eps) - 1``; shape ``[...,A]``."""
        span = self.q99 - self.q01 + self.eps
        return (np.asarray(values, dtype=np.float64) - self.q01) / span * 2.0 - 1.0

    def unnormalize(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``(values + 1) (q99 - q01 + eps) / 2 + q01``; shape ``[...,A]``."""
        return (values + 1.0) / 2.0 * (self.q99 - self.q01 + self.eps) + self.q01


def choose_key(keys: Collection[str], key: str | None, source: str) -> str:
    """Return which of the sets of statistics to use.

    Args:
        keys: the sets that there are.
        key: which; ``key + "_no_noops"`` is tried second; None takes the only one.
        source: named in errors.

    Raises:
        CheckpointError: no such key, or several and none chosen.
    """
    listed = ", ".join(sorted(keys)) or "none"
    if key is None:
        if len(keys) != 1:
            raise CheckpointError(
                f"{source} has {len(keys)} sets of action statistics ({listed})", "choose one with model.unnorm_key"
            )
        return next(iter(keys))
    if key not in keys and f"{key}_no_noops" in keys:
        return f"{key}_no_noops"
    if key not in keys:
        near = nearest(key, list(keys))
        raise CheckpointError(
            f"{source} has no action statistics '{key}'; it has: {listed}",
            f"set model.unnorm_key={near}" if near else "set model.unnorm_key to one of these",
        )
    return key


def choose_stats(norm_stats: dict[str, Any], key: str | None, action_dim: int, source: str) -> ActionStats:
    """Return the statistics of that key.

    Args:
        norm_stats: by data set, as in config.json or dataset_statistics.json.
        key: which; ``key + "_no_noops"`` is tried second; None takes the only one.
        action_dim: A, to check against.
        source: named in errors.

    Raises:
        CheckpointError: no such key, several keys and none chosen, or another number of dimensions.
    """
    key = choose_key(norm_stats, key, source)
    entry = norm_stats[key]["action"]
    q01 = np.asarray(entry["q01"], dtype=np.float64)
    q99 = np.asarray(entry["q99"], dtype=np.float64)
    mask = np.asarray(entry.get("mask", [True] * len(q01)), dtype=np.bool_)
    if not len(q01) == len(q99) == len(mask) == action_dim:
        raise CheckpointError(
            f"{source}: action statistics '{key}' have {len(q01)} dimensions, not {action_dim}",
            f"set model.action_dim={len(q01)} or choose other statistics",
        )
    return ActionStats(key, q01, q99, mask)
