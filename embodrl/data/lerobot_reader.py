"""Reading LeRobot datasets, v3.0 and v2.x, of any origin: everything that is read is bounded and checked.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from embodrl.data import lerobot as layout
from embodrl.data.demos import ACTED_BY, EXECUTED, HINT, MAX_FRAMES, REWARD, TERMINATED, Demos, check_numbers, damaged
from embodrl.data.parquet import MEMORY_FRACTION, Table
from embodrl.data.video_file import read_video
from embodrl.errors import EmbodrlError, FileDamagedError
from embodrl.fields import Fields, parse_fields, read_fields
from embodrl.names import nearest
from embodrl.storage.integrity import check_checksums

logger = logging.getLogger(__name__)

OUTCOMES = (EXECUTED, REWARD, TERMINATED)

MAX_INDEX = 10**7
"""Of episodes, tasks, files and chunks."""
MAX_PIXELS = 2**14
MAX_DIMENSIONS = 10**6
MAX_TASK_LENGTH = 10_000
MAX_JSONL_BYTES = 2**30


@dataclass(frozen=True)
class Feature:
    """A column of the dataset: its dtype ("video" and "image" are pictures) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of values in a frame."""
        return int(np.prod(self.shape))

    @property
    def picture_size(self) -> tuple[int, int]:
        """Height and width; some datasets give the channels first."""
        first = self.shape[0] == 3 and self.shape[-1] != 3
        return (self.shape[1], self.shape[2]) if first else (self.shape[0], self.shape[1])


@dataclass(frozen=True)
class Info:
    """meta/info.json.

    Attributes:
        path: of the file.
        version: of the format.
        fps: frames per second.
        features: by name.
        data_path, video_path: templates; the latter None without videos.
        chunks_size: episodes per directory, in v2.
        totals: stated numbers of episodes and frames, None where they are not stated.
        robot_type: as its writer has named it; None where it is not stated.
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

    @property
    def cameras(self) -> list[str]:
        """The features that are pictures, in the order of the dataset."""
        return [name for name, feature in self.features.items() if feature.dtype in ("video", "image")]


@dataclass
class Located:
    """Where an episode is.

    Attributes:
        number: its episode_index.
        length: frames.
        data: the parquet file with its rows.
        videos: file and first frame there, by camera feature; without those stored as pictures in ``data``.
        task: name of the task, None where the dataset has only instructions.
        outcome: reset seed and success, None where the dataset does not tell.
    """

    number: int
    length: int
    data: Path
    videos: dict[str, tuple[Path, int]]
    task: str | None = None
    outcome: tuple[int | None, bool | None] = (None, None)


def read_info(directory: Path) -> Info:
    """Return meta/info.json.

    Raises:
        EmbodrlError: it is damaged, or of an unsupported version.
    """
    path = directory / layout.INFO
    info = read_fields(path, FileDamagedError, HINT)
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
    features = info.fields("features")
    return Info(
        path,
        version,
        info.number("fps", low=1e-3, high=1e5),
        {name: _feature(features.fields(name)) for name in features},
        layout.check_template(info.text("data_path"), names, path),
        video_path,
        1 if v3 else info.integer("chunks_size", low=1),
        (info.integer("total_episodes", None), info.integer("total_frames", None)),
        None if info.content.get("robot_type") in (None, "", "unknown") else info.text("robot_type"),
    )


def _feature(fields: Fields) -> Feature:
    dtype = fields.text("dtype")
    shape = fields.numbers("shape")
    picture = dtype in ("video", "image")
    low, high = (1, MAX_PIXELS) if picture else (0, MAX_DIMENSIONS)
    if not all(low <= size <= high and size.is_integer() for size in shape) or (picture and len(shape) != 3):
        fields.refuse(f"'shape' is {shape} with dtype {dtype}; sizes are {low} to {high}, pictures have 3")
    return Feature(dtype, tuple(int(size) for size in shape) or (1,))


def choose_cameras(directory: Path, info: Info, cameras: Sequence[str] | None) -> list[str]:
    """Return the features of ``cameras``; None takes all.

    Raises:
        EmbodrlError: one is missing.
    """
    present = info.cameras
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
                code="sft-camera-missing",
            )
    return [by_name[name] for name in cameras]


