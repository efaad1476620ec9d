"""Variance of outcomes by where it arises, and how much of it a linear function of the actions explains.

Shapes: S states, K chunks drawn in each, M continuations of each chunk, P numbers that describe a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVELS = ("states", "chunks", "rest")
"""Between states, between the chunks of a state, and between the continuations of a chunk."""
SHUFFLES = 200


@dataclass(frozen=True)
class Components:
    """Estimates of the variances of ``LEVELS``, float64[3]; unbiased, so that they may be negative."""

    variances: Floats

    @property
    def shares(self) -> Floats:
        """Parts of their sum in percent; 0 where nothing varies."""
        total = self.variances.sum()
        return 100 * self.variances / total if total > 0 else np.zeros(3)


def components(outcomes: Floats) -> Components:
    """Return the components of a nested random-effects model, from the mean squares of its analysis of variance.

    With variances s, c and r, E[MS_states] = r + M c + K M s, E[MS_chunks] = r + M c and E[MS_rest] = r (Searle,
    Casella and McCulloch 1992, "Variance Components", section 3.6).

    Args:
        outcomes: ``float64[S,K,M]``, at least two along each axis.

    Raises:
        ValueError: an axis has one entry.
    """
    num_states, num_chunks, repeats = outcomes.shape
    if min(outcomes.shape) < 2:
        raise ValueError(f"outcomes {list(outcomes.shape)}: at least 2 states, chunks and continuations are needed")
    by_chunk = outcomes.mean(2)
    by_state = by_chunk.mean(1)
    squares = (
        num_chunks * repeats * np.square(by_state - by_state.mean()).sum() / (num_states - 1),
        repeats * np.square(by_chunk - by_state[:, None]).sum() / (num_states * (num_chunks - 1)),
        np.square(outcomes - by_chunk[..., None]).sum() / (num_states * num_chunks * (repeats - 1)),
    )
    of_states, of_chunks, rest = squares
    return Components(np.array([(of_states - of_chunks) / (num_chunks * repeats), (of_chunks - rest) / repeats, rest]))


def share_intervals(outcomes: Floats, rng: np.random.Generator, draws: int = 1000) -> Floats:
    """Return the central 95 % of the shares, ``float64[3,2]``, over samples of the states with replacement."""
    count = len(outcomes)
    shares = np.array([components(outcomes[rng.integers(count, size=count)]).shares for _ in range(draws)])
    return np.percentile(shares, (2.5, 97.5), axis=0).T


@dataclass(frozen=True)
class Explained:
    """What a linear function of the actions explains within states.

    Attributes:
        directions: rank of the actions, the numbers that are fitted.
        adjusted_r2: of the chunks' mean outcomes, of whose variance the continuations are a part as well.
        chance_r2: that 95 % of fits to outcomes shuffled within their states stay below.
        of_chunks: explained part of the variance between chunks, in percent; None if that is not positive.
    """

    directions: int
    adjusted_r2: float
    chance_r2: float
    of_chunks: float | None


def explained(outcomes: Floats, features: Floats, rng: np.random.Generator) -> Explained:
    """Regress the mean outcome of chunks on their features, both less their means over the chunks of a state.

    Args:
        outcomes: ``float64[S,K,M]``.
        features: ``float64[S,K,P]``.
        rng: of the shuffled outcomes.

    Raises:
        ValueError: there are as many directions as chunks.
    """
    num_states, num_chunks = outcomes.shape[:2]
    basis = _orthonormal((features - features.mean(1, keepdims=True)).reshape(num_states * num_chunks, -1))
    directions, freedom = basis.shape[1], num_states * (num_chunks - 1)
    if directions >= freedom:
        raise ValueError(f"{directions} directions from {freedom} chunks: draw more states or chunks")
    means = outcomes.mean(2) - outcomes.mean((1, 2))[:, None]
    found = _adjusted_r2(means, basis, freedom)
    shuffled = [_adjusted_r2(rng.permuted(means, axis=1), basis, freedom) for _ in range(SHUFFLES)]
    between = components(outcomes).variances[1]
    of_chunks = float(100 * found * np.square(means).sum() / freedom / between) if between > 0 else None
    return Explained(directions, found, float(np.percentile(shuffled, 95)), of_chunks)


def _orthonormal(columns: Floats) -> Floats:
    """Return an orthonormal basis of what the columns span: actions may have constant numbers."""
    left, values, _ = np.linalg.svd(columns, full_matrices=False)
    return left[:, values > 1e-6 * max(values[0], 1e-12)]


def _adjusted_r2(means: Floats, basis: Floats, freedom: int) -> float:
    flat = means.ravel()
    total = flat @ flat
    if total == 0:
        return 0.0
    left = total - np.square(basis.T @ flat).sum()
    return float(1 - left / (freedom - basis.shape[1]) / (total / freedom))


@dataclass(frozen=True)
class GradientSignal:
    """How much of the gradients of independent groups they have in common.

    Attributes:
        squared_norm: mean of ``|g|^2``.
        squared_mean: estimate of ``|E g|^2``; unbiased, so that it may be negative.
        standard_error: of ``squared_mean``.
    """

    squared_norm: float
    squared_mean: float
    standard_error: float

    def share(self, ratio: float) -> tuple[float, float]:
        """Return the signal's part of ``|g|^2`` of a batch, in percent, and its standard error.

        Args:
            ratio: samples of the batch over those of a group.
        """
        whole = max(self.squared_mean, 0.0) + (self.squared_norm - self.squared_mean) / ratio
        return (100 * self.squared_mean / whole, 100 * self.standard_error / whole) if whole > 0 else (0.0, 0.0)


def gradient_signal(products: Floats) -> GradientSignal:
    """Return the signal in gradients with the inner products ``float64[G,G]``, G at least 4.

    The estimate is a U-statistic of pairs; its variance (Hoeffding 1948, eq. 5.13) is estimated from the products of
    pairs that are the same, have one gradient in common, and have none.
    """
    count = len(products)
    pairs = products - np.diag(np.diag(products))
    num_pairs = count * (count - 1)
    mean = pairs.sum() / num_pairs
    square, in_rows = np.square(pairs).sum(), np.square(pairs.sum(1)).sum()
    same = square / num_pairs
    sharing = (in_rows - square) / (num_pairs * (count - 2))
    apart = (pairs.sum() ** 2 + 2 * square - 4 * in_rows) / (num_pairs * (count - 2) * (count - 3))
    variance = 2 * (same - max(apart, 0.0) + 2 * (count - 2) * max(sharing - apart, 0.0)) / num_pairs
    return GradientSignal(float(np.trace(products) / count), float(mean), float(np.sqrt(max(variance, 0.0))))
