"""Shared memory between an EnvManager and its process: one request area and a ring of result slots.

Protocol. The parent writes the request area, then sends a frame that names a slot; the child reads the request, writes
its result into that slot, and answers. There is no lock and no flag in the memory: one request is pending at a time, so
that each side owns all of it between the frame it receives and the one it sends, and the two system calls of a frame
order the memory accesses on both sides. A child that dies while writing leaves a torn slot, which is never read: a slot
is read only after the answer, and the memory is dropped with the process.

The parent trusts none of it, as native code of a simulator may write anywhere: it seals the size of the memory before
mapping it (a page that is truncated away is a bus error), and ``ResultSlot.check`` validates everything that numpy or a
list would otherwise index with. Other numbers may be anything; ``faults.Bounds`` judges them. Images go here and not
through the socket because the parent needs no copy: results are views.

Shapes: B environments, C actions in a chunk (at most ``EnvSpec.max_chunk``), A action dimensions, V cameras, H x W
image, S state dimensions. Both sides compute the same layout from the EnvSpec; arrays start on cache lines.
"""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import EmbodrlError, EnvProtocolError
from embodrl.fields import Fields
from embodrl.processes.memory_file import FIXED_SIZE
from embodrl.types import CameraSpec, EnvSpec, EnvStep, Observation

# Results are views of a slot. With two slots, a result stays valid while the next one is written: a rollout may look at
# the observations before and after a step without a copy.
NUM_SLOTS = 2
INSTRUCTION_BYTES = 512
POISON_BYTE = 0xAB
_ALIGNMENT = 64  # a cache line: arrays written by different sides never share one
_PER_ACTION = ("reward", "valid", "terminated", "truncated")
_PER_CHUNK = ("success", "episode_return", "episode_length", "episode_seed", "final_mask")
_FLAGS_PER_ACTION = ("valid", "terminated", "truncated")
_FLAGS_PER_CHUNK = ("success", "final_mask")
_SHOWN = 8

# Upper limits of a plausible EnvSpec: the memory layout is computed from another process's message.
_MAX_BATCH = 1 << 16
_MAX_CAMERAS = 64
_MAX_PIXELS = 1 << 14
_MAX_NUMBERS = 1 << 16
_MAX_TASKS = 1 << 20
_BLOCK_BYTES = 512  # unit of st_blocks

Shapes = dict[str, tuple[tuple[int, ...], type[np.generic]]]
Places = dict[str, tuple[int, tuple[int, ...], type[np.generic]]]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Layout:
    """Location of each array.

    Attributes:
        request: name to (offset, shape, dtype) in the request area.
        slots: name to (offset, shape, dtype) for each result slot.
        num_bytes: size of the whole region.
    """

    request: Places
    slots: tuple[Places, ...]
    num_bytes: int


def spec_to_dict(spec: EnvSpec) -> dict[str, object]:
    """Return an EnvSpec as JSON values; environments may have filled it with numpy numbers and lists."""
    return {name: _plain(value) for name, value in dataclasses.asdict(spec).items()}


def _plain(value: object) -> object:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in cast("dict[object, object]", value).items()}
    return value


def spec_from_dict(content: object) -> EnvSpec:
    """Return the EnvSpec of ``spec_to_dict``; EnvProtocolError if a field is missing, of another type or out of range.

    Raises EnvError if the bounds of actions are not -1 and 1.
    """
    if not isinstance(content, dict):
        raise EnvProtocolError(f"an EnvSpec is announced, and a {type(content).__name__} was sent")
    fields = Fields(
        cast("Mapping[str, object]", content), "its EnvSpec", EnvProtocolError, "correct the EnvSpec of the environment"
    )
    action_dim = fields.integer("action_dim", low=1, high=_MAX_NUMBERS)
    tasks = fields.texts("tasks")
    cameras = fields.objects("cameras")
    if not 0 < len(tasks) <= _MAX_TASKS or len(cameras) > _MAX_CAMERAS:
        fields.refuse(f"'tasks' has {len(tasks)} entries, 'cameras' {len(cameras)}")
    return EnvSpec(
        num_envs=fields.integer("num_envs", low=1, high=_MAX_BATCH),
        cameras=tuple(
            CameraSpec(
                camera.text("name"),
                camera.integer("height", low=1, high=_MAX_PIXELS),
                camera.integer("width", low=1, high=_MAX_PIXELS),
            )
            for camera in cameras
        ),
        state_dim=fields.integer("state_dim", high=_MAX_NUMBERS),
        action_dim=action_dim,
        action_low=tuple(fields.numbers("action_low", action_dim)),
        action_high=tuple(fields.numbers("action_high", action_dim)),
        max_chunk=fields.integer("max_chunk", low=1, high=_MAX_NUMBERS),
        tasks=tuple(tasks),
        control_hz=fields.number("control_hz"),
    )


