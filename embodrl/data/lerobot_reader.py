"""Reader of LeRobot datasets, v3.0 and v2.x, of any origin: everything read is bounded and checked.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data import lerobot as layout
from embodrl.data.demos import (
    ACTED_BY,
    EXECUTED,
    HINT,
    POLICY_VERSION,
    Demos,
    check_numbers,
    damaged,
    layout_error,
)
from embodrl.data.lerobot_episodes import Clip, Located, locate, of_the_train_split, read_tasks
from embodrl.data.lerobot_info import Feature, Info, choose_cameras, missing_action, read_info
from embodrl.data.lerobot_outcomes import OTHERS, SUCCESS, outcome_columns, read_outcomes
from embodrl.data.lerobot_videos import check_size, frames_at, frames_of, shown_in
from embodrl.data.parquet import Table
from embodrl.data.pictures import Place, in_memory
from embodrl.errors import EmbodrlError, FileDamagedError
from embodrl.fields import read_fields
from embodrl.storage.integrity import check_checksums

logger = logging.getLogger(__name__)

OTHER_CLOCK_S = 86_400.0
"""No episode begins a day into its video: larger times come from another clock, e.g. seconds since 1970."""
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""Formats that Pillow decodes itself; for others, e.g. EPS, it starts external programs."""


def load_lerobot(
    directory: Path,
    max_episodes: int | None = None,
    cameras: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    keys: Mapping[str, str] | None = None,
    place: Place = in_memory,
) -> Demos:
    """Load a dataset; arguments and errors as in ``load_demos``."""
    episode_files = [path.relative_to(directory).as_posix() for path in (directory / "meta/episodes").glob("*/*")]
    checked = check_checksums(directory, [layout.INFO, layout.STATS, layout.TASKS, *episode_files], complete=True)
    info = read_info(directory, keys)
    chosen = choose_cameras(directory, info, cameras)
    if layout.ACTION not in info.features:
        raise missing_action(directory, info)
    every = locate(directory, info, chosen)
    kept, note = of_the_train_split(info, every)
    for line in [*(info.notes if cameras is None else []), *([note] if note else [])]:
        logger.warning("%s: %s", directory, line)
    episodes = kept[:max_episodes]
    if checked:
        files = {episode.data for episode in episodes}
        files |= {clip.path for episode in episodes for clip in episode.videos.values()}
        check_checksums(directory, sorted(path.relative_to(directory).as_posix() for path in files), complete=True)
    numbers = {episode.number for episode in episodes}
    others = [episode for episode in every if episode.number not in numbers]
    loading = _Loading(info, episodes, others, chosen, size)
    return loading.load(read_tasks(directory, info), place)


