"""Paired comparison of the success of two evaluations on the same episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypedDict, TypeVar

from embodrl.reporting.intervals import wilson_interval

Key = TypeVar("Key")
EPSILON = 1e-18
"""Terms below this fraction of the sum change nothing."""


class PairedFigures(TypedDict):
    """Result of ``compare_pairs``.

    ``difference`` is the second success rate minus the first over the ``pairs`` common episodes, with its interval;
    ``only_first`` and ``only_second`` count episodes solved by one evaluation alone.
    """

    pairs: int
    difference: float
    interval: tuple[float, float]
    only_first: int
    only_second: int
    p_value: float


def compare_pairs(first: Mapping[Key, bool], second: Mapping[Key, bool]) -> PairedFigures:
    """Compare the outcomes of two evaluations, by episode id; only common episodes count.

    The p-value is McNemar's exact two-sided test: the binomial distribution of ``only_first`` among the episodes solved
    by one evaluation alone, with probability 1/2.
    """
    shared = [(first[key], second[key]) for key in first if key in second]
    both = shared.count((True, True))
    neither = shared.count((False, False))
    only_first = shared.count((True, False))
    only_second = shared.count((False, True))
    discordant = only_first + only_second
    return PairedFigures(
        pairs=len(shared),
        difference=(only_second - only_first) / len(shared) if shared else 0.0,
        interval=paired_interval(both, only_second, only_first, neither),
        only_first=only_first,
        only_second=only_second,
        p_value=min(1.0, 2 * _lower_tail(discordant, min(only_first, only_second))),
    )


def _lower_tail(trials: int, most: int) -> float:
    """Return the probability of at most ``most`` successes in ``trials`` with probability 1/2, in linear time.

    Terms are computed from the largest down, each from the previous one; only the largest needs a logarithm.
    """
    log_comb = math.lgamma(trials + 1) - math.lgamma(most + 1) - math.lgamma(trials - most + 1)
    term = total = 1.0
    for count in range(most, 0, -1):
        term *= count / (trials - count + 1)
        if term < total * EPSILON:
            break
        total += term
    return total * math.exp(log_comb - trials * math.log(2))


def paired_interval(both: int, only_a: int, only_b: int, neither: int) -> tuple[float, float]:
    """Return the interval of the difference a - b of two paired proportions; (-1, 1) without a case.

    Method 10 of Newcombe 1998 (Statistics in Medicine 17, 2635-2650): Wilson's intervals ``[l, u]`` of both
    proportions, combined with their correlation ``phi``: ``d - sqrt(x^2 - 2 phi x y + y^2)`` with ``x = p_a - l_a``,
    ``y = u_b - p_b``, and ``d + sqrt(...)`` with ``x = p_b - l_b``, ``y = u_a - p_a``. The numerator of ``phi`` is
    corrected for continuity if positive.
    """
    cases = both + only_a + only_b + neither
    if not cases:
        return -1.0, 1.0
    solved_a = both + only_a
    solved_b = both + only_b
    product = solved_a * solved_b * (cases - solved_a) * (cases - solved_b)
    excess = float(both * neither - only_a * only_b)
    if excess > 0:
        excess = max(excess - cases / 2, 0.0)
    phi = excess / math.sqrt(product) if product else 0.0
    rate_a = solved_a / cases
    rate_b = solved_b / cases
    (low_a, high_a) = wilson_interval(solved_a, cases)
    (low_b, high_b) = wilson_interval(solved_b, cases)

    def joined(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * phi * x * y + y * y, 0.0))

    below = joined(rate_a - low_a, high_b - rate_b)
    above = joined(rate_b - low_b, high_a - rate_a)
    return rate_a - rate_b - below, rate_a - rate_b + above


def change_text(change: PairedFigures) -> str:
    """Return ``+4.7 points (-2.1 to +11.4)``."""
    low, high = change["interval"]
    return f"{100 * change['difference']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
