"""Replay buffer: observations and actions in a ring of frames bounded in bytes.

A frame is an observation and, if the policy acted on it, the following chunk. The next frame of the ring is the outcome
of the chunk, so that every observation is stored once. An episode ends with a terminated frame, or with its last
observation, which has no action: after a truncation, at the end of a rollout, or before a chunk that was lost.

Shapes: T policy steps, B environments, N frames, C actions in a chunk, A action dimensions, n chunks of a return.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import CheckpointError, EmbodrlError

POLICY = 0
EXPERT = 1
HUMAN = 2
"""Who chose an action: values of the column ``source``."""
INPUT = "inputs."
HEAD = "head"
STORED = "stored"
DEMOS = "demos"


class Window(NamedTuple):
    """Consecutive chunks; entries after the end of an episode belong to another one.

    Attributes:
        rewards: ``float32[N,n,C]``.
        valid: ``bool[N,n,C]``.
        terminated, acted: ``bool[N,n]``.
    """

    rewards: Tensor
    valid: Tensor
    terminated: Tensor
    acted: Tensor


class ReplayBuffer:
    """Ring of at most ``capacity`` frames and ``max_bytes`` bytes, in whole episodes; new frames replace the oldest.

    ``stored`` counts all chunks added so far, including replaced ones.
    """

    def __init__(self, capacity: int, max_bytes: int) -> None:
        self._most = capacity
        self._max_bytes = max_bytes
        self._columns: dict[str, Tensor] = {}
        self._size = self._head = self.stored = 0
        self._acted = torch.zeros(0, dtype=torch.int64)

    def __len__(self) -> int:
        """Number of chunks that can be drawn."""
        return len(self._acted)

    @property
    def capacity(self) -> int:
        """Number of frames that fit; 0 before the first is added."""
        return len(next(iter(self._columns.values()))) if self._columns else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored frames."""
        return sum(column[: self._size].nbytes for column in self._columns.values())

    def add_frames(self, frames: Mapping[str, Tensor]) -> None:
        """Add whole episodes, one after the other; EmbodrlError if they exceed the capacity.

        Columns ``[N,...]``: ``inputs.NAME``, ``actions``, ``rewards``, ``valid``, ``terminated``, ``acted``,
        ``source``.
        """
        count = len(frames["acted"])
        if not count:
            return
        # Names and shapes of the policy's inputs are known only from the first frames.
        if not self._columns:
            self._allocate(frames)
        if count > self.capacity:
            frame = sum(column[0].nbytes for column in self._columns.values())
            raise EmbodrlError(
                f"{count} frames of {frame:,} bytes are added at once, but the replay buffer has room for"
                f" {self.capacity}",
                "raise algorithm.off_policy.capacity and algorithm.off_policy.memory_gb, or collect less at once",
                code="replay-too-small",
            )
        # Added frames end with the end of an episode, so that no chunk takes the oldest frame for its outcome.
        places = (self._head + torch.arange(count)) % self.capacity
        for name, column in self._columns.items():
            column[places] = frames[name]
        self._head = (self._head + count) % self.capacity
        self._size = min(self._size + count, self.capacity)
        self.stored += int(frames["acted"].sum())
        self._index()

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Sample chunk indices ``int64[count]`` uniformly with replacement."""
        return self._acted[torch.randint(len(self), (count,), generator=generator)]

    def window(self, places: Tensor, n: int) -> Window:
        """Return the windows that start at these frames."""
        index = (places[:, None] + torch.arange(n)) % self.capacity
        names = ("rewards", "valid", "terminated", "acted")
        return Window(*(self._columns[name][index] for name in names))

    def inputs(self, places: Tensor) -> dict[str, Tensor]:
        """Return the policy's inputs, ``[N,...]`` by name."""
        index = places % self.capacity
        # For pictures, indexing takes ten times as long as ``index_select``.
        return {
            name.removeprefix(INPUT): column.index_select(0, index)
            for name, column in self._columns.items()
            if name.startswith(INPUT)
        }

    def column(self, name: str, places: Tensor) -> Tensor:
        """Return ``actions float32[N,C,A]`` or ``source int8[N]`` of chunks."""
        return self._columns[name][places]

    def checksum(self) -> int:
        """Return a number that differs if the actions or rewards of two buffers differ."""
        pieces = (
            self._columns[name][: self._size] for name in ("actions", "labels", "rewards") if name in self._columns
        )
        result = 0
        for piece in pieces:
            result = zlib.crc32(piece.contiguous().numpy().tobytes(), result)
        return result

    def state(self) -> dict[str, Tensor]:
        """Return everything ``load_state`` needs, without copies."""
        counters = {HEAD: torch.tensor(self._head), STORED: torch.tensor(self.stored)}
        return {name: column[: self._size] for name, column in self._columns.items()} | counters

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state`` with identical draws; CheckpointError if the state exceeds the buffer's capacity."""
        columns = {name: column for name, column in state.items() if name not in (HEAD, STORED)}
        self._columns = {}
        self._size = 0
        if columns:
            self._allocate(columns)
            self._size = len(columns["acted"])
            head = int(state[HEAD])
            # A ring that has wrapped around is bound to its size; otherwise it can grow.
            if self._size > self.capacity or (head != self._size % self.capacity and self._size != self.capacity):
                raise CheckpointError(
                    f"the checkpoint's replay buffer has {self._size} frames, but there is room for {self.capacity}",
                    "resume with the same algorithm.off_policy.capacity and memory_gb",
                    code="replay-other-size",
                )
            for name, column in columns.items():
                self._columns[name][: self._size] = column
            self._head = head
        self.stored = int(state[STORED])
        self._index()

    def _allocate(self, frames: Mapping[str, Tensor]) -> None:
        frame = sum(column[:1].nbytes for column in frames.values())
        capacity = max(1, min(self._most, self._max_bytes // frame))
        self._columns = {name: _zeros((capacity, *x.shape[1:]), x.dtype) for name, x in frames.items()}

    def _index(self) -> None:
        acted = self._columns["acted"][: self._size] if self._columns else torch.zeros(0, dtype=torch.bool)
        self._acted = acted.nonzero().squeeze(-1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Like ``torch.zeros``, but memory is committed only when written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:  # a state without dimensions
        return torch.zeros(shape, dtype=dtype)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).reshape(shape)


@dataclass
class ReplayStores:
    """Training data of an off-policy run.

    Attributes:
        online: experience of the policy, and of whoever corrects it, in this run.
        demos: demonstrations; None without. Read from their files again on resume.
        interventions: chunks of an expert or a person who takes control become demonstrations too; checkpoints then
            keep all.
    """

    online: ReplayBuffer
    demos: ReplayBuffer | None = None
    interventions: bool = False

    def __post_init__(self) -> None:
        # Taken before any intervention is added: it identifies the demonstrations the run started with.
        self._recorded = None if self.demos is None else self.demos.checksum()

    def add(self, batch: TrajectoryBatch) -> int:
        """Add the chunks of a rollout, and an expert's chunks to the demonstrations as well; return their number.

        Raises BatchKeyError if ``actions`` or ``final_inputs`` are missing; see also ``ReplayBuffer.add_frames``.
        """
        frames = frames_of(batch)
        self.online.add_frames(frames)
        if self.interventions and self.demos is not None:
            self.demos.add_frames(intervened(frames))
        return int(frames["acted"].sum())

    def state(self) -> dict[str, Tensor]:
        """Return the checkpoint state: the online part, and a checksum of the demonstrations or all of them."""
        known = {} if self._recorded is None else {DEMOS: torch.tensor(self._recorded)}
        if self.interventions and self.demos is not None:
            known |= {f"{DEMOS}.{name}": tensor for name, tensor in self.demos.state().items()}
        return self.online.state() | known

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state``; CheckpointError if the demonstrations changed or the buffer is smaller."""
        left = {name: tensor for name, tensor in state.items() if not name.startswith(f"{DEMOS}.")}
        before = left.pop(DEMOS, None)
        if (None if before is None else int(before)) != self._recorded:
            raise CheckpointError(
                "the demonstrations are not the ones the run started with",
                "resume with the same algorithm.off_policy.demos and an unchanged dataset",
                code="replay-other-demos",
            )
        self.online.load_state(left)
        kept = {
            name.removeprefix(f"{DEMOS}."): tensor for name, tensor in state.items() if name.startswith(f"{DEMOS}.")
        }
        if self.interventions and self.demos is not None and kept:  # absent if the run has not been corrected so far
            self.demos.load_state(kept)


def labelled_frames(batch: TrajectoryBatch) -> dict[str, Tensor]:
    """Return the frames an expert labelled in a rollout, for ``ReplayBuffer.add_frames``; not transitions.

    Columns ``[N,...]``: ``inputs.images``, ``inputs.state``, ``inputs.words``, ``labels``, ``source``, ``acted``.
    """
    seen = batch["expert"]
    chosen = seen["chosen"] & batch.valid.any(-1)
    frames = {INPUT + name: seen[name][chosen] for name in ("images", "state", "words")}
    return frames | {"labels": seen["labels"][chosen], "source": seen["source"][chosen], "acted": chosen[chosen]}


MAX_WORDS = 512
"""Bytes per instruction in a replay buffer."""


def encode_words(instructions: Sequence[str]) -> NDArray[np.uint8]:
    """Encode instructions as zero-padded UTF-8, ``uint8[B,MAX_WORDS]``; EmbodrlError if one is longer."""
    result = np.zeros((len(instructions), MAX_WORDS), np.uint8)
    for row, text in zip(result, instructions, strict=True):
        data = text.encode()
        if len(data) > MAX_WORDS:
            raise EmbodrlError(
                f"an instruction has {len(data)} bytes, but the replay buffer keeps {MAX_WORDS}",
                "shorten the task's instruction",
                code="instruction-too-long",
            )
        row[: len(data)] = np.frombuffer(data, np.uint8)
    return result


def decode_words(words: NDArray[np.uint8]) -> list[str]:
    """Invert ``encode_words``."""
    return [row.tobytes().rstrip(b"\0").decode() for row in words]


def frames_of(batch: TrajectoryBatch) -> dict[str, Tensor]:
    """Return the frames of a rollout, episode by episode, for ``ReplayBuffer.add_frames``."""
    steps, rows = batch.valid.shape[:2]
    acted = batch.valid.any(-1)
    terminated = batch.terminated.any(-1)
    ended = terminated | batch.truncated.any(-1)
    times: list[int] = []  # index into the column inputs, and beyond T into final_inputs
    envs: list[int] = []
    for env in range(rows):
        open_episode = False
        for time in range(steps):
            if acted[time, env]:
                times.append(time)
                open_episode = not bool(terminated[time, env])
                if open_episode and (ended[time, env] or time + 1 == steps):
                    times.append(steps + time)
                    open_episode = False
            elif open_episode:  # a fault ended the episode, whose last observation this is
                times.append(time)
                open_episode = False
            envs.extend([env] * (len(times) - len(envs)))
    time = torch.tensor(times, dtype=torch.int64)
    env = torch.tensor(envs, dtype=torch.int64)
    inner = time % steps
    is_final = time >= steps
    # A final frame has no chunk of its own: the columns it borrows from its step must not count.
    flags = acted[inner, env] & ~is_final
    frames = {
        "actions": batch["actions"][inner, env],
        "rewards": batch.rewards[inner, env] * flags[:, None],
        "valid": batch.valid[inner, env] & flags[:, None],
        "terminated": terminated[inner, env] & flags,
        "acted": flags,
        "source": batch["source"][inner, env],
    }
    for name, final in batch["final_inputs"].items():
        seen = batch.forward_inputs[name][inner, env]
        seen[is_final] = final[inner[is_final], env[is_final]]
        frames[INPUT + name] = seen
    return frames


def intervened(frames: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ``frames_of`` in which an expert or a person acted, as demonstrations with ``labels``."""
    by_expert = frames["acted"] & (frames["source"] != POLICY)
    led_here = torch.zeros_like(by_expert)
    led_here[1:] = (by_expert & ~frames["terminated"])[:-1]
    kept = by_expert | led_here
    result = {name: column[kept] for name, column in frames.items()}
    acted = by_expert[kept]
    result |= {"acted": acted, "terminated": result["terminated"] & acted, "valid": result["valid"] & acted[:, None]}
    return result | {"rewards": result["rewards"] * acted[:, None], "labels": result["actions"].clone()}
