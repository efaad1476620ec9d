"""meta/info.json of LeRobot datasets, v3.0 or v2.x, of any origin: features, cameras, split, templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np

from embodrl.data import lerobot as layout
from embodrl.data.demos import HINT, layout_error
from embodrl.errors import EmbodrlError, FileDamagedError
from embodrl.fields import Fields, read_fields, with_whole_numbers
from embodrl.names import nearest

MAX_INDEX = 10**7
"""Maximum index of episodes, tasks, files and chunks."""
MAX_PIXELS = 2**14
MAX_DIMENSIONS = 10**6
TRAIN = "train"
PICTURES = ("video", "image")


@dataclass(frozen=True)
class Feature:
    """A feature of the dataset.

    Attributes:
        dtype: "video" and "image" are images.
        column: the dataset's own name for the feature.
        axes: axis names, empty if not stated.
        is_depth: pixels are distances, not colours.
    """

    dtype: str
    shape: tuple[int, ...]
    column: str
    axes: tuple[str, ...] = ()
    is_depth: bool = False

    @property
    def size(self) -> int:
        """Number of values per frame."""
        return int(np.prod(self.shape))

    @property
    def picture_size(self) -> tuple[int, int]:
        """Height and width, by axis name; unnamed axes by position, since some writers put channels first."""
        if "height" in self.axes and "width" in self.axes:
            return self.shape[self.axes.index("height")], self.shape[self.axes.index("width")]
        first = self.shape[0] == 3 and self.shape[-1] != 3
        return (self.shape[1], self.shape[2]) if first else (self.shape[0], self.shape[1])


@dataclass(frozen=True)
class Info:
    """Content of meta/info.json.

    Attributes:
        fps: frames per second.
        features: by embodrl's names, which ``sft.keys`` may assign.
        data_path, video_path: path templates; ``video_path`` is None without videos.
        chunks_size: episodes per directory, in v2.
        totals: stated numbers of episodes and frames, None if not stated.
        robot_type: as named by the dataset's writer; None if not stated.
        train: the split ``train`` as half-open ranges of episode_index; None if not stated.
        left_out: why a camera is not used, by feature.
    """

    path: Path
    version: str
    fps: float
    features: dict[str, Feature]
    data_path: str
    video_path: str | None
    chunks_size: int
    totals: tuple[int | None, int | None]
    robot_type: str | None = None
    train: tuple[tuple[int, int], ...] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def cameras(self) -> list[str]:
        """The usable image features, in the order of the dataset."""
        names = [name for name, feature in self.features.items() if feature.dtype in PICTURES]
        return [name for name in names if name not in self.left_out]

    @property
    def notes(self) -> list[str]:
        """Declared parts of the dataset that are not used."""
        return [f"camera {name.removeprefix(layout.IMAGES)} is left out: {why}" for name, why in self.left_out.items()]


def read_info(directory: Path, keys: Mapping[str, str] | None = None) -> Info:
    """Read meta/info.json; ``keys`` are ``sft.keys``, the dataset's features by embodrl's names.

    Raises EmbodrlError if it is damaged or of an unsupported version, or ``keys`` names unknown features.
    """
    path = directory / layout.INFO
    info = with_whole_numbers(read_fields(path, FileDamagedError, HINT))
    version = info.text("codebase_version")
    if version not in layout.READABLE:
        raise EmbodrlError(
            f"{path} is of version {version}; supported are {', '.join(layout.READABLE)}",
            "convert it with the tools of the lerobot package",
            code="dataset-version",
        )
    v3 = version == layout.VERSION
    names = ("chunk_index", "file_index") if v3 else ("episode_chunk", "episode_index")
    video_path = info.text("video_path", None)
    if video_path is not None:
        layout.check_template(video_path, (*names, "video_key"), path)
    fields = info.fields("features")
    features = _renamed(path, {name: _feature(name, fields.fields(name)) for name in fields}, keys or {})
    read = Info(
        path,
        version,
        info.number("fps", low=1e-3, high=1e5),
        features,
        layout.check_template(info.text("data_path"), names, path),
        video_path,
        1 if v3 else info.integer("chunks_size", 1000, low=1),
        (info.integer("total_episodes", None), info.integer("total_frames", None)),
        None if info.content.get("robot_type") in (None, "", "unknown") else info.text("robot_type"),
        _train_split(info),
    )
    return replace(read, left_out=_left_out(directory, read))


def _feature(name: str, fields: Fields) -> Feature:
    dtype = fields.text("dtype")
    shape = fields.numbers("shape")
    picture = dtype in PICTURES
    low, high = (1, MAX_PIXELS) if picture else (0, MAX_DIMENSIONS)
    if not all(low <= size <= high and size.is_integer() for size in shape) or (picture and len(shape) != 3):
        fields.refuse(f"'shape' is {shape} with dtype {dtype}; sizes must be {low} to {high}, images have 3")
    stated = fields.content.get("names")
    axes = tuple(str(axis) for axis in cast(list[object], stated)) if isinstance(stated, list) else ()
    axes = axes if picture and len(axes) == len(shape) else ()
    return Feature(dtype, tuple(int(size) for size in shape) or (1,), name, axes, _is_depth(fields))


def _is_depth(fields: Fields) -> bool:
    """Whether a feature is flagged as depth, in any of the places used by format versions."""
    sections = [fields, *(fields.fields(name, {}) for name in ("info", "video_info"))]
    return any(section.flag(f"{kind}is_depth_map", False) for section in sections for kind in ("", "video."))


def _train_split(info: Fields) -> tuple[tuple[int, int], ...] | None:
    """Return the ranges of ``splits.train``: a text FIRST:END, or a list of such texts or of episode numbers."""
    splits = info.content.get("splits")
    if splits is None or (isinstance(splits, Mapping) and TRAIN not in splits):
        return None
    stated = cast(Mapping[str, object], splits)[TRAIN] if isinstance(splits, Mapping) else splits
    parts = cast(list[object], stated) if isinstance(stated, list) else [stated]
    ranges = [_episode_range(part, alone=part is stated) for part in parts]
    found = tuple(each for each in ranges if each is not None)
    if len(found) < len(ranges) or not isinstance(splits, Mapping):
        raise layout_error(
            Path(info.source),
            f"splits.{TRAIN} is {stated!r:.60}, not FIRST:END or a list of these or of episodes",
            'write the episodes as, e.g., {"train": "0:50"}',
        )
    if len(parts) == 2 and all(isinstance(part, int) for part in parts):
        first, second = parts
        raise layout_error(
            Path(info.source),
            f"splits.{TRAIN} is {stated!r}: from {first} up to {second}, or these two episodes",
            f'write "{first}:{second}", or ["{first}:{found[0][1]}", "{second}:{found[1][1]}"]',
        )
    return found


def _episode_range(part: object, alone: bool) -> tuple[int, int] | None:
    """Parse a part of a split as a half-open range; None if invalid."""
    if isinstance(part, int) and not isinstance(part, bool) and not alone and 0 <= part < MAX_INDEX:
        return part, part + 1
    found = re.fullmatch(r"(\d{1,9})?:(\d{1,9})?", part.strip()) if isinstance(part, str) else None
    if found is None:
        return None
    return int(found[1] or 0), MAX_INDEX if found[2] is None else int(found[2])


def _own_name(name: str) -> str | None:
    """Return the dataset feature for a name in ``sft.keys``; None if there is none."""
    if name in ("action", "state"):
        return layout.ACTION if name == "action" else layout.STATE
    return f"observation.{name}" if name.startswith("images.") and len(name) > len("images.") else None


def _renamed(path: Path, features: dict[str, Feature], keys: Mapping[str, str]) -> dict[str, Feature]:
    """Return features by embodrl's names, in the order of the dataset."""
    own: dict[str, str] = {}
    for name, theirs in keys.items():
        ours = _own_name(name)
        if ours is None or theirs not in features or theirs in own:
            raise _wrong_key(path, features, keys, name)
        own[theirs] = ours
    kept = {name: feature for name, feature in features.items() if name in own or name not in own.values()}
    return {own.get(name, name): feature for name, feature in kept.items()}