class _Loading:
    """Reads the frames of some episodes into one array per column.

    Images are resized to ``size`` (height, width); None keeps the dataset's size. ``others`` are the episodes that are
    not read. Raises EmbodrlError if the cameras differ in size.
    """

    def __init__(
        self,
        info: Info,
        episodes: list[Located],
        others: list[Located],
        keys: list[str],
        size: tuple[int, int] | None,
    ) -> None:
        self.directory = directory = info.path.parents[1]
        self.info = info
        self.episodes = episodes
        self.others = others
        self.keys = keys
        self.lengths = [episode.length for episode in episodes]
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        shapes = {key: info.features[key].picture_size for key in keys}
        self.size = size or next(iter(shapes.values()), (0, 0))
        if size is None and any(shape != self.size for shape in shapes.values()):
            raise EmbodrlError(
                f"the cameras of {directory} differ in size: {shapes}",
                "choose cameras of one size, or give a size",
                code="dataset-camera-sizes",
            )
        self.images = np.zeros((0, len(keys), *self.size, 3), np.uint8)
        self.times = np.zeros(int(self.starts[-1]))
        """Seconds since the first frame of the episode."""
        self.unlisted = 0
        """Rows of unlisted episodes."""
        self.restarted = 0
        """Episodes whose times come from another clock than their videos."""

    def load(self, tasks: dict[int, str], place: Place) -> Demos:
        """Read all frames; ``tasks`` maps task_index to instruction."""
        self.images = place(self.directory, (len(self.times), *self.images.shape[1:]))
        vectors, instructions = self._rows(tasks)
        for view, key in enumerate(self.keys):
            if self.info.features[key].dtype == "video":
                self._fill_from_videos(view, key)
        if self.unlisted:
            what = "%s: %d rows are left out: meta/episodes does not list their episodes"
            logger.warning(what, self.directory, self.unlisted)
        if self.restarted:
            what = (
                "%s: timestamp of %d episodes comes from a clock, e.g. since 1970: it is counted from their first rows"
            )
            logger.warning(what, self.directory, self.restarted)
        columns = {name: np.concatenate(parts) for name, parts in vectors.items()}
        columns.setdefault(layout.STATE, np.zeros((len(self.images), 0), np.float32))
        features = self.info.features
        _warn_outside(self.info, {features[name].column: columns[name] for name in columns if name in features})
        known = {name: columns[name] for name in (ACTED_BY, POLICY_VERSION) if name in columns}
        known |= read_outcomes(columns, self.directory)
        return Demos.of_episodes(
            {"images": self.images, "state": columns[layout.STATE], "actions": columns[layout.ACTION], **known},
            self.lengths,
            instructions,
            [one.task or instructions[start] for one, start in zip(self.episodes, self.starts, strict=False)],
            self._seeds_and_success(columns.get(SUCCESS)),
        )

    def _seeds_and_success(self, success: NDArray[np.float32] | None) -> list[tuple[int | None, bool | None]]:
        """Return the seed and success of each episode; success from ``next.success`` if not recorded otherwise."""
        found: list[tuple[int | None, bool | None]] = []
        for episode, start in zip(self.episodes, self.starts, strict=False):
            seed, solved = episode.outcome
            if solved is None and success is not None:
                solved = bool((success[start : start + episode.length] != 0).any())
            found.append((seed, solved))
        return found

    def _vectors(self) -> dict[str, Feature]:
        features = self.info.features
        single = [name for name in outcome_columns(features.keys()) if name not in OTHERS or features[name].size == 1]
        names = (layout.ACTION, layout.STATE, *single)
        own = (ACTED_BY, *((POLICY_VERSION,) if EXECUTED in features else ()))  # others' columns may mean anything
        names += tuple(name for name in own if name in features and features[name].dtype == "int64")
        return {name: features[name] for name in names if name in features}

    def _rows(self, tasks: dict[int, str]) -> tuple[dict[str, list[NDArray[np.float32]]], list[str]]:
        """Return the columns of each episode and the instruction of each frame; fill in images stored in rows."""
        features = self._vectors()
        pictures = {key: self.info.features[key] for key in self.keys if self.info.features[key].dtype == "image"}
        columns = [feature.column for feature in (*features.values(), *pictures.values())]
        vectors: dict[str, list[NDArray[np.float32]]] = {name: [] for name in features}
        instructions: list[str] = []
        table: Table | None = None
        values: dict[str, NDArray[np.float32]] = {}
        for episode, start in zip(self.episodes, self.starts, strict=False):
            path = self._data_of(episode)
            if table is None or table.path != path:
                table = Table(path, columns, optional=[*layout.COUNTERS])
                values = {name: table.vectors(one.column, one.size) for name, one in features.items()}
                self._count_unlisted(table)
            rows = _rows_of(table, episode)
            for name, every in values.items():
                vectors[name].append(every[rows])
                if name not in OTHERS:  # only offline learning needs these
                    check_numbers(table.path, features[name].column, every[rows], episode.number)
            instructions += _instructions(table, rows, episode, tasks)
            if len(pictures) < len(self.keys):  # only videos are read by time
                self.times[start : start + episode.length] = self._times_of(table, rows)
            for key, feature in pictures.items():
                for frame, encoded in enumerate(table.pictures(feature.column, rows)):
                    what = f"episode {episode.number}, frame {frame}: {feature.column}"
                    picture = _decode(table.path, what, encoded, feature.picture_size)
                    self.images[start + frame, self.keys.index(key)] = resized(picture, self.size)
        return vectors, instructions

    def _count_unlisted(self, table: Table) -> None:
        if "episode_index" in table.names:
            numbers, counts = np.unique(table.integers("episode_index"), return_counts=True)
            found = zip(numbers.tolist(), counts.tolist(), strict=True)
            self.unlisted += sum(count for number, count in found if number not in self._listed)

    @cached_property
    def _listed(self) -> set[int]:
        return {episode.number for episode in (*self.episodes, *self.others)}

    def _data_of(self, episode: Located) -> Path:
        """Return the file with the rows of an episode: the one named by meta/episodes unless another has them."""
        if self.info.version != layout.VERSION or episode.number not in self._elsewhere:
            return episode.data
        return self._elsewhere[episode.number]

    @cached_property
    def _elsewhere(self) -> dict[int, Path]:
        """Files of v3.0 episodes without rows where meta/episodes points, which some converters leave stale."""
        named: dict[Path, set[int]] = {}
        for episode in self.episodes:
            named.setdefault(episode.data, set()).add(episode.number)
        lost = set[int]()
        for path, numbers in named.items():
            if not path.is_file():
                lost |= numbers
            else:
                lost |= numbers - _episodes_in(path)
        others = sorted((self.directory / "data").glob("*/*.parquet")) if lost else []
        found = {number: path for path in others for number in _episodes_in(path) & lost}
        if found:
            what = "%s: the rows of %d episodes were found in other files than meta/episodes names"
            logger.warning(what, self.directory, len(found))
        return found

    def _times_of(self, table: Table, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        if "timestamp" not in table.names:
            return np.arange(len(rows)) / self.info.fps
        times = table.seconds("timestamp", rows)
        is_other_clock = bool(times[0] >= OTHER_CLOCK_S)
        self.restarted += is_other_clock
        return times - times[0] if is_other_clock else times

    def _fill_from_videos(self, view: int, key: str) -> None:
        """Decode every file once, as far as needed."""
        files: dict[Path, list[int]] = {}
        for place, episode in enumerate(self.episodes):
            files.setdefault(episode.videos[key].path, []).append(place)
        begins = _begins_by_file([*self.episodes, *self.others], key)
        partly = {episode.videos[key].path for episode in self.others}
        longer: list[str] = []
        for path, places in files.items():
            rows = np.concatenate([np.arange(self.starts[n], self.starts[n + 1]) for n in places])
            shown = shown_in(path)
            clips = [self.episodes[n].videos[key] for n in places]
            begin_s = min(clip.begin_s for clip in clips)
            is_whole = path not in partly and begin_s * self.info.fps < 0.5
            for place in places:
                self._check_order(place)
            firsts = [self.times[self.starts[n]] + clip.begin_s for n, clip in zip(places, clips, strict=True)]
            # With one frame per row, the start of the clock does not matter, as long as it is one clock.
            offset_s = float(min(firsts)) - begin_s if is_whole and len(shown) == len(rows) else 0.0
            for place, clip in zip(places, clips, strict=True):
                self._check_bounds(place, clip, begins[path], offset_s)
            times_s = np.concatenate([self._times_in(n) + clip.begin_s for n, clip in zip(places, clips, strict=True)])
            name = partial(self._name_of, rows)
            numbers, surplus = frames_at(path, shown, times_s, self.info.fps, name, is_whole)
            for at, frame in frames_of(path, numbers, self.info.features[key].picture_size):
                self.images[rows[at], view] = resized(frame, self.size)
            if surplus and path not in partly:
                longer.append(f"{path} ({surplus})")
        if longer:
            what = "%s: %d video files have frames after the last row: %s; do rows and images belong together?"
            logger.warning(what, self.directory, len(longer), ", ".join(longer[:3]) + ", ..." * (len(longer) > 3))

    def _times_in(self, place: int) -> NDArray[np.float64]:
        return self.times[self.starts[place] : self.starts[place + 1]]

    def _check_order(self, place: int) -> None:
        """Reject timestamps of an episode that are null or decreasing."""
        times = self._times_in(place)
        first = int(self.starts[place])
        if len(unknown := np.flatnonzero(~np.isfinite(times))):
            hint = "correct timestamp, or omit the column: rows are then 1/fps apart"
            raise self._untimely(place, f"{self._name(first + int(unknown[0]))} is not finite", hint)
        if len(earlier := np.flatnonzero(np.diff(times) < 0)):
            at = int(earlier[0]) + 1
            problem = f"{self._name(first + at)} is {times[at]:.4f} s, and {times[at - 1]:.4f} s of the frame before it"
            hint = "correct timestamp or frame_index: images are located by timestamp, and actions by frame_index"
            raise self._untimely(place, problem, hint)

    def _check_bounds(self, place: int, clip: Clip, begins: NDArray[np.float64], offset_s: float) -> None:
        """Reject times at which the video file shows another episode.

        ``begins`` are the ascending start times in seconds of the episodes in that file; ``offset_s`` is the delay of
        all row times.
        """
        times = self._times_in(place)
        first = int(self.starts[place])
        half_s = 0.5 / self.info.fps
        hint = "correct timestamp, in seconds since the episode's first frame, or from_timestamp and to_timestamp"
        hint += " in meta/episodes"
        if clip.begin_s >= half_s and times[0] - offset_s < -half_s:
            problem = f"{self._name(first)} is {times[0]:.4f} s, but its images begin at {offset_s:.4f} s"
            raise self._untimely(place, problem, hint)
        # The stated end may be stale; the number of rows and the start of the next episode are reliable.
        span_s = max(clip.end_s - clip.begin_s, len(times) / self.info.fps)
        later = begins[begins.searchsorted(clip.begin_s + half_s) :]
        if len(later):
            span_s = min(span_s, float(later[0]) - clip.begin_s)
        if times[-1] - offset_s > span_s - half_s:
            problem = (
                f"{self._name(first + len(times) - 1)} is {times[-1]:.4f} s, but its images end at"
                f" {span_s + offset_s:.4f} s"
            )
            raise self._untimely(place, problem, hint)

    def _untimely(self, place: int, problem: str, hint: str) -> EmbodrlError:
        path = self._data_of(self.episodes[place])
        return EmbodrlError(f"{path}: timestamp of {problem}", hint, code="dataset-frame-times")

    def _name_of(self, rows: NDArray[np.int64], at: int) -> str:
        return self._name(int(rows[at]))

    def _name(self, row: int) -> str:
        place = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"episode {self.episodes[place].number}, frame {row - self.starts[place]}"


def _begins_by_file(episodes: Sequence[Located], key: str) -> dict[Path, NDArray[np.float64]]:
    """Return the ascending start times in seconds of the episodes in each file of a camera."""
    begins: dict[Path, list[float]] = {}
    for episode in episodes:
        begins.setdefault(episode.videos[key].path, []).append(episode.videos[key].begin_s)
    return {path: np.sort(np.array(each)) for path, each in begins.items()}


def _episodes_in(path: Path) -> set[int]:
    return set(Table(path, ["episode_index"]).integers("episode_index").tolist())


def _rows_of(table: Table, episode: Located) -> NDArray[np.int64]:
    """Return the indices of an episode's rows in frame order.

    Ordered by ``frame_index``, else by ``index`` or ``timestamp``, else as stored.
    """
    rows = np.arange(table.num_rows)
    if "episode_index" in table.names:
        rows = np.flatnonzero(table.integers("episode_index") == episode.number)
    if len(rows) != episode.length:
        what = f"episode {episode.number} has {len(rows)} rows, and {episode.length} by meta/episodes"
        if len(rows) > episode.length:
            hint = "meta/episodes is older than the rows, or two episodes share a number: correct the wrong one"
            raise layout_error(table.path, what, hint)
        raise damaged(table.path, what)
    if "frame_index" in table.names:
        frames = table.integers("frame_index")[rows]
        if not np.array_equal(np.sort(frames), np.arange(len(rows))):
            raise damaged(table.path, f"frame_index of episode {episode.number} is not 0 to {len(rows) - 1}")
        return rows[np.argsort(frames)]
    if "index" in table.names:
        return rows[np.argsort(table.integers("index")[rows], kind="stable")]
    if "timestamp" in table.names:
        return rows[np.argsort(table.seconds("timestamp", rows), kind="stable")]
    return rows


def _instructions(table: Table, rows: NDArray[np.int64], episode: Located, tasks: Mapping[int, str]) -> list[str]:
    if "task_index" not in table.names:
        if len(tasks) != 1:
            problem = f"it has no column task_index, but meta/tasks has {len(tasks)} tasks"
            raise layout_error(table.path, problem, "add the column, or keep one task in meta/tasks")
        return [*tasks.values()] * len(rows)
    numbers = table.integers("task_index")[rows].tolist()
    if unknown := set(numbers) - tasks.keys():
        what = f"episode {episode.number} has task_index {min(unknown)}, which meta/tasks lacks"
        raise damaged(table.path, what)
    return [tasks[number] for number in numbers]


def _warn_outside(info: Info, columns: Mapping[str, NDArray[np.float32]]) -> None:
    """Warn about columns with values outside the range stated by the dataset, which was then changed or damaged.

    Nothing else reads these statistics, so an impossible comparison is no reason to reject the dataset.
    """
    path = info.path.with_name("stats.json")
    if not path.is_file():
        return
    for name, values in columns.items():
        try:
            stats = read_fields(path, FileDamagedError, HINT)
            if name not in stats or not values.size:
                continue
            low, high = (np.array(stats.fields(name).numbers(bound, values.shape[1])) for bound in ("min", "max"))
        except FileDamagedError as error:
            logger.warning("the range of %s can't be compared with the dataset's statistics: %s", name, error.message)
            continue
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
        picture = Image.open(io.BytesIO(encoded), formats=PICTURE_FORMATS)
        check_size(path, what, (picture.size[1], picture.size[0]), size)
        return np.asarray(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise damaged(path, f"{what} can't be decoded: {error}") from error


def resized(frame: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resize to ``uint8[H,W,3]`` with an antialiased bilinear filter; images of that size are returned as is."""
    if frame.shape[:2] == size:
        return frame
    from PIL import Image

    return np.asarray(Image.fromarray(frame).resize((size[1], size[0]), Image.Resampling.BILINEAR))
