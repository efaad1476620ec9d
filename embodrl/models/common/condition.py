"""Advantage conditions in instructions (RECAP: pi*0.6, arXiv 2511.14759)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from embodrl.types import Observation

Condition = Literal["positive", "negative"]
PREFIX = ", advantage: "
SIGNS: dict[Condition, int] = {"positive": 1, "negative": -1}


def conditioned(instruction: str, condition: Condition | None) -> str:
    """Return the instruction with the condition appended; unchanged without one."""
    return instruction if condition is None else f"{instruction}{PREFIX}{condition}"


def condition_observation(observation: Observation, condition: Condition | None) -> Observation:
    """Return an observation with the condition appended to its instructions."""
    if condition is None:
        return observation
    return replace(observation, instruction=[conditioned(text, condition) for text in observation.instruction])


def signs_of(instructions: Sequence[str]) -> list[int]:
    """Return the conditions as numbers, for policies without language: 1 positive, -1 negative, 0 none."""
    return [next((n for name, n in SIGNS.items() if text.endswith(PREFIX + name)), 0) for text in instructions]
