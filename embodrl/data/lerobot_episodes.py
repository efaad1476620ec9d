"""Location of the episodes of a LeRobot dataset: rows, videos, instructions."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data import lerobot as layout
from embodrl.data.demos import HINT, MAX_FRAMES, damaged, layout_error
from embodrl.data.lerobot_info import MAX_INDEX, TRAIN, Info
from embodrl.data.parquet import Table
from embodrl.errors import EmbodrlError, FileDamagedError
from embodrl.fields import Fields, parse_fields, read_regular_file, with_whole_numbers

logger = logging.getLogger(__name__)

MAX_TASK_LENGTH = 10_000
MAX_JSONL_BYTES = 2**30


@dataclass(frozen=True)
class Clip:
    """Images of an episode from one camera.

    Attributes:
        begin_s: time of the first frame in the file, in seconds.
        end_s: time in the file at which the next episode begins; infinite if only the file's end is known.
    """

    path: Path
    begin_s: float = 0.0
    end_s: float = math.inf


@dataclass
class Located:
    """Location of an episode.

    Attributes:
        number: episode_index.
        length: frames.
        data: parquet file with its rows.
        videos: clips by camera feature, except images stored in ``data``.
        task: task name, None if the dataset has only instructions.
        outcome: reset seed and success, None if not recorded.
    """

    number: int
    length: int
    data: Path
    videos: dict[str, Clip]
    task: str | None = None
    outcome: tuple[int | None, bool | None] = (None, None)


def locate(directory: Path, info: Info, keys: Sequence[str]) -> list[Located]:
    """Return all episodes with the camera features ``keys``, ordered by index.

    Raises EmbodrlError if there are none, or the files that list them are damaged.
    """
    videos = [key for key in keys if info.features[key].dtype == "video"]
    if videos and info.video_path is None:
        raise layout_error(info.path, "it has video features, but no video_path", "add video_path to it")
    found = (_locate if info.version == layout.VERSION else _locate_v2)(directory, info, videos)
    _check_totals(info, found)
    if not found:
        raise EmbodrlError(f"{directory} holds no episodes", "collect more", code="dataset-empty")
    return sorted(found, key=lambda episode: episode.number)


def _check_totals(info: Info, episodes: list[Located]) -> None:
    """Compare meta/episodes with the totals of info.json: fewer episodes mean a missing part, more a stale total."""
    numbers = [episode.number for episode in episodes]
    if len(set(numbers)) < len(numbers):
        raise damaged(info.path.parent / "episodes", "an episode_index appears twice")
    found = (len(episodes), sum(episode.length for episode in episodes))
    for name, stated, actual in zip(("episodes", "frames"), info.totals, found, strict=True):
        if stated is not None and stated > actual:
            raise damaged(info.path, f"it states {stated} {name}; meta/episodes has {actual}")
        if stated is not None and stated < actual:
            logger.warning("%s states %d %s; meta/episodes has %d, which are read", info.path, stated, name, actual)


def of_the_train_split(info: Info, episodes: list[Located]) -> tuple[list[Located], str | None]:
    """Return the episodes of the split ``train`` (all if no split is stated), and a note on the omitted ones.

    Raises EmbodrlError if the split is empty.
    """
    if info.train is None:
        return episodes, None
    in_train = _within(info.train, np.array([one.number for one in episodes], np.int64))
    kept = [one for one, inside in zip(episodes, in_train.tolist(), strict=True) if inside]
    stated = f"splits.{TRAIN} of {info.path}"
    if not kept:
        raise layout_error(info.path, f"splits.{TRAIN} has none of its {len(episodes)} episodes", f"correct {stated}")
    others = len(episodes) - len(kept)
    return kept, f"{others} of {len(episodes)} episodes are left out: they are not in {stated}" if others else None


def _within(ranges: Sequence[tuple[int, int]], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which numbers are in one of the half-open ranges."""
    ordered = np.array(sorted(ranges), np.int64).reshape(-1, 2)
    # The furthest end of all ranges that begin at or before a number; 0, below any number, if there is none.
    ends = np.concatenate([[0], np.maximum.accumulate(ordered[:, 1])])
    return numbers < ends[np.searchsorted(ordered[:, 0], numbers, side="right")]


