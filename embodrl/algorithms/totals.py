"""Figures over all parts of a rollout, of which a process may have one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Totals(Protocol):
    """Sums and maxima of ``float64`` figures over all parts of a rollout; ``embodrl.hybrid_engines.controllers``."""

    def sum(self, values: Tensor) -> Tensor: ...
    def max(self, values: Tensor) -> Tensor: ...


class _Whole:
    """The batch is the whole rollout."""

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values


WHOLE = _Whole()
