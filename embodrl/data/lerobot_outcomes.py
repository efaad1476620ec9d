"""Outcomes of the actions of a LeRobot dataset: embodrl's own columns, or those of other software.

Other software writes ``next.reward`` and ``next.done``, and sometimes ``next.success`` and ``next.truncated``; its
``action`` is the executed action. Shapes: N frames.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data.demos import EXECUTED, REWARD, TERMINATED
from embodrl.data.lerobot import ACTION

OWN = (EXECUTED, REWARD, TERMINATED)
DONE = "next.done"
TRUNCATED = "next.truncated"
SUCCESS = "next.success"
OTHERS = (REWARD, TERMINATED, DONE, TRUNCATED, SUCCESS)
"""Columns with one number per frame."""

logger = logging.getLogger(__name__)
Columns = Mapping[str, NDArray[np.float32]]


def outcome_columns(features: Collection[str]) -> tuple[str, ...]:
    """Return the dataset features that record outcomes of actions."""
    known = (EXECUTED, *OTHERS)
    return OWN if set(OWN) <= set(features) else tuple(name for name in known if name in features)


def missing_outcomes(features: Collection[str]) -> list[str]:
    """Return what transitions need but a dataset lacks, each as the accepted feature names."""
    needed = {f"{REWARD}": (REWARD,), f"{TERMINATED} or {DONE}": (TERMINATED, DONE)}
    return [names for names, any_of in needed.items() if not set(any_of) & set(features)]


def read_outcomes(columns: Columns, directory: Path) -> dict[str, NDArray[np.float32]]:
    """Return ``EXECUTED``, ``REWARD`` and ``TERMINATED`` from a dataset's columns; empty if unknown.

    Without ``next.terminated``, an episode counts as ended by its task where ``next.done`` is true, unless
    ``next.truncated`` is true or ``next.success`` of the episode is false: then it ran out of time.

    Args:
        columns: ``float32[N,...]`` by name, including ``action``.
        directory: dataset directory, for warnings.
    """
    if missing_outcomes(columns.keys()):
        return {}
    if set(OWN) <= columns.keys():
        return {name: columns[name] for name in OWN}
    flags = {name: columns[name].reshape(-1) for name in OTHERS if name in columns}
    if unusable := [name for name, values in flags.items() if not np.isfinite(values).all()]:
        logger.warning("%s: %s contains NaN: rewards are not read", directory, unusable[0])
        return {}
    if TERMINATED in flags:
        terminated = flags[TERMINATED] != 0
    else:
        terminated = flags[DONE] != 0
        for name, ended in ((TRUNCATED, False), (SUCCESS, True)):
            if name in flags:
                terminated &= (flags[name] != 0) == ended
                break
    return {
        EXECUTED: columns.get(EXECUTED, columns[ACTION]),
        REWARD: flags[REWARD],
        TERMINATED: terminated.astype(np.float32),
    }
