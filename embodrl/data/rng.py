"""Random states as JSON, so that a resumed run draws the same numbers as an uninterrupted one."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl.errors import CheckpointError


def capture_rng() -> dict[str, Any]:
    """Return the global random states of Python, numpy and torch (with every visible GPU) as JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Set the random states from ``capture_rng``, skipping absent GPUs; CheckpointError if the state is invalid."""
    with _refused():
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_decode(state["torch"]))
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for index, encoded in enumerate(state["cuda"][:num_gpus]):
            torch.cuda.set_rng_state(_decode(encoded), index)


def generator_state(generator: torch.Generator) -> str:
    """Return the state of a generator as text."""
    return _encode(generator.get_state())


def restore_generator(generator: torch.Generator, state: str) -> None:
    """Restore a generator from ``generator_state``; CheckpointError if the state is invalid."""
    with _refused():
        generator.set_state(_decode(state))


@contextmanager
def _refused() -> Iterator[None]:
    """Convert the libraries' errors about an unusable state to an error with a code."""
    try:
        yield
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        message = f"a saved random state can't be used: {type(error).__name__} {error}"
        raise CheckpointError(message, "use an earlier checkpoint", code="checkpoint-damaged") from error


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@dataclass(frozen=True)
class RowGenerators:
    """One random generator per row of a batch, so that the draws of a row do not depend on the other rows."""

    rows: tuple[torch.Generator, ...]

    @property
    def device(self) -> torch.device:
        return self.rows[0].device


RandomSource = torch.Generator | RowGenerators
"""Random source of a policy: one generator per batch, or one per row."""


def draw_rows(
    draw: Callable[[list[int], torch.Generator | None], Tensor],
    shape: Sequence[int],
    source: RandomSource | None,
    dim: int = 0,
) -> Tensor:
    """Return ``draw(shape, generator)``, or the draws of each generator of ``RowGenerators`` joined along ``dim``.

    ``source`` None uses torch's global generator.
    """
    if not isinstance(source, RowGenerators):
        return draw(list(shape), source)
    if len(source.rows) != shape[dim]:
        raise ValueError(f"{len(source.rows)} generators for {shape[dim]} rows")
    one = [*shape[:dim], 1, *shape[dim + 1 :]]
    return torch.cat([draw(one, generator) for generator in source.rows], dim)