def load_lerobot(
    directory: Path,
    max_episodes: int | None = None,
    cameras: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
) -> Demos:
    """Load a dataset; arguments and errors are those of ``load_demos``."""
    episode_files = [path.relative_to(directory).as_posix() for path in (directory / "meta/episodes").glob("*/*")]
    checked = check_checksums(directory, [layout.INFO, layout.STATS, layout.TASKS, *episode_files], complete=True)
    info = read_info(directory)
    keys = choose_cameras(directory, info, cameras)
    if layout.ACTION not in info.features:
        raise EmbodrlError(
            f"{directory} has no feature '{layout.ACTION}'",
            "use a dataset with the actions of a robot",
            code="dataset-no-actions",
        )
    every = (_locate if info.version == layout.VERSION else _locate_v2)(directory, info, keys)
    _check_totals(info, every)
    if not every:
        raise EmbodrlError(f"{directory} holds no episodes", "collect more", code="dataset-empty")
    episodes = every[:max_episodes]
    if checked:
        files = {episode.data for episode in episodes}
        files |= {path for episode in episodes for path, _ in episode.videos.values()}
        check_checksums(directory, sorted(path.relative_to(directory).as_posix() for path in files), complete=True)
    return _Loading(directory, info, episodes, keys, size).load(_read_tasks(directory, info))


def _check_totals(info: Info, episodes: list[Located]) -> None:
    """Compare meta/episodes with what info.json states."""
    numbers = [episode.number for episode in episodes]
    if len(set(numbers)) < len(numbers):
        raise damaged(info.path.parent / "episodes", "an episode_index appears twice")
    found = (len(episodes), sum(episode.length for episode in episodes))
    for name, stated, actual in zip(("episodes", "frames"), info.totals, found, strict=True):
        if stated is not None and stated != actual:
            raise damaged(info.path, f"it states {stated} {name}, and meta/episodes has {actual}")


def _locate(directory: Path, info: Info, keys: list[str]) -> list[Located]:
    """Return the episodes of v3.0, in their order."""
    videos = [key for key in keys if info.features[key].dtype == "video"]

    def place(template: str | None, kind: str, row: Fields, **names: str) -> Path:
        if template is None:
            raise damaged(info.path, "it has no video_path, and features that are videos")
        at = {name: row.integer(f"{kind}/{name}", high=MAX_INDEX) for name in ("chunk_index", "file_index")}
        return layout.within(directory, template.format(**at, **names))

    episodes: list[Located] = []
    for path in sorted((directory / "meta" / "episodes").glob("*/*.parquet")):
        for row in Table(path, exclude="stats/").rows():
            files: dict[str, tuple[Path, int]] = {}
            for key in videos:
                start_s = row.number(f"videos/{key}/from_timestamp", low=0, high=MAX_FRAMES / info.fps)
                file = place(info.video_path, f"videos/{key}", row, video_key=key)
                files[key] = (file, round(start_s * info.fps))
            data = place(info.data_path, "data", row)
            outcome = (row.integer(layout.OWN_SEED, None), row.flag(layout.OWN_SUCCESS, None))
            episodes.append(Located(*_counts(row), data, files, row.text(layout.OWN_TASK, None), outcome))
    return sorted(episodes, key=lambda episode: episode.number)


