"""Reading LeRobot data sets, v3.0 and v2.x, of any origin.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from embodrl.data import lerobot as layout
from embodrl.data.columns import Array
from embodrl.data.demos import Demos, damaged
from embodrl.data.video_file import read_video
from embodrl.errors import EmbodrlError
from embodrl.names import nearest

Info = dict[str, Any]
# The part of the free memory that images may fill.
MEMORY_FRACTION = 0.7


@dataclass
class Located:
    """Where an episode is.

    Attributes:
        number: its episode_index.
        length: frames.
        data: the parquet file with its rows.
        videos: file and first frame there, by camera feature; without those stored as pictures in ``data``.
        task: name of the task, None where the data set has only instructions.
    """

    number: int
    length: int
    data: Path
    videos: dict[str, tuple[Path, int]]
    task: str | None = None


def read_info(directory: Path) -> Info:
    """Return meta/info.json.

    Raises:
        EmbodrlError: it is damaged, or of a version that is not read.
    """
    path = directory / layout.INFO
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        version, features = info["codebase_version"], info["features"]
        info["fps"] = float(info["fps"])
        all(feature["dtype"] and feature["shape"] for feature in features.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"{type(error).__name__} {error}") from error
    if version not in layout.READABLE:
        raise EmbodrlError(
            f"{path} is of version {version}; read are {', '.join(layout.READABLE)}",
            "convert it with the tools of the lerobot package",
        )
    return info


def camera_keys(info: Info) -> list[str]:
    """Return the features that are pictures, in the order of the data set."""
    return [key for key, feature in info["features"].items() if feature["dtype"] in ("video", "image")]


def choose_cameras(directory: Path, info: Info, cameras: Sequence[str] | None) -> list[str]:
    """Return the features of ``cameras``; None takes all.

    Raises:
        EmbodrlError: one is not there.
    """
    present = camera_keys(info)
    if cameras is None:
        return present
    by_name = {key: key for key in present} | {key.removeprefix(layout.IMAGES): key for key in present}
    for name in cameras:
        if name not in by_name:
            names = [key.removeprefix(layout.IMAGES) for key in present]
            near = nearest(name, names)
            raise EmbodrlError(
                f"{directory} has no camera '{name}'; it has {', '.join(names) or 'none'}",
                f"set sft.cameras=[{near}]" if near and len(cameras) == 1 else "set sft.cameras to some of these",
            )
    return [by_name[name] for name in cameras]


def load_lerobot(
    directory: Path,
    max_episodes: int | None = None,
    cameras: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
) -> Demos:
    """Load a data set; see ``load_demos``."""
    info = read_info(directory)
    keys = choose_cameras(directory, info, cameras)
    layout.require("pyarrow", "pyarrow.parquet")
    for name in (layout.ACTION,):
        if name not in info["features"]:
            raise EmbodrlError(f"{directory} has no feature '{name}'", "use a data set with the actions of a robot")
    try:
        episodes = (_locate if info["codebase_version"] == layout.VERSION else _locate_v2)(directory, info, keys)
        tasks = _read_tasks(directory, info)
        if not episodes:
            raise EmbodrlError(f"{directory} holds no episodes", "collect more")
        return _load(directory, info, episodes[:max_episodes], tasks, keys, size)
    except FileNotFoundError as error:
        raise damaged(Path(error.filename or directory), "it is missing") from error
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise damaged(directory, f"{type(error).__name__} {error}") from error


def _read_table(path: Path, columns: list[str] | None = None) -> Any:
    (parquet,) = layout.require("pyarrow.parquet")
    if not path.is_file():
        raise FileNotFoundError(2, "missing", str(path))
    return parquet.read_table(path, columns=columns, partitioning=None)


def _locate(directory: Path, info: Info, keys: list[str]) -> list[Located]:
    """Return the episodes of v3.0, in their order."""
    videos = [key for key in keys if info["features"][key]["dtype"] == "video"]
    rows: list[dict[str, Any]] = []
    for path in sorted((directory / "meta" / "episodes").glob("*/*.parquet")):
        table = _read_table(path)
        rows += table.select([name for name in table.column_names if not name.startswith("stats/")]).to_pylist()

    def place(template: str, kind: str, row: dict[str, Any], **names: str) -> Path:
        at = {name: row[f"{kind}/{name}"] for name in ("chunk_index", "file_index")}
        return layout.within(directory, template.format(**at, **names))

    return [
        Located(
            row["episode_index"],
            row["length"],
            place(info["data_path"], "data", row),
            {
                key: (
                    place(info["video_path"], f"videos/{key}", row, video_key=key),
                    round(row[f"videos/{key}/from_timestamp"] * info["fps"]),
                )
                for key in videos
            },
            row.get(layout.OWN_TASK),
        )
        for row in sorted(rows, key=lambda row: row["episode_index"])
    ]


def _locate_v2(directory: Path, info: Info, keys: list[str]) -> list[Located]:
    """Return the episodes of v2.x, which has one file per episode, in their order."""
    videos = [key for key in keys if info["features"][key]["dtype"] == "video"]
    lines = (directory / "meta" / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    result: list[Located] = []
    for row in sorted((json.loads(line) for line in lines if line), key=lambda row: row["episode_index"]):
        number = row["episode_index"]
        at = {"episode_index": number, "episode_chunk": number // info["chunks_size"]}
        files = {key: (layout.within(directory, info["video_path"].format(**at, video_key=key)), 0) for key in videos}
        result.append(Located(number, row["length"], layout.within(directory, info["data_path"].format(**at)), files))
    return result


def _read_tasks(directory: Path, info: Info) -> dict[int, str]:
    """Return the instructions by task_index."""
    if info["codebase_version"] != layout.VERSION:
        lines = (directory / "meta" / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
        return {row["task_index"]: row["task"] for row in (json.loads(line) for line in lines if line)}
    table = _read_table(directory / layout.TASKS)
    # The instructions are the index of a pandas table, whose name differs with the version that wrote it.
    (words,) = [name for name in table.column_names if name != "task_index"]
    return dict(zip(table["task_index"].to_pylist(), table[words].to_pylist(), strict=True))


def _load(
    directory: Path,
    info: Info,
    episodes: list[Located],
    tasks: dict[int, str],
    keys: list[str],
    size: tuple[int, int] | None,
) -> Demos:
    lengths = np.array([episode.length for episode in episodes])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    shapes = {key: _picture_size(info["features"][key]) for key in keys}
    wanted = size or next(iter(shapes.values()), (0, 0))
    if size is None and any(shape != wanted for shape in shapes.values()):
        raise EmbodrlError(
            f"the cameras of {directory} differ in size: {shapes}", "choose cameras of one size, or give a size"
        )
    _check_memory(directory, int(starts[-1]), len(keys), wanted)
    images = np.zeros((int(starts[-1]), len(keys), *wanted, 3), np.uint8)
    features = [layout.ACTION, *([layout.STATE] if layout.STATE in info["features"] else [])]
    pictures = [key for key in keys if info["features"][key]["dtype"] == "image"]
    vectors: dict[str, list[NDArray[np.float32]]] = {name: [] for name in features}
    instructions: list[str] = []
    loaded: tuple[Path, Any] = Path(), None
    for episode, start in zip(episodes, starts, strict=False):
        if loaded[0] != episode.data:
            names = ["episode_index", "frame_index", "task_index", *features, *pictures]
            loaded = episode.data, _read_table(episode.data, names)
        table = _rows_of(loaded[1], episode)
        for name in features:
            vectors[name].append(_vector(table[name], episode.length))
        instructions.append(tasks[int(table["task_index"][0].as_py())])
        for key in pictures:
            for frame, picture in enumerate(table[key].to_pylist()):
                images[start + frame, keys.index(key)] = _resized(_decode(picture), wanted)
    for view, key in enumerate(keys):
        if key not in pictures:
            _fill_from_videos(images[:, view], key, episodes, starts, wanted)
    episode_of = np.repeat(np.arange(len(episodes)), lengths)
    actions = np.concatenate(vectors[layout.ACTION])
    state = vectors.get(layout.STATE)
    return Demos(
        images=images,
        state=np.concatenate(state) if state else np.zeros((len(actions), 0), np.float32),
        actions=actions,
        episode=episode_of,
        last=(starts[1:] - 1)[episode_of],
        instructions=instructions,
        tasks=[episode.task or words for episode, words in zip(episodes, instructions, strict=True)],
    )


def _rows_of(table: Any, episode: Located) -> Any:
    number = table["episode_index"].to_numpy()
    rows = np.flatnonzero(number == episode.number)
    rows = rows[np.argsort(table["frame_index"].to_numpy()[rows], kind="stable")]
    if len(rows) != episode.length:
        raise damaged(
            episode.data, f"episode {episode.number} has {len(rows)} rows, and {episode.length} by meta/episodes"
        )
    return table.take(rows)


def _vector(column: Any, length: int) -> NDArray[np.float32]:
    """Return a column of numbers or lists as ``float32[N,D]``."""
    values = column.combine_chunks()
    while hasattr(values, "flatten") and hasattr(values.type, "value_type"):
        values = values.flatten()
    return np.asarray(values.to_numpy(zero_copy_only=False), np.float32).reshape(length, -1)


def _picture_size(feature: dict[str, Any]) -> tuple[int, int]:
    """Return height and width; some data sets give the channels first."""
    shape = feature["shape"]
    first = shape[0] == 3 and shape[-1] != 3
    return (shape[1], shape[2]) if first else (shape[0], shape[1])


def _check_memory(directory: Path, frames: int, cameras: int, size: tuple[int, int]) -> None:
    wanted = frames * cameras * size[0] * size[1] * 3
    free = psutil.virtual_memory().available
    if wanted > MEMORY_FRACTION * free:
        raise EmbodrlError(
            f"the pictures of {frames} frames in {directory} take {wanted / 2**30:.1f} GB of memory at"
            f" {size[0]} x {size[1]}, and {free / 2**30:.1f} GB are free",
            "set sft.max_episodes, fewer sft.cameras, or smaller env.cameras",
        )


def _fill_from_videos(
    target: NDArray[np.uint8], key: str, episodes: list[Located], starts: Array, size: tuple[int, int]
) -> None:
    """Decode every file once, as far as it is needed, into ``target uint8[N,H,W,3]``."""
    files: dict[Path, list[tuple[int, int, int]]] = {}
    for episode, start in zip(episodes, starts, strict=False):
        path, first = episode.videos[key]
        files.setdefault(path, []).append((first, int(start), episode.length))
    for path, spans in files.items():
        if not path.is_file():
            raise FileNotFoundError(2, "missing", str(path))
        frames: Iterator[NDArray[np.uint8]] = read_video(path, min(spans)[0])
        at = min(spans)[0]
        for first, start, length in sorted(spans):
            while at < first + length:
                frame = next(frames, None)
                if frame is None:
                    raise damaged(path, f"it ends after {at} frames, and {first + length} are needed")
                if at >= first:
                    target[start + at - first] = _resized(frame, size)
                at += 1


def _decode(picture: Any) -> NDArray[np.uint8]:
    from PIL import Image

    if not isinstance(picture, dict) or not picture.get("bytes"):
        raise ValueError("a picture is not embedded in the parquet file")
    return np.asarray(Image.open(io.BytesIO(picture["bytes"])).convert("RGB"))


def _resized(frame: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return ``uint8[H,W,3]``, by a bilinear filter as wide as the reduction; what has that size stays as it is."""
    if frame.shape[:2] == size:
        return frame
    from PIL import Image

    return np.asarray(Image.fromarray(frame).resize((size[1], size[0]), Image.Resampling.BILINEAR))