def request_shapes(spec: EnvSpec) -> Shapes:
    """Return shapes and dtypes of the data sent to the simulator."""
    batch = spec.num_envs
    return {
        "actions": ((batch, spec.max_chunk, spec.action_dim), np.float32),
        "active": ((batch,), np.bool_),
        "seeds": ((batch,), np.int64),
        "task_ids": ((batch,), np.int32),
        "indices": ((batch,), np.int64),
    }


def result_shapes(spec: EnvSpec) -> Shapes:
    """Return shapes and dtypes of the data returned; EmbodrlError if the cameras differ in size."""
    batch = spec.num_envs
    chunk = spec.max_chunk
    sizes = {(camera.height, camera.width) for camera in spec.cameras}
    if len(sizes) > 1:
        found = ", ".join(f"{camera.name} {camera.height}x{camera.width}" for camera in spec.cameras)
        raise EmbodrlError(
            f"the cameras differ in size: {found}",
            "use the same height and width for all of env.cameras",
            code="camera-sizes",
        )
    height, width = sizes.pop() if sizes else (0, 0)
    observation: Shapes = {
        "images": ((batch, len(spec.cameras), height, width, 3), np.uint8),
        "state": ((batch, spec.state_dim), np.float32),
        "instruction": ((batch, INSTRUCTION_BYTES), np.uint8),
        "instruction_length": ((batch,), np.int32),
        "task_id": ((batch,), np.int32),
    }
    outcome: Shapes = {
        "reward": ((batch, chunk), np.float32),
        "valid": ((batch, chunk), np.bool_),
        "terminated": ((batch, chunk), np.bool_),
        "truncated": ((batch, chunk), np.bool_),
        "success": ((batch,), np.bool_),
        "episode_return": ((batch,), np.float32),
        "episode_length": ((batch,), np.int32),
        "episode_seed": ((batch,), np.int64),
        "final_mask": ((batch,), np.bool_),
    }
    return {**observation, **outcome, **{f"final_{name}": shape for name, shape in observation.items()}}


def compute_layout(spec: EnvSpec, num_slots: int = NUM_SLOTS) -> Layout:
    """Place the request area and the result slots one after the other."""
    offset = 0

    def place(shapes: Shapes) -> Places:
        nonlocal offset
        fields: Places = {}
        for name, (shape, dtype) in shapes.items():
            fields[name] = (offset, shape, dtype)
            num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return fields

    request = place(request_shapes(spec))
    slots = tuple(place(result_shapes(spec)) for _ in range(num_slots))
    return Layout(request, slots, max(offset, mmap.PAGESIZE))


def _views(buffer: mmap.mmap, fields: Places) -> Arrays:
    return {
        name: np.frombuffer(buffer, dtype, int(np.prod(shape, dtype=np.int64)), offset).reshape(shape)
        for name, (offset, shape, dtype) in fields.items()
    }


