"""Checks of a network's dimensions, for the rules of model families."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Finding, multiples
from embodrl.config.schema import ModelConfig


def divides(part: str, whole: str, small: int, large: int) -> Iterator[Finding]:
    """The value ``small`` of the key ``part`` divides the value ``large`` of the key ``whole``."""
    if large % small:
        message = f"{small} does not divide {whole} = {large}: {large} / {small} leaves {large % small}"
        hint = f"change it, or set {whole} to {multiples(large, small)}"
        yield Finding(part, message, hint, f"a divisor of {large}", others=(whole,))


def even(key: str, value: int, why: str) -> Iterator[Finding]:
    """The value of a key is even."""
    if value % 2:
        yield Finding(key, f"{value} is odd; {why}", f"set it to {multiples(value, 2)}", "an even number")


def at_most(key: str, value: int, limit_key: str, limit: int, what: str) -> Iterator[Finding]:
    """The value of a key is at most that of another."""
    if value > limit:
        message = f"{what}: {value}, and {limit_key} is {limit}"
        hint = f"set it to {limit} or less, or {limit_key} to {value} or more"
        yield Finding(key, message, hint, f"1 to {limit}", others=(limit_key,))


def chunk_fits(model: ModelConfig, base: str, horizon: int, max_action_dim: int) -> Iterator[Finding]:
    """A chunk of actions fits into what the network predicts."""
    chunk, dims = model.num_action_chunks, model.action_dim
    yield from at_most("model.num_action_chunks", chunk, f"{base}.action_horizon", horizon, "actions to run")
    yield from at_most("model.action_dim", dims, f"{base}.max_action_dim", max_action_dim, "action dimensions")
