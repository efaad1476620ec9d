"""Demonstrations, and their format ``raw``: one safetensors file per shard, and a JSON index.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from embodrl.data.columns import Array
from embodrl.errors import EmbodrlError
from embodrl.storage.atomic import atomic_file, output_errors
from embodrl.storage.files import write_safetensors

INDEX = "index.json"
FORMAT = 1
ELSEWHERE = "set collect.output_dir to a writable directory on another disk"


@dataclass
class Episode:
    """One demonstration.

    Attributes:
        images: ``uint8[N,V,H,W,3]``, what was seen before each action.
        state: ``float32[N,S]``, proprioception before each action; S = 0 without.
        actions: ``float32[N,A]``, what the expert would do there (not the perturbed action that was executed).
        instruction: in words.
        task: name.
        seed: reset seed.
        success: the task was solved.
    """

    images: NDArray[np.uint8]
    state: NDArray[np.float32]
    actions: NDArray[np.float32]
    instruction: str
    task: str
    seed: int
    success: bool


class Writer(Protocol):
    """What writes demonstrations.

    Attributes:
        num_frames: of the episodes added so far.
    """

    @property
    def num_frames(self) -> int: ...

    def add(self, episode: Episode) -> None:
        """Add an episode."""

    def close(self, meta: dict[str, Any]) -> None:
        """Write what is left, and ``meta`` (how it was made)."""

    def abort(self) -> None:
        """Leave nothing behind."""


class DemoWriter:
    """Writes the format ``raw``: episodes in shards; the index appears last, so that a directory with one is complete.

    Args:
        directory: made if need be.
        shard_episodes: episodes per file.

    Raises:
        EmbodrlError: the directory holds demonstrations already, or the rest of a collection that was killed.
        OutputError: it can't be written; later, the disk is full.
    """

    def __init__(self, directory: Path, shard_episodes: int = 200) -> None:
        if (directory / INDEX).exists():
            raise EmbodrlError(f"{directory} holds demonstrations already", "choose another collect.output_dir")
        if any(directory.glob("shard_*.safetensors")):
            raise EmbodrlError(
                f"{directory} holds shards of demonstrations without an index: their collection was killed",
                f"remove them (rm {directory}/shard_*.safetensors), or choose another collect.output_dir",
            )
        with output_errors(f"demonstrations can't be written to {directory}", directory, ELSEWHERE):
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / f".{INDEX}.probe"
            probe.write_bytes(b"")
            probe.unlink()
        self.directory = directory
        self._shard_episodes = shard_episodes
        self._pending: list[Episode] = []
        self._episodes: list[dict[str, Any]] = []
        self._num_shards = 0

    def add(self, episode: Episode) -> None:
        """Add an episode."""
        self._pending.append(episode)
        if len(self._pending) >= self._shard_episodes:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        name = f"shard_{self._num_shards:04d}.safetensors"
        columns = ("images", "state", "actions")
        tensors = {
            column: torch.from_numpy(np.concatenate([getattr(e, column) for e in self._pending])) for column in columns
        }
        with atomic_file(self.directory / name, ELSEWHERE) as partial:
            write_safetensors(partial, tensors)
        start = 0
        for episode in self._pending:
            length = len(episode.actions)
            self._episodes.append(
                {
                    "shard": name,
                    "start": start,
                    "length": length,
                    "instruction": episode.instruction,
                    "task": episode.task,
                    "seed": episode.seed,
                    "success": episode.success,
                }
            )
            start += length
        self._num_shards += 1
        self._pending = []

    def close(self, meta: dict[str, Any]) -> None:
        """Write what is left and the index with ``meta`` (how it was made)."""
        self._flush()
        with atomic_file(self.directory / INDEX, ELSEWHERE) as partial:
            partial.write_text(json.dumps({"format": FORMAT, "meta": meta, "episodes": self._episodes}))

    def abort(self) -> None:
        """Leave nothing behind."""
        for number in range(self._num_shards):
            (self.directory / f"shard_{number:04d}.safetensors").unlink(missing_ok=True)

    @property
    def num_frames(self) -> int:
        """Frames of the episodes added so far."""
        return sum(e["length"] for e in self._episodes) + sum(len(e.actions) for e in self._pending)


@dataclass
class Demos:
    """All the frames of a directory.

    Attributes:
        images: ``uint8[N,V,H,W,3]``.
        state: ``float32[N,S]``; S = 0 where none was recorded.
        actions: ``float32[N,A]``.
        episode: ``int64[N]``, number of the episode.
        last: ``int64[N]``, index of the last frame of that episode.
        instructions: one per episode.
        tasks: one per episode.
    """

    images: NDArray[np.uint8]
    state: NDArray[np.float32]
    actions: NDArray[np.float32]
    episode: NDArray[np.int64]
    last: NDArray[np.int64]
    instructions: list[str]
    tasks: list[str]

    def action_chunks(self, frames: NDArray[np.int64], chunk: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the actions ``float32[n,C,A]`` from those frames on, and which ``bool[n,C]`` lie within the episode.

        Beyond the end the last action is repeated.
        """
        index = frames[:, None] + np.arange(chunk)[None]
        inside = index <= self.last[frames][:, None]
        return self.actions[np.minimum(index, self.last[frames][:, None])], inside


