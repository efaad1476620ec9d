"""Confidence intervals of success rates."""

from __future__ import annotations

import math
from statistics import NormalDist

CONFIDENCE = 0.95


def wilson_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of a binomial proportion; (0, 1) without a trial.

    With ``p = successes / trials``, ``n = trials`` and ``z`` the normal quantile: ``(p + z^2/2n ± z sqrt(p(1-p)/n +
    z^2/4n^2)) / (1 + z^2/n)`` (Wilson, 1927). Unlike ``p ± z sqrt(p(1-p)/n)`` it has a width at 0 and at 1.
    """
    if not trials:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, square = successes / trials, z * z / trials
    centre = (rate + square / 2) / (1 + square)
    half = z * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials)) / (1 + square)
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return low, high
