"""Choice of the acting policy while an expert labels the policy's observations.

DAgger: Ross, Gordon & Bagnell 2011, "A Reduction of Imitation Learning and Structured Prediction to No-Regret Online
Learning", arXiv 1011.0686, algorithm 3.1. HG-DAgger: Kelly et al. 2019, arXiv 1810.02890: a person decides when to take
over and when to hand back; here the distance between the two actions replaces that judgement.

Shapes: B environments, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def beta_of(beta: float, decay: float, version: int) -> float:
    """Return the probability that the expert acts: ``beta decay^version`` (section 3.1, exponential)."""
    return beta * decay**version


def distance(actions: NDArray[np.float32], labels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the root mean square ``float32[B]`` of the difference of chunks ``float32[B,C,A]``."""
    return np.sqrt(np.square(actions - labels).mean((1, 2), dtype=np.float32))


def dagger(far: NDArray[np.bool_], held: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
    """Return the remaining steps of expert control, ``int64[B]``.

    The expert keeps control for ``steps`` after the last action ``far bool[B]`` beyond the tolerance; ``held int64[B]``
    are the steps that remained before this one.
    """
    return np.where(far, steps, np.maximum(held - 1, 0))
