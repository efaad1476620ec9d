"""PF-PPO: rows of a rollout are drawn again by weights from their rewards (Zhang et al. 2024, arXiv 2409.06957).

Shapes: T policy steps (chunks), B rows (environments), C actions in a chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embodrl.algorithms.advantages import Advantages
from embodrl.config.schema import AlgorithmConfig
from embodrl.data.trajectory import TrajectoryBatch

Method = Literal["pow", "max_min", "max_random"]
LEAST = 1e-8
"""Added to every weight, as in verl: without rewards all rows are equally likely."""
_BEST = 0.4
_OTHER = 0.1


def row_weights(scores: NDArray[np.float64], method: Method, power: float) -> NDArray[np.float64]:
    """Return weights ``float64[B]``, not normalised, as verl's ``pf_ppo``.

    Args:
        scores: ``[B]``, sums of the rewards of each row.
        method: ``pow``: ``|score| ** power``; ``max_min``: 1 for the best and the worst rows, else 0; ``max_random``:
            0.4 for the best ones, else 0.1.
        power: of ``pow``.
    """
    best = scores == scores.max()
    if method == "pow":
        weights = np.abs(scores) ** power
    elif method == "max_min":
        weights = (best | (scores == scores.min())).astype(np.float64)
    else:
        weights = np.where(best, _BEST, _OTHER)
    return weights + LEAST


def drawn_rows(batch: TrajectoryBatch, config: AlgorithmConfig, seed: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the rows ``int64[B]`` to train on, with repetitions; ``seed`` determines them.

    Rows without a valid action are never drawn, unless there are no others.
    """
    valid = batch.valid.cpu().numpy()
    played = valid.any(axis=(0, 2))
    if config.pf_ppo.method is None or not played.any():
        return np.arange(len(batch))
    scores = (batch.rewards.cpu().double().numpy() * valid).sum(axis=(0, 2))[played]
    weights = row_weights(scores, config.pf_ppo.method, config.pf_ppo.power)
    chosen = np.random.default_rng(seed).choice(len(scores), len(batch), p=weights / weights.sum())
    return np.flatnonzero(played)[chosen]


def filtered(
    batch: TrajectoryBatch, advantages: Advantages, config: AlgorithmConfig, seed: tuple[int, ...]
) -> tuple[TrajectoryBatch, Advantages]:
    """Return the drawn rows of a batch and its advantages; see ``drawn_rows``."""
    rows = drawn_rows(batch, config, seed)
    columns = {name: tensor[:, rows] for name, tensor in vars(advantages).items()}
    return batch[rows.tolist()], replace(advantages, **columns)