def _wrong_key(path: Path, features: Mapping[str, Feature], keys: Mapping[str, str], name: str) -> EmbodrlError:
    theirs = keys[name]
    if _own_name(name) is None:
        message = f"sft.keys has the name '{name}'"
        return EmbodrlError(message, "the names are action, state and images.NAME", code="sft-keys")
    if theirs in features:
        return EmbodrlError(f"sft.keys has '{theirs}' twice", "name each feature once", code="sft-keys")
    near = nearest(theirs, list(features))
    message = f"sft.keys.{name} is '{theirs}', and {path} has no such feature; it has {_list(features)}"
    return EmbodrlError(message, f"the nearest is {near}" if near else "name one of these", code="sft-keys")


def _list(features: Mapping[str, Feature]) -> str:
    return ", ".join(name for name in features if name not in layout.COUNTERS) or "none"


def missing_action(directory: Path, info: Info) -> EmbodrlError:
    """Return the error for a dataset without actions, or with actions under another name."""
    columns = [name for name, feature in info.features.items() if feature.dtype not in PICTURES]
    by_last = {name.rpartition(".")[2]: name for name in reversed(columns)}
    near = {ours: nearest(ours, list(by_last)) for ours in ("action", "state")}
    full = {ours: by_last[last] for ours, last in near.items() if last}
    if "action" in full:
        hint = f"the nearest is {full['action']}: "
    else:
        hint = "name the feature that holds the robot's actions: "
        full = {"action": "FEATURE"}
    if layout.STATE in info.features:
        full.pop("state", None)
    hint += f"sft.keys={{{', '.join(f'{ours}: {theirs}' for ours, theirs in full.items())}}}"
    message = f"{directory} has no feature '{layout.ACTION}'; it has {_list(info.features)}"
    return EmbodrlError(message, hint, code="dataset-no-actions")


