"""Exact statistics of a LeRobot dataset over all frames.

Shapes: N values, D dimensions. Quantiles interpolate linearly between order statistics, like ``numpy.quantile``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def vector_stats(values: NDArray[np.generic]) -> dict[str, list[float]]:
    """Return min, max, mean, std, count and quantiles of ``[N,D]`` or ``[N]`` (D = 1), as lists of D numbers."""
    table = values.reshape(len(values), -1)
    table = table.astype(np.int64) if table.dtype == np.bool_ else table  # JSON booleans have no order
    wide = table.astype(np.float64)
    result: dict[str, list[float]] = {
        "min": table.min(0).tolist(),
        "max": table.max(0).tolist(),
        "mean": wide.mean(0).tolist(),
        "std": wide.std(0).tolist(),
        "count": [len(table)],
    }
    return result | {name: np.quantile(wide, q, axis=0).tolist() for name, q in QUANTILES.items()}


class PixelStats:
    """Statistics of images from histograms ``counts int64[3,256]``, one per colour; frames need not be kept."""

    def __init__(self, counts: NDArray[np.int64] | None = None, frames: int = 0) -> None:
        self.counts: NDArray[np.int64] = np.zeros((3, 256), np.int64) if counts is None else counts
        self.frames = frames

    def add(self, frames: NDArray[np.uint8]) -> None:
        """Count ``uint8[N,H,W,3]``."""
        for channel in range(3):
            self.counts[channel] += np.bincount(frames[..., channel].ravel(), minlength=256)
        self.frames += len(frames)

    def merge(self, other: PixelStats) -> None:
        """Add the counts of another instance."""
        self.counts += other.counts
        self.frames += other.frames

    def stats(self) -> dict[str, list[list[list[float]]] | list[int]]:
        """Return the statistics of each channel, pixels scaled to [0, 1], nested as ``[3,1,1]``; count is of frames."""
        levels = np.arange(256) / 255
        total = self.counts.sum(axis=1)
        mean = self.counts @ levels / total
        variance = (self.counts * (levels[None] - mean[:, None]) ** 2).sum(axis=1) / total
        seen = [np.flatnonzero(row) for row in self.counts]
        values: dict[str, list[float]] = {
            "min": [float(levels[row[0]]) for row in seen],
            "max": [float(levels[row[-1]]) for row in seen],
            "mean": mean.tolist(),
            "std": np.sqrt(variance).tolist(),
        }
        values |= {name: [_quantile(row, q) for row in self.counts] for name, q in QUANTILES.items()}
        return {name: [[[x]] for x in value] for name, value in values.items()} | {"count": [self.frames]}


def _quantile(counts: NDArray[np.int64], q: float) -> float:
    """Return the quantile of values 0 to 255 with histogram ``int64[256]``, scaled to [0, 1]."""
    upto = np.cumsum(counts)
    rank = q * (upto[-1] - 1)
    below = int(np.floor(rank))
    low, high = np.searchsorted(upto, [below, min(below + 1, upto[-1] - 1)], side="right")
    return float(low + (rank - below) * (high - low)) / 255
