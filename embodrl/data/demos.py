"""Demonstrations as arrays, for recording and training.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data.pictures import Shape
from embodrl.errors import EmbodrlError, FileDamagedError

MAX_FRAMES = 10**8
MAX_MAGNITUDE = 1e9
"""Larger actions and states come from no robot: a damaged exponent."""
HINT = "copy or download the whole dataset again"


EXECUTED = "executed_action"
REWARD = "next.reward"
TERMINATED = "next.terminated"
"""Dataset columns from which transitions can be made."""
LOG_PROB = "action_log_prob"
"""Column of a dataset recorded by a policy: log-prob of each action as drawn."""
POLICY_VERSION = "policy_version"
"""Column of stored episodes: number of updates behind the weights that chose each action."""
ACTED_BY = "acted_by"
"""Column of stored episodes: who acted, like ``source`` of ``ReplayBuffer``."""
REWARDS = "rewards"
"""Key in a dataset's metadata: the settings that determine its rewards."""
RECORDED = {"recorded": True}
"""Value of ``REWARDS`` for rewards recorded by other software."""


@dataclass
class Outcomes:
    """Outcomes of demonstrated actions, which turn frames into transitions.

    Attributes:
        executed: ``float32[N,A]``, executed actions, perturbations included.
        rewards: ``float32[N]``, reward of each action.
        terminated: ``bool[N]``, the task ended the episode with this action.
        log_probs: ``float32[N]``, log-prob in nats of the executed action under the policy that drew it; None if none
            was drawn. Not read back.
    """

    executed: NDArray[np.float32]
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    log_probs: NDArray[np.float32] | None = None

    def columns(self) -> dict[str, NDArray[np.generic]]:
        """Return the dataset columns."""
        drawn: dict[str, NDArray[np.generic]] = {} if self.log_probs is None else {LOG_PROB: self.log_probs}
        return {EXECUTED: self.executed, REWARD: self.rewards, TERMINATED: self.terminated, **drawn}

    @classmethod
    def of(cls, columns: Mapping[str, NDArray[np.generic]]) -> Outcomes | None:
        """Return the outcomes held by the columns of a dataset; None if any is missing."""
        if not {EXECUTED, REWARD, TERMINATED} <= columns.keys():
            return None
        flags = columns[TERMINATED].reshape(-1).astype(np.bool_)
        numbers = (columns[EXECUTED].astype(np.float32), columns[REWARD].reshape(-1).astype(np.float32))
        return cls(*numbers, flags)


@dataclass
class DemoEpisode:
    """One demonstration.

    Attributes:
        images: ``uint8[N,V,H,W,3]``, images before each action.
        state: ``float32[N,S]``, proprioception before each action; S = 0 without.
        actions: ``float32[N,A]``, the expert's actions (not the perturbed actions that were executed).
        instruction: language instruction.
        task: task name.
        seed: reset seed.
        success: the task was solved; None if unknown.
        outcomes: executed actions and their outcomes; None if unknown.
        acted: ``float32[N]`` or ``int64[N]`` by name, provenance of the actions, such as ``POLICY_VERSION``.
        id: unique among all episodes of a store; None outside a store.
    """

    images: NDArray[np.uint8]
    state: NDArray[np.float32]
    actions: NDArray[np.float32]
    instruction: str
    task: str
    seed: int
    success: bool | None
    outcomes: Outcomes | None = None
    acted: Mapping[str, NDArray[np.generic]] = field(default_factory=dict[str, NDArray[np.generic]])
    id: str | None = None

    def columns(self) -> dict[str, NDArray[np.generic]]:
        """Return the dataset columns other than images, state and actions."""
        return {**({} if self.outcomes is None else self.outcomes.columns()), **self.acted}