def _left_out(directory: Path, info: Info) -> dict[str, str]:
    """Return why cameras can't be used.

    Cameras without any file are listed only if another camera has files: otherwise the videos were not copied.
    """
    depth = [name for name, feature in info.features.items() if feature.is_depth]
    reasons = dict.fromkeys(depth, "it holds depth (is_depth_map), not colours")
    videos = [name for name, feature in info.features.items() if feature.dtype == "video"]
    own = (
        directory / layout.OWN_META
    ).is_file()  # embodrl writes files for all cameras, so that a missing one was lost
    if info.video_path is not None and layout.is_relative(info.video_path) and not own:
        empty = [name for name in videos if not _has_files(directory, info.video_path, info.features[name].column)]
        if len(empty) < len(videos):
            reasons |= dict.fromkeys(empty, "info.json declares it, but it has no file")
    return reasons


def _has_files(directory: Path, template: str, video_key: str) -> bool:
    pattern = layout.any_index(template.replace("{video_key}", layout.escaped(video_key)))
    return next(directory.glob(pattern), None) is not None


def choose_cameras(directory: Path, info: Info, cameras: Sequence[str] | None) -> list[str]:
    """Return the features of ``cameras`` (None: all usable ones); EmbodrlError if one is missing or unusable."""
    present = info.cameras
    if cameras is None:
        return present
    by_name = {key: key for key in present} | {key.removeprefix(layout.IMAGES): key for key in present}
    unusable = dict(info.left_out) | {key.removeprefix(layout.IMAGES): why for key, why in info.left_out.items()}
    for name in cameras:
        if name not in by_name:
            names = [key.removeprefix(layout.IMAGES) for key in present]
            near = nearest(name, names)
            why = f": {unusable[name]}" if name in unusable else ""
            raise EmbodrlError(
                f"{directory} has no camera '{name}'{why}; it has {', '.join(names) or 'none'}",
                f"set sft.cameras=[{near}]" if near and len(cameras) == 1 else "set sft.cameras to some of these",
                code="sft-camera-missing",
            )
    return [by_name[name] for name in cameras]
