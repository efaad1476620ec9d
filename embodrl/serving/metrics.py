"""Metrics of a policy server, in the Prometheus text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the histogram buckets, in seconds."""


class Metrics:
    """Counters by name and protocol, and a histogram of request times."""

    def __init__(self) -> None:
        self.counters: Counter[tuple[str, str]] = Counter()
        self._bars = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def count(self, name: str, protocol: str, number: int = 1) -> None:
        """Add to a counter; a negative number decrements a gauge."""
        self.counters[name, protocol] += number

    def took(self, seconds: float) -> None:
        """Record the time from a request's arrival to its response."""
        self._bars[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def text(self, values: dict[str, float]) -> str:
        """Return all metrics as text; ``values`` are gauges kept elsewhere, by name."""
        lines = [f"embodrl_serve_{name} {value:g}" for name, value in values.items()]
        for (name, protocol), number in sorted(self.counters.items()):
            lines.append(f'embodrl_serve_{name}{{protocol="{protocol}"}} {number}')
        total = 0
        for bound, number in zip((*map(str, BOUNDS_S), "+Inf"), self._bars, strict=True):
            total += number
            lines.append(f'embodrl_serve_request_seconds_bucket{{le="{bound}"}} {total}')
        lines += [
            f"embodrl_serve_request_seconds_sum {self._sum_s:.6f}",
            f"embodrl_serve_request_seconds_count {total}",
        ]
        return "\n".join(lines) + "\n"
