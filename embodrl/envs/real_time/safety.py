"""Limits of commands sent to a robot. Shapes: A action dimensions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)
Command = NDArray[np.float64]

KINDS = ("position", "step", "velocity", "not_finite")
_TOLERANCE = 1e-9


@dataclass
class CommandLimits:
    """Keeps commands ``float64[A]`` within limits, and counts violations.

    Attributes:
        low, high: bounds per dimension, or one number for all; None for no limit.
        max_step: largest change between two commands.
        max_velocity: largest change per second.
        period_s: time between two commands; a late command may not go further for it.
        stops: send nothing instead of a clipped command.
        counts: number of commands beyond a limit, by ``KINDS``.
    """

    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    max_step: Sequence[float] | None = None
    max_velocity: Sequence[float] | None = None
    period_s: float = 1.0
    stops: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def apply(self, command: Command, previous: Command | None) -> Command | None:
        """Return the command to send; None to send nothing.

        ``previous`` is the last command, or the robot's position; None if neither is known.
        """
        if not np.isfinite(command).all() or (previous is not None and not np.isfinite(previous).all()):
            self._count("not_finite", command, command)
            return None
        low = -np.inf if self.low is None else np.asarray(self.low)
        high = np.inf if self.high is None else np.asarray(self.high)
        allowed = self._limited("position", command, low, high)
        if previous is not None:  # last: a robot outside its range goes back in steps
            speed = None if self.max_velocity is None else np.multiply(self.max_velocity, self.period_s)
            for kind, most in (("step", self.max_step), ("velocity", speed)):
                if most is not None:
                    allowed = self._limited(kind, allowed, previous - np.asarray(most), previous + np.asarray(most))
        return None if self.stops and np.abs(allowed - command).max() > _TOLERANCE else allowed

    def _limited(self, kind: str, command: Command, low: object, high: object) -> Command:
        allowed = np.clip(command, low, high)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if np.abs(allowed - command).max() > _TOLERANCE:
            self._count(kind, command, allowed)
        return allowed

    def _count(self, kind: str, command: Command, allowed: Command) -> None:
        self.counts[kind] += 1
        dimension = int(np.argmax(~np.isfinite(command) | (np.abs(allowed - command) > _TOLERANCE)))
        logger.warning(
            "command beyond the limit of %s: dimension %d is %g, allowed: %g",
            kind,
            dimension,
            command[dimension],
            allowed[dimension],
        )
