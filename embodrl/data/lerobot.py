"""The LeRobot dataset format, v3.0: names, paths and code shared by its writer and reader.

Facts of the format from the public documentation of the `lerobot` package (huggingface.co/docs/lerobot, "LeRobotDataset
v3.0"). A dataset is a directory: ``meta/info.json`` (features, path templates), ``meta/stats.json``,
``meta/tasks.parquet``, ``meta/episodes/``, ``data/`` (one row per frame, many episodes per file), ``videos/<feature>/``
(many episodes per file).
"""

from __future__ import annotations

import glob
import os
import re
import string
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from embodrl.data.demos import damaged
from embodrl.errors import EmbodrlError, MissingDependencyError
from embodrl.hub import is_inside

VERSION = "v3.0"
READABLE = ("v2.0", "v2.1", VERSION)
INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH = f"data/{FILE}.parquet"
VIDEO_PATH = f"videos/{{video_key}}/{FILE}.mp4"
EPISODES_PATH = f"meta/episodes/{FILE}.parquet"
CHUNKS_SIZE = 1000
DATA_FILE_MB = 100
VIDEO_FILE_MB = 200

IMAGES = "observation.images."
STATE = "observation.state"
ACTION = "action"
# Columns of every frame other than observation and action, with dtypes.
COUNTERS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
# embodrl's own columns in meta/episodes; other readers ignore them.
OWN_TASK = "embodrl/task"
OWN_SEED = "embodrl/seed"
OWN_SUCCESS = "embodrl/success"
OWN_ID = "embodrl/id"
OWN_META = "meta/embodrl.json"
MEGABYTE = 2**20


def camera_key(name: str) -> str:
    """Return the feature name of a camera; full feature names are returned as is."""
    return name if name.startswith("observation.") else IMAGES + name


def require(*packages: str) -> tuple[Any, ...]:
    """Import modules of the extra ``datasets``; MissingDependencyError names the first that is not installed."""
    modules: list[Any] = []
    for name in packages:
        try:
            modules.append(import_module(name))
        except ImportError as error:
            package = name.partition(".")[0].replace("_", "-")
            raise MissingDependencyError(
                f"the package {package} is not installed; LeRobot datasets and video grids need it",
                "pip install 'embodrl[datasets]'",
                code="video-packages-missing",
            ) from error
    return tuple(modules)


def check_template(template: str, names: Collection[str], source: Path) -> str:
    """Return a path template of info.json if it consists of text and allowed fields, such as ``{file_index:03d}``.

    Raises FileDamagedError otherwise: ``str.format`` would evaluate attributes and widths.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise damaged(source, f"{template!r:.100} is not a path template: {error}") from error
    for _, name, width, conversion in parts:
        if name is not None and (name not in names or conversion or not re.fullmatch(r"(0?\d?d)?", width or "")):
            raise damaged(source, f"{template!r:.100} is not a path template of {', '.join(names)}")
    if len(template) > 1000:
        raise damaged(source, f"{template!r:.100} is too long for a path")
    return template


def is_relative(template: str) -> bool:
    """Whether a path template stays inside the dataset."""
    parts = Path(template).parts
    return bool(parts) and not Path(template).is_absolute() and ".." not in parts


def escaped(name: str) -> str:
    """Escape a name for both ``glob`` and ``str.format``."""
    return glob.escape(name).replace("{", "{{").replace("}", "}}")


def any_index(template: str) -> str:
    """Return the ``glob`` pattern matching all paths of a template."""
    parts = string.Formatter().parse(template)
    return "".join(text + ("" if name is None else "*") for text, name, _, _ in parts)


def within(directory: Path, relative: str) -> Path:
    """Return a path inside a dataset; EmbodrlError if the path, given by info.json, leads outside."""
    path = directory / relative
    if not is_inside(path, directory):
        raise EmbodrlError(
            f"{directory / INFO} leads outside the dataset, to {os.path.realpath(path)}",
            "use a trusted dataset",
            code="dataset-path",
        )
    return path
