"""An environment whose steps take as long as those of a slow simulator or a real robot: now and then, much longer.

It waits and does not compute, so that it measures what waiting costs.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.specs import ENVS
from embodrl.types import EnvStep

MEAN_S = 0.4
LONGEST_S = 10 * MEAN_S
# Pareto with this exponent has no variance: most chunks take half the mean, one of 100 ten times as long.
TAIL = 1.8
CONSTANT = "bench_constant"
HEAVY = "bench_heavy_tailed"


class SlowVectorEnv(ToyVectorEnv):
    """The toy environment; each chunk of a process takes a time of its own.

    Args:
        heavy_tailed: draw the times from a Pareto distribution, cut off at ``LONGEST_S``; else all are ``MEAN_S``.
        kwargs: of the toy environment.
    """

    def __init__(self, heavy_tailed: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._heavy_tailed = heavy_tailed
        self._random = np.random.default_rng()

    def reset(self, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], indices: NDArray[np.int64]) -> Any:
        """See VectorEnv; the seeds decide the times as well, so that all sides wait for the same."""
        self._random = np.random.default_rng(seeds.tolist())
        return super().reset(seeds, task_ids, indices)

    def chunk_step(self, actions: NDArray[np.float32], active: NDArray[np.bool_]) -> EnvStep:
        """See VectorEnv."""
        step = super().chunk_step(actions, active)
        time.sleep(chunk_seconds(self._random) if self._heavy_tailed else MEAN_S)
        return step


def chunk_seconds(random: np.random.Generator) -> float:
    """Return how long a chunk takes, in seconds."""
    return min(LONGEST_S, MEAN_S * (TAIL - 1) / TAIL * (1 + float(random.pareto(TAIL))))


ENVS.add(HEAVY, lambda **kwargs: SlowVectorEnv(True, **kwargs))
ENVS.add(CONSTANT, lambda **kwargs: SlowVectorEnv(False, **kwargs))
