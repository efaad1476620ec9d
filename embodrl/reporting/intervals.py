"""Confidence intervals of success rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

from embodrl.reporting.rows import is_number

CONFIDENCE = 0.95
CONFIDENCE_TEXT = f"{100 * CONFIDENCE:g} %"


def wilson_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of a binomial proportion; (0, 1) without a trial.

    With ``p = successes / trials``, ``n = trials`` and ``z`` the normal quantile: ``(p + z^2/2n ± z sqrt(p(1-p)/n +
    z^2/4n^2)) / (1 + z^2/n)`` (Wilson, 1927). Unlike ``p ± z sqrt(p(1-p)/n)`` it does not collapse at 0 and 1.
    """
    if not trials:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / trials
    square = z * z / trials
    centre = (rate + square / 2) / (1 + square)
    half = z * math.sqrt(rate * (1 - rate) / trials + square / 4 / trials) / (1 + square)
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return low, high


def eval_interval(row: Mapping[str, object]) -> tuple[float, float] | None:
    """Return the interval of the evaluation in a row of metrics.jsonl; None if missing or invalid."""
    rate = row.get("eval/success_rate")
    episodes = row.get("eval/episodes")
    if not is_number(rate) or not is_number(episodes) or not 0 <= rate <= 1 or episodes < 1:
        return None
    trials = int(episodes)
    return wilson_interval(round(rate * trials), trials)


def interval_text(row: Mapping[str, object]) -> str:
    """Return ``" (95 % interval 47 to 65 %)"`` for the evaluation in a row of metrics.jsonl, or ""."""
    found = eval_interval(row)
    return f" ({CONFIDENCE_TEXT} interval {100 * found[0]:.0f} to {100 * found[1]:.0f} %)" if found else ""
