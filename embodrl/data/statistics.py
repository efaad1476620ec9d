"""Statistics of a robot's actions and state: computed from demonstrations, stored as JSON, read from several layouts.

Shapes: N frames, A action dimensions, S state dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data.lerobot_stats import vector_stats
from embodrl.errors import FileDamagedError
from embodrl.fields import Fields, read_fields
from embodrl.storage.json_file import write_json_file

STATISTICS_FILE = "statistics.json"
UNNAMED = "demonstrations"
NARROW = 0.01
"""Quantiles spanning less than this fraction of the range misrepresent a dimension, e.g. a gripper that rarely moves.
"""
_HINT = "use the output of `embodrl data stats`, meta/stats.json of a LeRobot dataset, or openpi's norm_stats.json"

Vector = dict[str, list[float]]
"""``mean``, ``std``, ``min``, ``max``, ``q01``, ``q10``, ``q50``, ``q90``, ``q99``: one number per dimension each."""


@dataclass(frozen=True)
class RobotStatistics:
    """Statistics of one robot.

    Attributes:
        action: statistics of each action dimension, in the policy's gripper convention.
        state: statistics of each state dimension; None without.
        gripper: ``model.gripper`` used to convert the actions.
        num_frames, num_episodes: size of the data; 0 if unknown.
        source: file path; "" if computed.
    """

    name: str
    action: Mapping[str, object]
    state: Mapping[str, object] | None
    gripper: str = "as_is"
    num_frames: int = 0
    num_episodes: int = 0
    source: str = ""

    def write(self, path: Path) -> None:
        """Write the statistics as JSON, atomically."""
        content = {name: getattr(self, name) for name in ("name", "gripper", "num_frames", "num_episodes", "action")}
        write_json_file(path, content | ({} if self.state is None else {"state": self.state}))


def dimension_stats(values: NDArray[np.floating]) -> tuple[Vector, list[int]]:
    """Return the statistics of ``[N,D]``, and the dimensions whose q01 and q99 were replaced by minimum and maximum.

    Mean and (population) standard deviation are accumulated in float64 over all frames, and quantiles are exact
    (``numpy.quantile``, linear). Where q01 to q99 spans less than 1 % of the range, normalised outliers would be in the
    hundreds; the whole range is used instead.
    """
    stats = vector_stats(np.asarray(values, np.float64))
    del stats["count"]
    low, high, least, most = (np.array(stats[name]) for name in ("q01", "q99", "min", "max"))
    narrow = (most > least) & (high - low < NARROW * (most - least))
    stats["q01"] = np.where(narrow, least, low).tolist()
    stats["q99"] = np.where(narrow, most, high).tolist()
    return stats, np.flatnonzero(narrow).tolist()


def read_statistics(path: Path) -> RobotStatistics:
    """Read statistics written by ``RobotStatistics.write``, LeRobot (meta/stats.json) or openpi.

    Raises FileDamagedError if the file is unreadable or has no action statistics.
    """
    content = read_fields(path, FileDamagedError, _HINT)
    inner = content.fields("norm_stats") if "norm_stats" in content else content
    action = _part(inner, "action", "actions")
    if action is None:
        inner.refuse("it has no action statistics ('action' or 'actions')")
    state = _part(inner, "state", "observation.state")
    return RobotStatistics(
        content.text("name", UNNAMED),
        action.content,
        None if state is None else state.content,
        content.text("gripper", "as_is"),
        content.integer("num_frames", 0),
        content.integer("num_episodes", 0),
        str(path),
    )


def _part(fields: Fields, *names: str) -> Fields | None:
    return next((fields.fields(name) for name in names if name in fields), None)
