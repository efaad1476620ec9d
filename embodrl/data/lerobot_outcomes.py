"""What the actions of a LeRobot dataset led to: embodrl's own columns, or those that other software writes.

Others have ``next.reward`` and ``next.done``, and some ``next.success`` and ``next.truncated``; their ``action`` is
what was executed. Shapes: N frames.
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
"""Each is one number per frame."""

logger = logging.getLogger(__name__)
Columns = Mapping[str, NDArray[np.float32]]


def outcome_columns(features: Collection[str]) -> tuple[str, ...]:
    """Return which of a dataset's features say what its actions led to."""
    known = (EXECUTED, *OTHERS)
    return OWN if set(OWN) <= set(features) else tuple(name for name in known if name in features)


def missing_outcomes(features: Collection[str]) -> list[str]:
    """Return what transitions need and the features of a dataset do not have, each as the names that it may have."""
    needed = {f"{REWARD}": (REWARD,), f"{TERMINATED} or {DONE}": (TERMINATED, DONE)}
    return [names for names, any_of in needed.items() if not set(any_of) & set(features)]


def read_outcomes(columns: Columns, directory: Path) -> dict[str, NDArray[np.float32]]:
    """Return ``EXECUTED``, ``REWARD`` and ``TERMINATED`` of a dataset's columns; nothing where they are not known.

    Without ``next.terminated`` an episode ended by its task where ``next.done`` is true, unless ``next.truncated`` is,
    or ``next.success`` of that episode is stated and false: then it ran out of time.

    Args:
        columns: by name, ``float32[N,...]``, with ``action``.
        directory: named in warnings.
    """
    if missing_outcomes(columns.keys()):
        return {}
    if set(OWN) <= columns.keys():
        return {name: columns[name] for name in OWN}
    flags = {name: columns[name].reshape(-1) for name in OTHERS if name in columns}
    if unusable := [name for name, values in flags.items() if not np.isfinite(values).all()]:
        logger.warning("%s: %s is not a number somewhere: rewards are not read", directory, unusable[0])
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