class ResultSlot:
    """Memory for one result (observation, and outcome of a chunk) of B environments.

    Instructions seldom change, so the last ones written and read are cached; all writing must go through one object.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._written: list[str] = []
        self._read: tuple[bytes, bytes, list[str]] = (b"", b"", [])

    @staticmethod
    def allocate(spec: EnvSpec) -> ResultSlot:
        """Return a slot in private memory."""
        return ResultSlot({name: np.zeros(shape, dtype) for name, (shape, dtype) in result_shapes(spec).items()})

    def rows(self, start: int, stop: int) -> ResultSlot:
        """Return the part of environments ``start`` to ``stop - 1``, sharing memory."""
        return ResultSlot({name: array[start:stop] for name, array in self.arrays.items()})

    def write_observation(self, observation: Observation) -> None:
        """Copy an observation in.

        Raises EmbodrlError if a shape or dtype differs from the EnvSpec, or an instruction is too long.
        """
        for name in ("images", "state", "task_id"):
            self._copy(name, getattr(observation, name), self.arrays[name])
        if observation.instruction != self._written:
            self._written = []  # stays so if writing fails half-way
            self._write_instructions("", observation.instruction, range(len(self.arrays["task_id"])))
            self._written = list(observation.instruction)

    def write_step(self, step: EnvStep) -> None:
        """Copy the outcome of a chunk in; of ``final_observation`` only the valid rows.

        Raises EmbodrlError like ``write_observation``, or if ``final_observation`` is missing.
        """
        self.write_observation(step.observation)
        chunk = step.reward.shape[1] if step.reward.ndim == 2 else 0
        for name in _PER_ACTION:
            self._copy(name, getattr(step, name), self.arrays[name][:, :chunk])
        for name in _PER_CHUNK:
            self._copy(name, getattr(step, name), self.arrays[name])
        # Rows outside the mask are undefined by contract; images of all rows would double the copying of a step.
        if not step.final_mask.any():
            return
        if step.final_observation is None:
            raise EmbodrlError(
                "final_mask is set but there is no final_observation",
                "this is a bug in the environment",
                code="env-step-result",
            )
        rows = np.flatnonzero(step.final_mask)
        for name in ("images", "state", "task_id"):
            source = getattr(step.final_observation, name)
            target = self.arrays[f"final_{name}"]
            self._check(f"final_observation.{name}", source, target)
            target[rows] = source[rows]
        self._write_instructions("final_", step.final_observation.instruction, rows.tolist())

    def observation(self, prefix: str = "") -> Observation:
        """Return views of the observation."""
        return Observation(
            self.arrays[f"{prefix}images"],
            self.arrays[f"{prefix}state"],
            self._read_instructions(prefix),
            self.arrays[f"{prefix}task_id"],
        )

    def step(self, chunk: int) -> EnvStep:
        """Return views of the outcome of a chunk of ``chunk`` actions."""
        arrays = self.arrays
        has_final = bool(arrays["final_mask"].any())
        return EnvStep(
            observation=self.observation(),
            **{name: arrays[name][:, :chunk] for name in _PER_ACTION},
            **{name: arrays[name] for name in _PER_CHUNK},
            final_observation=self.observation("final_") if has_final else None,
        )

    def check(self, chunk: int | None, num_tasks: int) -> None:
        """Check another process's data that is used as an index, length, text or boolean.

        ``chunk`` is C of a step; None for an observation alone. Raises EnvProtocolError naming the array.
        """
        arrays = self.arrays
        if chunk is not None:
            # numpy counts booleans by adding their bytes: a byte of 171 is memory written out of bounds.
            first, second, third = (arrays[name].view(np.uint8)[:, :chunk] for name in _FLAGS_PER_ACTION)
            success, final = (arrays[name].view(np.uint8) for name in _FLAGS_PER_CHUNK)
            if (first | second | third).max() > 1 or (success | final).max() > 1:
                raise EnvProtocolError(f"booleans other than 0 and 1 in {', '.join(_FLAGS_PER_ACTION)} or success")
            if final.any():
                self._check_tasks("final_task_id", arrays["final_task_id"][arrays["final_mask"]], num_tasks)
        self._check_tasks("task_id", arrays["task_id"], num_tasks)

    @staticmethod
    def _check_tasks(name: str, tasks: NDArray[np.int32], num_tasks: int) -> None:
        if tasks.view(np.uint32).max() >= num_tasks:  # as unsigned, negative values are large
            raise EnvProtocolError(f"{name} {tasks.tolist()[:_SHOWN]} for {num_tasks} tasks")

    def poison(self) -> None:
        """Overwrite everything handed out as a view, so that a view kept too long is noticed at once."""
        for name, array in self.arrays.items():
            # Instructions are decoded on reading, so that no view of them is handed out.
            if "instruction" not in name:
                array.fill(np.nan if array.dtype.kind == "f" else POISON_BYTE)

    def _check(self, name: str, source: object, target: NDArray[np.generic]) -> None:
        known = isinstance(source, np.ndarray)
        array = cast("NDArray[np.generic]", source)
        if not known or array.shape != target.shape or array.dtype != target.dtype:
            found = f"{array.dtype}{list(array.shape)}" if known else type(source).__name__
            raise EmbodrlError(
                f"the environment returned {name} as {found}, its spec declares {target.dtype}{list(target.shape)}",
                "make the environment's results agree with its EnvSpec",
                code="env-step-result",
            )

    def _copy(self, name: str, source: NDArray[np.generic], target: NDArray[np.generic]) -> None:
        self._check(name, source, target)
        np.copyto(target, source)

    def _read_instructions(self, prefix: str) -> list[str]:
        texts = self.arrays[f"{prefix}instruction"]
        lengths = self.arrays[f"{prefix}instruction_length"]
        raw = texts.tobytes()
        raw_lengths = lengths.tobytes()
        if (raw, raw_lengths) != self._read[:2]:
            if lengths.min() < 0 or lengths.max() > INSTRUCTION_BYTES:
                raise EnvProtocolError(f"{prefix}instruction has {lengths.tolist()[:_SHOWN]} bytes")
            try:
                decoded = [texts[row, :length].tobytes().decode() for row, length in enumerate(lengths.tolist())]
            except UnicodeDecodeError as error:
                raise EnvProtocolError(f"{prefix}instruction is not a text: {error}") from error
            self._read = (raw, raw_lengths, decoded)
        # A copy, since ``faults.terminate_invalid`` overwrites single entries of a lost episode.
        return list(self._read[2])

    def _write_instructions(self, prefix: str, texts: list[str], rows: Iterable[int]) -> None:
        target = self.arrays[f"{prefix}instruction"]
        lengths = self.arrays[f"{prefix}instruction_length"]
        if len(texts) != len(lengths):
            raise EmbodrlError(
                f"the environment returned {len(texts)} instructions for {len(lengths)} environments",
                code="env-step-result",
            )
        for row in rows:
            data = texts[row].encode()
            if len(data) > INSTRUCTION_BYTES:
                raise EmbodrlError(
                    f"an instruction has {len(data)} bytes, at most {INSTRUCTION_BYTES} fit: '{texts[row][:60]}...'",
                    "shorten the instruction",
                    code="env-step-result",
                )
            target[row, : len(data)] = np.frombuffer(data, np.uint8)
            lengths[row] = len(data)


class Ring:
    """The mapped region: ``request`` arrays and ``slots``; a result has ``result_bytes``, without final observations.

    Args:
        fd: memory file (memfd), unnamed so that nothing is left behind when processes are killed.
        spec: EnvSpec that determines the layout.
        seal: fix the size first, as the parent does: the other process could crash it by truncating the memory.

    Raises:
        EnvProtocolError: the memory does not have the size required by the spec.
        OSError: the memory can't be sealed or mapped.
    """

    def __init__(self, fd: int, spec: EnvSpec, seal: bool = False) -> None:
        layout = compute_layout(spec)
        if seal:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED_SIZE)
            found = os.fstat(fd)
            # Allocated blocks, not just the size: reading a page that has no memory left is a bus error.
            if found.st_size < layout.num_bytes or found.st_blocks * _BLOCK_BYTES < layout.num_bytes:
                raise EnvProtocolError(
                    f"its shared memory has {found.st_size} bytes, its EnvSpec requires {layout.num_bytes}"
                )
        # Populated at once: otherwise the waiting side would pay for the page faults in the first steps.
        region = mmap.mmap(fd, layout.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.request = _views(region, layout.request)
        self.slots = tuple(ResultSlot(_views(region, fields)) for fields in layout.slots)
        results = self.slots[0].arrays.items()
        self.result_bytes = sum(array.nbytes for name, array in results if not name.startswith("final_"))


def copy_observation(observation: Observation) -> Observation:
    """Return the observation in private memory."""
    return Observation(
        observation.images.copy(), observation.state.copy(), list(observation.instruction), observation.task_id.copy()
    )


def copy_step(step: EnvStep) -> EnvStep:
    """Return the outcome of a chunk in private memory."""
    final = step.final_observation
    return EnvStep(
        observation=copy_observation(step.observation),
        **{name: getattr(step, name).copy() for name in _PER_ACTION + _PER_CHUNK},
        final_observation=None if final is None else copy_observation(final),
    )