def load_raw(directory: Path, max_episodes: int | None = None) -> Demos:
    """Load demonstrations of the format ``raw``.

    Raises:
        EmbodrlError: there are none, or a file is missing or damaged.
    """
    path = directory / INDEX
    if not path.is_file():
        raise EmbodrlError(f"{directory} holds no demonstrations", f"embodrl collect collect.output_dir={directory}")
    try:
        content = json.loads(path.read_text())
        found, episodes = content["format"], content.get("episodes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error) from error
    if found != FORMAT:
        raise EmbodrlError(f"{path} has format {found}, not {FORMAT}", "re-collect the demonstrations")
    if not isinstance(episodes, list):
        raise damaged(path, "it has no list of episodes")
    if not episodes:
        raise EmbodrlError(f"{directory} holds no episodes", "collect more")
    try:
        return _load_episodes(directory, episodes[:max_episodes])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"{type(error).__name__} {error}") from error


def _load_episodes(directory: Path, episodes: list[dict[str, Any]]) -> Demos:
    shards = {name: _load_shard(directory / name) for name in dict.fromkeys(e["shard"] for e in episodes)}
    for e in episodes:
        if not 0 <= e["start"] < e["start"] + e["length"] <= len(shards[e["shard"]]["actions"]):
            raise damaged(directory / e["shard"], "it lacks frames that the index names")
    spans = [(shards[e["shard"]], slice(e["start"], e["start"] + e["length"])) for e in episodes]
    lengths = np.array([e["length"] for e in episodes])
    episode = np.repeat(np.arange(len(episodes)), lengths)
    return Demos(
        images=np.concatenate([shard["images"][span] for shard, span in spans]),
        state=np.concatenate([shard["state"][span] for shard, span in spans]),
        actions=np.concatenate([shard["actions"][span] for shard, span in spans]),
        episode=episode,
        last=(np.cumsum(lengths) - 1)[episode],
        instructions=[e["instruction"] for e in episodes],
        tasks=[e["task"] for e in episodes],
    )


def _load_shard(path: Path) -> dict[str, Array]:
    try:
        shard = load_file(path)
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error
    except (OSError, SafetensorError) as error:
        raise damaged(path, error) from error
    if not {"images", "actions"} <= shard.keys() or len(shard["images"]) != len(shard["actions"]):
        raise damaged(path, "it lacks the pictures or actions of some frames")
    shard.setdefault("state", np.zeros((len(shard["actions"]), 0), np.float32))  # collected before there were states
    if len(shard["state"]) != len(shard["actions"]):
        raise damaged(path, "it lacks the states of some frames")
    return shard


def damaged(path: Path, problem: object) -> EmbodrlError:
    """Return the error of demonstrations that can't be read."""
    return EmbodrlError(
        f"{path} is damaged: {problem}", "re-collect the demonstrations, or copy the whole directory once more"
    )