def _locate_v2(directory: Path, info: Info, keys: list[str]) -> list[Located]:
    """Return the episodes of v2.x, which has one file per episode, in their order."""
    videos = [key for key in keys if info.features[key].dtype == "video"]
    if videos and info.video_path is None:
        raise damaged(info.path, "it has no video_path, and features that are videos")
    episodes: list[Located] = []
    for row in _read_lines(directory / "meta" / "episodes.jsonl"):
        number, length = _counts(row)
        at = {"episode_index": number, "episode_chunk": number // info.chunks_size}
        template = info.video_path or ""
        files = {key: (layout.within(directory, template.format(**at, video_key=key)), 0) for key in videos}
        episodes.append(Located(number, length, layout.within(directory, info.data_path.format(**at)), files))
    return sorted(episodes, key=lambda episode: episode.number)


def _counts(row: Fields) -> tuple[int, int]:
    return row.integer("episode_index", high=MAX_INDEX), row.integer("length", low=1, high=MAX_FRAMES)


def _read_lines(path: Path) -> list[Fields]:
    """Return the objects of a JSON-lines file."""
    try:
        if path.stat().st_size > MAX_JSONL_BYTES:
            raise damaged(path, f"it is larger than {MAX_JSONL_BYTES:,} bytes")
        lines = path.read_bytes().splitlines()
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error
    except OSError as error:
        raise damaged(path, error) from error
    return [
        parse_fields(line, f"{path}, line {number}", FileDamagedError, HINT)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _read_tasks(directory: Path, info: Info) -> dict[int, str]:
    """Return the instructions by task_index."""
    if info.version != layout.VERSION:
        path = directory / "meta" / "tasks.jsonl"
        pairs = [(row.integer("task_index", high=MAX_INDEX), row.text("task")) for row in _read_lines(path)]
    else:
        path = directory / layout.TASKS
        table = Table(path)
        # The instructions are the index of a pandas table, whose name differs with the version that wrote it.
        words = [name for name in table.names if name != "task_index"]
        if len(words) != 1 or "task_index" not in table.names:
            raise damaged(path, f"it has the columns {', '.join(table.names)}, not task_index and the instructions")
        pairs = list(zip(table.integers("task_index").tolist(), table.texts(words[0]), strict=True))
    tasks = dict(pairs)
    if len(tasks) < len(pairs) or any(len(words) > MAX_TASK_LENGTH for words in tasks.values()):
        raise damaged(path, f"a task_index appears twice, or an instruction is longer than {MAX_TASK_LENGTH}")
    return tasks


class _Loading:
    """Reads the frames of some episodes into one array per column.

    Args:
        directory: of the dataset.
        info: its meta/info.json.
        episodes: in their order.
        keys: features of the cameras.
        size: height and width that pictures are resized to; None keeps those of the dataset.

    Raises:
        EmbodrlError: the cameras differ in size, or the pictures do not fit in memory.
    """

    def __init__(
        self, directory: Path, info: Info, episodes: list[Located], keys: list[str], size: tuple[int, int] | None
    ) -> None:
        self.info = info
        self.episodes = episodes
        self.keys = keys
        self.lengths = [episode.length for episode in episodes]
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        frames = int(self.starts[-1])
        shapes = {key: info.features[key].picture_size for key in keys}
        self.size = size or next(iter(shapes.values()), (0, 0))
        if size is None and any(shape != self.size for shape in shapes.values()):
            raise EmbodrlError(
                f"the cameras of {directory} differ in size: {shapes}",
                "choose cameras of one size, or give a size",
                code="dataset-camera-sizes",
            )
        wanted = frames * len(keys) * self.size[0] * self.size[1] * 3
        free = psutil.virtual_memory().available
        if wanted > MEMORY_FRACTION * free:
            raise EmbodrlError(
                f"the pictures of {frames} frames in {directory} take {wanted / 2**30:.1f} GB of memory at"
                f" {self.size[0]} x {self.size[1]}, and {free / 2**30:.1f} GB are free",
                "set sft.max_episodes, fewer sft.cameras, or smaller env.cameras",
                code="dataset-too-large",
            )
        self.images = np.zeros((frames, len(keys), *self.size, 3), np.uint8)

    def load(self, tasks: dict[int, str]) -> Demos:
        """Return all frames; ``tasks`` are the instructions by task_index."""
        vectors, instructions = self._rows(tasks)
        for view, key in enumerate(self.keys):
            if self.info.features[key].dtype == "video":
                self._fill_from_videos(view, key)
        columns = {name: np.concatenate(parts) for name, parts in vectors.items()}
        columns.setdefault(layout.STATE, np.zeros((len(self.images), 0), np.float32))
        _warn_outside(self.info.path.with_name("stats.json"), columns)
        known = {name: columns[name] for name in (*OUTCOMES, ACTED_BY) if name in columns}
        return Demos.of_episodes(
            {"images": self.images, "state": columns[layout.STATE], "actions": columns[layout.ACTION], **known},
            self.lengths,
            instructions,
            [one.task or instructions[start] for one, start in zip(self.episodes, self.starts, strict=False)],
            [episode.outcome for episode in self.episodes],
        )

    def _rows(self, tasks: dict[int, str]) -> tuple[dict[str, list[NDArray[np.float32]]], list[str]]:
        """Return columns of each episode, and the instruction of each frame; fill in pictures that the rows hold."""
        features = self.info.features
        names = (layout.ACTION, layout.STATE, *(OUTCOMES if set(OUTCOMES) <= features.keys() else ()))
        names += (ACTED_BY,) if ACTED_BY in features and features[ACTED_BY].dtype == "int64" else ()
        sizes = {name: features[name].size for name in names if name in features}
        pictures = {view: key for view, key in enumerate(self.keys) if features[key].dtype == "image"}
        vectors: dict[str, list[NDArray[np.float32]]] = {name: [] for name in sizes}
        instructions: list[str] = []
        table: Table | None = None
        values: dict[str, NDArray[np.float32]] = {}
        for episode, start in zip(self.episodes, self.starts, strict=False):
            if table is None or table.path != episode.data:
                names = ["episode_index", "frame_index", "task_index", *sizes, *pictures.values()]
                table = Table(episode.data, names)
                values = {name: table.vectors(name, size) for name, size in sizes.items()}
            rows = _rows_of(table, episode)
            for name, every in values.items():
                vectors[name].append(every[rows])
                check_numbers(table.path, name, every[rows], episode.number)
            numbers = table.integers("task_index")[rows].tolist()
            if unknown := set(numbers) - tasks.keys():
                what = f"episode {episode.number} has task_index {min(unknown)}, which meta/tasks lacks"
                raise damaged(table.path, what)
            instructions += [tasks[number] for number in numbers]
            for view, key in pictures.items():
                for frame, encoded in enumerate(table.pictures(key, rows)):
                    what = f"episode {episode.number}, frame {frame}: {key}"
                    picture = _decode(table.path, what, encoded, features[key].picture_size)
                    self.images[start + frame, view] = resized(picture, self.size)
        return vectors, instructions

    def _fill_from_videos(self, view: int, key: str) -> None:
        """Decode every file once, as far as it is needed."""
        files: dict[Path, list[tuple[int, int, Located]]] = {}
        for episode, start in zip(self.episodes, self.starts, strict=False):
            path, first = episode.videos[key]
            files.setdefault(path, []).append((first, int(start), episode))
        for path, spans in files.items():
            spans.sort(key=lambda span: span[0])
            at = spans[0][0]
            frames = _video_frames(path, at, self.info.features[key].picture_size)
            for first, start, episode in spans:
                if first < at:
                    raise damaged(path, f"episode {episode.number} begins within the one before")
                while at < first + episode.length:
                    frame = next(frames, None)
                    if frame is None:
                        needed = f"{first + episode.length} are needed for episode {episode.number}"
                        raise damaged(path, f"it ends after {at} frames, and {needed}")
                    if at >= first:
                        self.images[start + at - first, view] = resized(frame, self.size)
                    at += 1


def _video_frames(path: Path, first: int, size: tuple[int, int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames of a file from number ``first`` on, which must have a height and width."""
    if not path.is_file():
        raise damaged(path, "it is missing")
    try:
        for frame in read_video(path, first, strict=True):
            if sorted(frame.shape[:2]) != sorted(size):
                found = f"{frame.shape[0]} x {frame.shape[1]}"
                raise damaged(path, f"its frames are {found}, and {size[0]} x {size[1]} by info.json")
            yield frame
    except OSError as error:
        raise damaged(path, error) from error


def _rows_of(table: Table, episode: Located) -> NDArray[np.int64]:
    """Return the numbers of an episode's rows, in the order of its frames."""
    rows = np.flatnonzero(table.integers("episode_index") == episode.number)
    frames = table.integers("frame_index")[rows]
    rows = rows[np.argsort(frames, kind="stable")]
    if len(rows) != episode.length:
        what = f"episode {episode.number} has {len(rows)} rows, and {episode.length} by meta/episodes"
        raise damaged(table.path, what)
    if not np.array_equal(np.sort(frames), np.arange(len(rows))):
        raise damaged(table.path, f"frame_index of episode {episode.number} is not 0 to {len(rows) - 1}")
    return rows


def _warn_outside(path: Path, columns: dict[str, NDArray[np.float32]]) -> None:
    """Warn of columns with values outside the range that the dataset states: it was changed, or is damaged."""
    if not path.is_file():
        return
    stats = read_fields(path, FileDamagedError, HINT)
    for name, values in columns.items():
        if name not in stats or not values.size:
            continue
        low, high = (np.array(stats.fields(name).numbers(bound, values.shape[1])) for bound in ("min", "max"))
        margin = 1e-3 * (high - low) + 1e-6
        outside = np.argwhere((values < low - margin) | (values > high + margin))
        if len(outside):
            frame, dimension = outside[0]
            logger.warning(
                "%s of %d frames is outside the range in %s, first: frame %d, %s[%d] is %g; check the dataset",
                name, len(np.unique(outside[:, 0])), path, frame, name, dimension, values[frame, dimension],
            )  # fmt: skip


def _decode(path: Path, what: str, encoded: bytes, size: tuple[int, int]) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(encoded))
        if sorted(picture.size) != sorted(size):
            stated = f"{size[0]} x {size[1]} by info.json"
            raise damaged(path, f"{what} is {picture.size[1]} x {picture.size[0]}, and {stated}")
        return np.asarray(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise damaged(path, f"{what} can't be decoded: {error}") from error


def resized(frame: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return ``uint8[H,W,3]``, by a bilinear filter as wide as the reduction; what has that size stays as it is."""
    if frame.shape[:2] == size:
        return frame
    from PIL import Image

    return np.asarray(Image.fromarray(frame).resize((size[1], size[0]), Image.Resampling.BILINEAR))