@dataclass
class Demos:
    """All frames of a dataset.

    Attributes:
        images: ``uint8[N,V,H,W,3]``.
        state: ``float32[N,S]``; S = 0 if none was recorded.
        actions: ``float32[N,A]``.
        episode: ``int64[N]``, episode index.
        last: ``int64[N]``, index of the last frame of the episode.
        instruction_table: unique instructions, in the order of their first frames.
        instruction: ``int64[N]``, index into that table; may change within an episode.
        tasks: one per episode.
        seeds: simulator reset seed of each episode, None if unknown.
        success: whether each episode solved its task, None if unknown.
        outcomes: outcomes of all frames; None if the dataset has none.
        acted_by: ``int64[N]``, who acted; None if not recorded.
        versions: ``int64[N]``, updates behind the weights that acted; None if not recorded.
    """

    images: NDArray[np.uint8]
    state: NDArray[np.float32]
    actions: NDArray[np.float32]
    episode: NDArray[np.int64]
    last: NDArray[np.int64]
    instruction_table: list[str]
    instruction: NDArray[np.int64]
    tasks: list[str]
    seeds: Sequence[int | None] = ()
    success: Sequence[bool | None] = ()
    outcomes: Outcomes | None = None
    acted_by: NDArray[np.int64] | None = None
    versions: NDArray[np.int64] | None = None

    @classmethod
    def of_episodes(
        cls,
        columns: Mapping[str, NDArray[np.generic]],
        lengths: Sequence[int],
        instructions: Sequence[str],
        tasks: list[str],
        outcomes: Sequence[tuple[int | None, bool | None]] = (),
    ) -> Demos:
        """Return the demonstrations of consecutive episodes.

        Args:
            columns: ``images``, ``state`` and ``actions`` of all frames; ``ACTED_BY``, ``POLICY_VERSION`` and
                the columns of ``Outcomes`` if known.
            lengths: frames of each episode.
            instructions: one per episode, or one per frame.
            tasks: one per episode.
            outcomes: seed and success of each episode; empty if unknown.
        """
        outcomes = outcomes or [(None, None)] * len(lengths)
        episode = np.repeat(np.arange(len(lengths)), lengths)
        places = {text: place for place, text in enumerate(dict.fromkeys(instructions))}
        said = np.array([places[text] for text in instructions], np.int64)
        return cls(
            images=columns["images"].astype(np.uint8, copy=False),
            state=columns["state"].astype(np.float32, copy=False),
            actions=columns["actions"].astype(np.float32, copy=False),
            episode=episode,
            last=(np.cumsum(lengths) - 1)[episode],
            instruction_table=list(places),
            instruction=said if len(said) == len(episode) else said[episode],
            tasks=tasks,
            seeds=[seed for seed, _ in outcomes],
            success=[success for _, success in outcomes],
            outcomes=Outcomes.of(columns),
            acted_by=columns[ACTED_BY].reshape(-1).astype(np.int64) if ACTED_BY in columns else None,
            versions=columns[POLICY_VERSION].reshape(-1).astype(np.int64) if POLICY_VERSION in columns else None,
        )

    def _columns(self, with_outcomes: bool = False) -> dict[str, NDArray[np.generic]]:
        known: dict[str, NDArray[np.generic]] = {} if self.acted_by is None else {ACTED_BY: self.acted_by}
        if with_outcomes:
            known |= {} if self.versions is None else {POLICY_VERSION: self.versions}
            known |= {} if self.outcomes is None else self.outcomes.columns()
        return {"images": self.images, "state": self.state, "actions": self.actions, **known}

    @property
    def num_episodes(self) -> int:
        return len(self.tasks)

    def said(self, frames: NDArray[np.int64] | slice) -> list[str]:
        """Return the instruction of each of these frames."""
        return [self.instruction_table[place] for place in self.instruction[frames]]

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of images, states, actions and instructions."""
        first = np.flatnonzero(np.diff(self.episode, prepend=-1))
        result = zlib.crc32("\n".join(self.said(first)).encode())
        columns: list[NDArray[np.generic]] = [self.images, self.actions, self.state, self.last]
        if (self.instruction != np.repeat(self.instruction[first], np.bincount(self.episode))).any():
            columns.append(self.instruction)
        for column in columns:
            result = zlib.crc32(np.ascontiguousarray(column).data, result)
        return result

    def select(self, episodes: Sequence[int], with_outcomes: bool = False) -> Demos:
        """Return these episodes, in this order."""
        frames = [np.flatnonzero(self.episode == number) for number in episodes]
        index = np.concatenate(frames) if frames else np.zeros(0, np.int64)
        return Demos.of_episodes(
            {name: column[index] for name, column in self._columns(with_outcomes).items()},
            [len(part) for part in frames],
            self.said(index),
            [self.tasks[number] for number in episodes],
            [(self.seeds[number], self.success[number]) for number in episodes],
        )

    def split(self, count: int) -> tuple[Demos, Demos]:
        """Return the first episodes and the rest, without outcomes; both share memory with this object."""
        border = int(np.searchsorted(self.episode, count))
        first = self._part(slice(0, border), slice(0, count))
        return first, self._part(slice(border, None), slice(count, None))

    def _part(self, frames: slice, episodes: slice) -> Demos:
        numbers = self.episode[frames]
        lengths = np.bincount(numbers - numbers[0]).tolist() if len(numbers) else []
        outcomes = list(zip(self.seeds[episodes], self.success[episodes], strict=True))
        columns = {name: column[frames] for name, column in self._columns().items()}
        return Demos.of_episodes(columns, lengths, self.said(frames), self.tasks[episodes], outcomes)

    @classmethod
    def concat(
        cls,
        parts: Sequence[Demos],
        place: Callable[[Shape], NDArray[np.uint8]] | None = None,
        with_outcomes: bool = False,
    ) -> Demos:
        """Return the episodes of all parts, in order; ``place`` makes the array of their images."""
        every = [part._columns(with_outcomes) for part in parts]
        shared = [name for name in every[0] if all(name in columns for columns in every)]
        out: dict[str, NDArray[np.uint8]] = {}
        if place is not None:
            frames = sum(len(part.actions) for part in parts)
            out["images"] = place((frames, *parts[0].images.shape[1:]))
        columns = {name: np.concatenate([columns[name] for columns in every], out=out.get(name)) for name in shared}
        lengths = [int(n) for part in parts for n in np.bincount(part.episode, minlength=part.num_episodes)]
        return cls.of_episodes(
            columns,
            lengths,
            [text for part in parts for text in part.said(slice(None))],
            [task for part in parts for task in part.tasks],
            [pair for part in parts for pair in zip(part.seeds, part.success, strict=True)],
        )

    def action_chunks(self, frames: NDArray[np.int64], chunk: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return actions ``float32[n,C,A]`` from each frame on, the last repeated, and their mask ``bool[n,C]``."""
        index = frames[:, None] + np.arange(chunk)[None]
        inside = index <= self.last[frames][:, None]
        return self.actions[np.minimum(index, self.last[frames][:, None])], inside


def damaged(path: Path, problem: object) -> FileDamagedError:
    """Return the error for unreadable demonstrations."""
    return FileDamagedError(f"{path} is damaged: {problem}", HINT)


def layout_error(path: Path, problem: object, hint: str) -> EmbodrlError:
    """Return the error for intact demonstrations with an unsupported layout."""
    return EmbodrlError(f"{path}: {problem}", hint, code="dataset-layout")


def check_numbers(path: Path, column: str, values: NDArray[np.float32], episode: int) -> None:
    """Reject NaN, infinite and absurdly large numbers in the frames ``float32[N,D]`` of an episode.

    Raises FileDamagedError naming file, episode, frame and column of the first.
    """
    wrong = ~(np.abs(values) <= MAX_MAGNITUDE)  # NaN compares false
    if wrong.any():
        frame, dimension = np.argwhere(wrong)[0]
        raise damaged(path, f"episode {episode}, frame {frame}: {column}[{dimension}] is {values[frame, dimension]:g}")
