"""Tokens of a message while it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from embodrl.data.rng import RandomSource
from embodrl.models.common.chat import LiveToken
from embodrl.types import ActMode, Observation, PolicyOutput, SamplingParams

OnToken = Callable[[int, LiveToken], None]
"""Called with a row and its next token, from the thread that computes; marks of the end are left out."""


@runtime_checkable
class LiveWriter(Protocol):
    """A policy that reports the tokens of its messages one by one."""

    def write_live(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None,
        on_token: OnToken,
    ) -> PolicyOutput:
        """Like ``predict_action_batch`` without values, and report each token as soon as it is chosen."""
        ...