def _locate(directory: Path, info: Info, videos: Sequence[str]) -> list[Located]:
    def place(template: str, kind: str, row: Fields, **names: str) -> Path:
        at = {name: row.integer(f"{kind}/{name}", high=MAX_INDEX) for name in ("chunk_index", "file_index")}
        return layout.within(directory, template.format(**at, **names))

    episodes: list[Located] = []
    for path in sorted((directory / "meta" / "episodes").glob("*/*.parquet")):
        for row in Table(path, exclude="stats/").rows():
            files: dict[str, Clip] = {}
            for key in videos:
                column = info.features[key].column
                begin_s = row.number(f"videos/{column}/from_timestamp", low=0, high=MAX_FRAMES / info.fps)
                stated = row.content.get(f"videos/{column}/to_timestamp") is not None
                end_s = row.number(f"videos/{column}/to_timestamp") if stated else math.inf
                path = place(info.video_path or "", f"videos/{column}", row, video_key=column)
                files[key] = Clip(path, begin_s, end_s)
            data = place(info.data_path, "data", row)
            outcome = (row.integer(layout.OWN_SEED, None), row.flag(layout.OWN_SUCCESS, None))
            episodes.append(Located(*_counts(row), data, files, row.text(layout.OWN_TASK, None), outcome))
    return episodes


def _locate_v2(directory: Path, info: Info, videos: Sequence[str]) -> list[Located]:
    """Return the episodes of v2.x, which has one file per episode."""
    episodes: list[Located] = []
    for row in _read_lines(directory / "meta" / "episodes.jsonl"):
        number, length = _counts(row)
        at = {"episode_index": number, "episode_chunk": number // info.chunks_size}
        template = info.video_path or ""
        files = {
            key: Clip(_moved(directory, template, at | {"video_key": info.features[key].column})) for key in videos
        }
        episodes.append(Located(number, length, _moved(directory, info.data_path, at), files))
    return episodes


def _moved(directory: Path, template: str, at: Mapping[str, int | str]) -> Path:
    """Return the file of an episode; if missing at its template path, a file of that name in another chunk."""
    path = layout.within(directory, template.format(**at))
    if path.is_file() or not layout.is_relative(template):
        return path
    folder, _, name = template.replace("{video_key}", layout.escaped(str(at.get("video_key", "")))).rpartition("/")
    found = list(directory.glob(f"{layout.any_index(folder)}/{layout.escaped(name.format(**at))}")) if folder else []
    return layout.within(directory, found[0].relative_to(directory).as_posix()) if len(found) == 1 else path


def _counts(row: Fields) -> tuple[int, int]:
    return row.integer("episode_index", high=MAX_INDEX), row.integer("length", low=1, high=MAX_FRAMES)


def _read_lines(path: Path) -> list[Fields]:
    try:
        lines = read_regular_file(path, MAX_JSONL_BYTES, follow_links=True).splitlines()
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error
    except OSError as error:
        raise damaged(path, error) from error
    return [
        with_whole_numbers(parse_fields(line, f"{path}, line {number}", FileDamagedError, HINT))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def read_tasks(directory: Path, info: Info) -> dict[int, str]:
    """Return the instructions by task_index."""
    if info.version != layout.VERSION:
        path = directory / "meta" / "tasks.jsonl"
        pairs = [(row.integer("task_index", high=MAX_INDEX), row.text("task")) for row in _read_lines(path)]
    else:
        path = directory / layout.TASKS
        table = Table(path)
        # The instructions are the index of a pandas table; its name differs between writer versions.
        words = [name for name in table.names if name != "task_index"]
        if len(words) != 1 or "task_index" not in table.names:
            problem = f"it has the columns {', '.join(table.names)}, not task_index and the instructions"
            raise layout_error(path, problem, "write it as the lerobot package does")
        pairs = list(zip(table.integers("task_index").tolist(), table.texts(words[0]), strict=True))
    tasks = dict(pairs)
    if len(tasks) < len(pairs):
        raise damaged(path, "a task_index appears twice")
    if any(len(words) > MAX_TASK_LENGTH for words in tasks.values()):
        raise layout_error(path, f"an instruction is longer than {MAX_TASK_LENGTH} characters", "shorten it")
    return tasks
