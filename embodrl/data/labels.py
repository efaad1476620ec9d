"""Sidecar labels of a dataset: ``meta/returns_TAG.parquet`` and ``meta/advantages_TAG.parquet``, as RLinf names them.

Shapes: N frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data.demos import Demos, damaged
from embodrl.data.lerobot import require
from embodrl.data.load import is_lerobot
from embodrl.data.parquet import Table
from embodrl.errors import EmbodrlError
from embodrl.storage.atomic import atomic_file

Column = NDArray[np.generic] | list[str]


def sidecar(directory: Path, kind: str, tag: str) -> Path:
    """Return the path of ``returns`` or ``advantages``."""
    return directory / "meta" / f"{kind}_{tag}.parquet"


def check_labelled_format(directory: Path) -> None:
    """Raise EmbodrlError unless the directory is a LeRobot dataset: other formats have no place for labels."""
    if not is_lerobot(directory):
        raise EmbodrlError(
            f"{directory} is not a LeRobot dataset and has no meta/ for labels",
            "collect with collect.format=lerobot, or name another directory",
            code="label-format",
        )


def frame_numbers(demos: Demos) -> dict[str, Column]:
    """Return the columns ``episode_index`` and ``frame_index``, ``int64[N]``, which assign labels to frames."""
    lengths = np.bincount(demos.episode, minlength=demos.num_episodes)
    within = np.concatenate([np.arange(n) for n in lengths])
    return {"episode_index": demos.episode.astype(np.int64), "frame_index": within.astype(np.int64)}


def write_sidecar(path: Path, columns: Mapping[str, Column]) -> None:
    """Write columns of all frames atomically; OutputError, or MissingDependencyError without ``datasets``."""
    pyarrow, parquet = require("pyarrow", "pyarrow.parquet")
    with atomic_file(path) as staging:
        parquet.write_table(pyarrow.table(dict(columns)), staging, write_page_checksum=True)


def read_indicator(directory: Path, tag: str, demos: Demos) -> NDArray[np.bool_]:
    """Return the column ``advantage`` ``bool[N]`` of a dataset's labels.

    Raises EmbodrlError if no labels have this tag, FileDamagedError if they do not match the frames.
    """
    check_labelled_format(directory)
    path = sidecar(directory, "advantages", tag)
    if not path.is_file():
        raise EmbodrlError(
            f"{directory} has no labels '{tag}'", f"embodrl label {directory} --tag {tag}", code="label-missing"
        )
    table = Table(path, ["episode_index", "frame_index", "advantage"])
    expected = frame_numbers(demos)
    order = np.lexsort((table.integers("frame_index"), table.integers("episode_index")))
    for name in ("episode_index", "frame_index"):
        if not np.array_equal(table.integers(name)[order], expected[name]):
            raise damaged(path, f"its {name} does not match the dataset's {len(demos.actions)} frames")
    return table.vectors("advantage", 1)[order, 0].astype(np.bool_)
