"""The format ``raw``: one safetensors file per shard of episodes, and a JSON index.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodrl.data.columns import Array
from embodrl.data.dataset_writer import DatasetWriter
from embodrl.data.demos import (
    EXECUTED,
    HINT,
    MAX_FRAMES,
    REWARD,
    TERMINATED,
    DemoEpisode,
    Demos,
    check_numbers,
    damaged,
)
from embodrl.data.facts import RAW_INDEX, check_shard, missing
from embodrl.data.pictures import Place, Shape, in_memory
from embodrl.errors import EmbodrlError, FileDamagedError
from embodrl.fields import Fields, read_fields
from embodrl.storage.files import write_safetensors
from embodrl.storage.integrity import check_checksums
from embodrl.storage.json_file import write_json_file
from embodrl.storage.tensor_files import open_tensors

INDEX = RAW_INDEX
FORMAT = 1
IMAGES = "images"
STORED: dict[type[np.generic], str] = {np.uint8: "U8", np.float32: "F32", np.bool_: "BOOL"}
"""Names of dtypes in safetensors files."""
COLUMNS = {"images": (np.uint8, 5), "state": (np.float32, 2), "actions": (np.float32, 2)}
"""Dtype and number of axes of each column."""
OUTCOMES = {EXECUTED: (np.float32, 2), REWARD: (np.float32, 1), TERMINATED: (np.bool_, 1)}
"""Dtype and number of axes of the optional columns."""


class RawWriter(DatasetWriter):
    """Writes the format ``raw``, with at most ``shard_episodes`` per file; see ``DatasetWriter``."""

    format = "raw"

    def __init__(self, directory: Path, shard_episodes: int = 200, resume: bool = False) -> None:
        self._shard_episodes = shard_episodes
        self._pending: list[DemoEpisode] = []
        self._episodes: list[Mapping[str, object]] = []
        self._num_shards = 0
        super().__init__(directory, resume)

    def _add(self, episode: DemoEpisode) -> None:
        self._pending.append(episode)
        self.num_frames += len(episode.actions)
        if len(self._pending) >= self._shard_episodes:
            self._flush()

    def _flush(self) -> dict[str, object]:
        if self._pending:
            name = f"shard_{self._num_shards:04d}.safetensors"
            start = 0
            tensors = {
                column: torch.from_numpy(np.concatenate([getattr(episode, column) for episode in self._pending]))
                for column in COLUMNS
            }
            known = [episode.outcomes.columns() for episode in self._pending if episode.outcomes is not None]
            if len(known) == len(self._pending):
                names = set.intersection(*(set(one) for one in known))
                tensors |= {each: torch.from_numpy(np.concatenate([one[each] for one in known])) for each in names}
            write_safetensors(self.staging / name, tensors)
            for episode in self._pending:
                place = {"shard": name, "start": start, "length": len(episode.actions)}
                words = {"instruction": episode.instruction, "task": episode.task}
                self._episodes.append(place | words | {"seed": episode.seed, "success": episode.success})
                start += len(episode.actions)
            self._num_shards += 1
            self._pending = []
        return {"episodes": self._episodes, "shards": self._num_shards}

    def _restore(self, state: Fields) -> None:
        episodes = state.objects("episodes")
        self._episodes = [episode.content for episode in episodes]
        self._num_shards = state.integer("shards")
        self.num_frames = sum(episode.integer("length") for episode in episodes)

    def _stop(self) -> None:
        self._pending = []

    def _write_meta(self, meta: Mapping[str, object]) -> None:
        write_json_file(self.staging / INDEX, {"format": FORMAT, "meta": dict(meta), "episodes": self._episodes})


@dataclass(frozen=True)
class _Entry:
    """An episode in the index: the frames ``start`` to ``start + length`` of a shard."""

    shard: str
    start: int
    length: int
    instruction: str
    task: str
    seed: int | None
    success: bool | None


def load_raw(directory: Path, max_episodes: int | None = None, place: Place = in_memory) -> Demos:
    """Load demonstrations of the format ``raw``; ``place`` makes the array of their images.

    Raises EmbodrlError if there are none, or a file is missing or damaged.
    """
    path = directory / INDEX
    if not path.is_file():
        raise missing(directory)
    checked = check_checksums(directory, [INDEX], complete=True)
    entries = _read_index(path, max_episodes)
    names = list(dict.fromkeys(entry.shard for entry in entries))
    if checked:
        check_checksums(directory, names, complete=True)
    columns, shape = _read_columns(directory, entries)
    images = place(directory, (len(columns["actions"]), *shape))
    if images.size:
        _read_images(directory, entries, images)
    return Demos.of_episodes(
        {**columns, IMAGES: images},
        [entry.length for entry in entries],
        [entry.instruction for entry in entries],
        [entry.task for entry in entries],
        [(entry.seed, entry.success) for entry in entries],
    )


def _read_index(path: Path, max_episodes: int | None) -> list[_Entry]:
    index = read_fields(path, FileDamagedError, HINT)
    if (found := index.integer("format")) != FORMAT:
        raise EmbodrlError(
            f"{path} has format {found}, not {FORMAT}", "re-collect the demonstrations", code="dataset-version"
        )
    episodes = index.objects("episodes")[:max_episodes]
    if not episodes:
        raise EmbodrlError(f"{path.parent} holds no episodes", "collect more", code="dataset-empty")
    return [
        _Entry(
            _file_name(entry),
            entry.integer("start", high=MAX_FRAMES),
            entry.integer("length", low=1, high=MAX_FRAMES),
            entry.text("instruction"),
            entry.text("task"),
            entry.integer("seed", None),
            entry.flag("success", None),
        )
        for entry in episodes
    ]


def _file_name(entry: Fields) -> str:
    name = entry.text("shard")
    if Path(name).name != name:
        entry.refuse(f"'shard' is {name!r}, which is not the name of a file in the directory")
    return name


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with open_tensors(path, "np") as reader:
            yield reader
    except OSError as error:
        raise damaged(path, error) from error


def _load_shard(path: Path) -> tuple[dict[str, Array], Shape]:
    """Return the columns of a shard without its images, and their shape."""
    check_shard(path)
    with _opened(path) as reader:
        slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
        if "actions" not in slices:
            raise damaged(path, "it has no actions")
        present = COLUMNS | (OUTCOMES if OUTCOMES.keys() <= slices.keys() else {})
        if "state" not in slices:  # collected before states were supported
            del present["state"]
        shapes: dict[str, Shape] = {name: tuple(one.get_shape()) for name, one in slices.items()}
        count = next(iter(shapes["actions"]), 0)
        for column, (dtype, axes) in present.items():
            if column not in slices:
                raise damaged(path, f"it has no {column}")
            stored, shape = str(slices[column].get_dtype()), shapes[column]
            if stored != STORED[dtype] or len(shape) != axes or shape[0] != count:
                raise damaged(path, f"{column} is {stored}{list(shape)}, with {count} actions")
        columns: dict[str, Array] = {name: reader.get_tensor(name) for name in present if name != IMAGES}
        columns.setdefault("state", np.zeros((count, 0), np.float32))
        return columns, shapes[IMAGES]


def _read_columns(directory: Path, entries: Sequence[_Entry]) -> tuple[dict[str, Array], Shape]:
    """Return the columns of consecutive episodes without their images, and the shape of the images of a frame."""
    shards: dict[str, dict[str, Array]] = {}
    shapes: dict[str, Shape] = {}
    for name in dict.fromkeys(entry.shard for entry in entries):
        shards[name], shapes[name] = _load_shard(directory / name)
    parts: dict[str, list[Array]] = {column: [] for column in set.intersection(*map(set, shards.values()))}
    for number, entry in enumerate(entries):
        shard = shards[entry.shard]
        file = directory / entry.shard
        if entry.start + entry.length > len(shard["actions"]):
            raise damaged(file, f"it lacks frames of episode {number}")
        for column in parts:
            values = shard[column]
            parts[column].append(values[entry.start : entry.start + entry.length])
        for column in {"actions", "state", EXECUTED} & parts.keys():
            check_numbers(file, column, parts[column][-1], number)
    found = {column: {part.shape[1:] for part in values} for column, values in parts.items()}
    for column, kinds in {**found, IMAGES: {shape[1:] for shape in shapes.values()}}.items():
        if len(kinds) > 1:
            raise damaged(directory, f"the shapes of {column} differ between its shards")
    return {column: np.concatenate(values) for column, values in parts.items()}, shapes[entries[0].shard][1:]


def _read_images(directory: Path, entries: Sequence[_Entry], images: NDArray[np.uint8]) -> None:
    """Read the images of consecutive episodes, one episode at a time: a shard may be larger than memory."""
    starts = np.cumsum([0, *(entry.length for entry in entries)]).tolist()
    for name in dict.fromkeys(entry.shard for entry in entries):
        with _opened(directory / name) as reader:
            stored = reader.get_slice(IMAGES)
            for start, entry in zip(starts, entries, strict=False):
                if entry.shard == name:
                    images[start : start + entry.length] = stored[entry.start : entry.start + entry.length]
