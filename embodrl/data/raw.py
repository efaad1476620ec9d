"""The format ``raw``: one safetensors file per shard of episodes, and a JSON index.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

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
from embodrl.errors import EmbodrlError, FileDamagedError
from embodrl.fields import Fields, read_fields
from embodrl.storage.files import write_safetensors
from embodrl.storage.integrity import check_checksums
from embodrl.storage.json_file import write_json_file
from embodrl.storage.tensor_files import load_arrays

INDEX = RAW_INDEX
FORMAT = 1
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


def load_raw(directory: Path, max_episodes: int | None = None) -> Demos:
    """Load demonstrations of the format ``raw``; EmbodrlError if there are none, or a file is missing or damaged."""
    path = directory / INDEX
    if not path.is_file():
        raise missing(directory)
    checked = check_checksums(directory, [INDEX], complete=True)
    entries = _read_index(path, max_episodes)
    names = list(dict.fromkeys(entry.shard for entry in entries))
    if checked:
        check_checksums(directory, names, complete=True)
    shards = {name: _load_shard(directory / name) for name in names}
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
    for column, values in parts.items():
        if len({part.shape[1:] for part in values}) > 1:
            raise damaged(directory, f"the shapes of {column} differ between its shards")
    return Demos.of_episodes(
        {column: np.concatenate(values) for column, values in parts.items()},
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


def _load_shard(path: Path) -> dict[str, Array]:
    check_shard(path)
    try:
        shard = load_arrays(path)
    except OSError as error:
        raise damaged(path, error) from error
    if "actions" not in shard:
        raise damaged(path, "it has no actions")
    shard.setdefault(
        "state", np.zeros((len(shard["actions"]), 0), np.float32)
    )  # collected before states were supported
    present = COLUMNS | (OUTCOMES if OUTCOMES.keys() <= shard.keys() else {})
    for column, (dtype, axes) in present.items():
        if column not in shard:
            raise damaged(path, f"it has no {column}")
        values = shard[column]
        if values.dtype != dtype or values.ndim != axes or len(values) != len(shard["actions"]):
            raise damaged(path, f"{column} is {values.dtype}{list(values.shape)}, with {len(shard['actions'])} actions")
    return {column: shard[column] for column in present}
