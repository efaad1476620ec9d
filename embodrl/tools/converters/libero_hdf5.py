"""Converts LIBERO's published demonstrations (HDF5) for `embodrl sft`.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from embodrl.data.dataset_writer import DatasetWriter
from embodrl.data.demos import DemoEpisode, check_numbers
from embodrl.errors import EmbodrlError, MissingDependencyError
from embodrl.fields import parse_fields
from embodrl.specs import ENVS

_Number = TypeVar("_Number", np.float32, np.uint8)

CAMERAS = {"agentview": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
STATE = ("ee_pos", "ee_ori", "gripper_states")
NOTHING = 1e-4  # OpenVLA's threshold for a no-op action
MAX_ATTRIBUTE_BYTES = 2**20
_SCENE = re.compile(r"^[A-Z_]*SCENE\d+_")
"""Scene prefix of LIBERO-90 and LIBERO-10 file names, before the task."""
MAX_BYTES = 2**33
"""Size limit of one array of an episode."""


def convert(
    source: Path,
    make_writer: Callable[[], DatasetWriter],
    cameras: tuple[str, ...],
    keep_idle: bool,
    report: Callable[[str], None],
    instruction: str | None = None,
    upright: bool = False,
) -> tuple[int, int]:
    """Write the demonstrations of a file, or of a directory's ``*.hdf5``; return the number of episodes and frames.

    Images are rotated by 180 degrees, as in the environment and for published policies, unless they are already
    (``upright``). Actions are LIBERO's own. Frames without a command are dropped, as in OpenVLA's data.

    Args:
        source: file or directory.
        make_writer: called once the source was found.
        cameras: keys of ``CAMERAS``, in the order of ``env.cameras``.
        keep_idle: keep the frames without a command.
        report: called with lines of progress.
        instruction: replaces the task's instruction.
        upright: the images are already rotated, as some forks store them.

    Raises:
        MissingDependencyError: h5py is not installed.
        EmbodrlError: there are no demonstrations, or a file is not in LIBERO's layout.
    """
    unknown = [name for name in cameras if name not in CAMERAS]
    if unknown or not cameras or len(set(cameras)) < len(cameras):
        raise EmbodrlError(
            f"the demonstrations have no cameras '{', '.join(cameras)}'",
            f"name {', '.join(CAMERAS)}, each once",
            code="libero-cameras",
        )
    files = sorted(source.glob("*.hdf5")) if source.is_dir() else [source] if source.is_file() else []
    if not files:
        raise EmbodrlError(
            f"there are no .hdf5 files in {source}", "give a file or the directory of a suite", code="libero-no-files"
        )
    try:
        h5py = import_module("h5py")
    except ImportError as error:
        raise MissingDependencyError("h5py is not installed", "pip install 'embodrl[libero-demos]'") from error
    episodes = 0
    with make_writer() as writer:
        for path in files:
            count = 0
            for episode in read_file(h5py, path, cameras, keep_idle, instruction):
                if upright:
                    episode.images = np.ascontiguousarray(episode.images[:, :, ::-1, ::-1])
                if len(episode.actions):  # all frames may be idle
                    writer.add(episode)
                    count += 1
            report(f"{path.name}: {count} episodes")
            episodes += count
        if not episodes:
            raise EmbodrlError(
                f"{source} holds no episodes", "use the files of LIBERO's own download", code="dataset-empty"
            )
        writer.close({"env_type": "libero", "source": [path.name for path in files], "cameras": list(cameras)})
    return episodes, writer.num_frames


def read_file(
    h5py: ModuleType, path: Path, cameras: tuple[str, ...], keep_idle: bool, instruction: str | None = None
) -> Iterator[DemoEpisode]:
    """Yield the episodes of a file, with rotated images; arguments and errors as for ``convert``."""
    task = path.stem.removesuffix("_demo")
    try:
        with h5py.File(path, "r") as file:
            data = file["data"]
            words = _instruction(path, task, data.attrs) if instruction is None else instruction
            for name in sorted(data, key=_number):
                yield _Demo(h5py, path, f"data/{name}", file).episode(task, words, cameras, keep_idle)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError) as error:  # raised by h5py for damaged files
        raise EmbodrlError(
            f"{path} is not in the layout of LIBERO's demonstrations: {error}",
            "use the files of LIBERO's own download, as <task>_demo.hdf5",
            code="libero-layout",
        ) from error


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def _instruction(path: Path, task: str, attributes: Mapping[str, object]) -> str:
    """Return the environment's instruction for the task; the file's own if the suite is unknown.

    Files without attributes (e.g. the published no-op filtered ones) have the instruction in their name, as LIBERO
    reads it.
    """
    known = ENVS.entry("libero").instructions()
    if task in known:
        return known[task]
    if "problem_info" not in attributes:
        return _SCENE.sub("", task).replace("_", " ")
    encoded = attributes["problem_info"]
    if not isinstance(encoded, str | bytes):
        raise ValueError("its attribute 'problem_info' is not text")
    info = parse_fields(encoded, f"{path}, problem_info", max_bytes=MAX_ATTRIBUTE_BYTES)
    words = info.content.get("language_instruction")
    return (
        "".join(info.texts("language_instruction")) if isinstance(words, list) else info.text("language_instruction")
    ).strip('"')


class _File(Protocol):
    filename: str


class _Dataset(Protocol):
    """The used part of ``h5py.Dataset``."""

    file: _File
    external: object
    is_virtual: bool
    shape: tuple[int, ...]
    nbytes: int
    dtype: np.dtype[np.generic]

    def __getitem__(self, index: tuple[()]) -> object: ...


class _Demo:
    """A demonstration in a file."""

    def __init__(self, h5py: ModuleType, path: Path, name: str, file: Mapping[str, _Dataset]) -> None:
        self._h5py = h5py
        self._path = path
        self._name = name
        self._file = file
        self._length: int | None = None

    def episode(self, task: str, instruction: str, cameras: tuple[str, ...], keep_idle: bool) -> DemoEpisode:
        """Return the episode, without frames that have no command unless ``keep_idle``."""
        number = _number(self._name)
        actions = self._array("actions", (7,))
        check_numbers(self._path, f"{self._name}/actions", actions, number)
        kept = np.arange(len(actions)) if keep_idle else moving(actions)
        pictures = [self._array(f"obs/{CAMERAS[name]}", (None, None, 3), np.uint8) for name in cameras]
        state = np.concatenate([self._array(f"obs/{name}", (None,)) for name in STATE], axis=1)
        check_numbers(self._path, f"{self._name}/obs", state, number)
        rewards = self._array("rewards", ()) if f"{self._name}/rewards" in self._file else None
        return DemoEpisode(
            images=np.ascontiguousarray(np.stack([view[kept][:, ::-1, ::-1] for view in pictures], axis=1)),
            state=state[kept],
            actions=actions[kept],
            instruction=instruction,
            task=task,
            seed=number,
            success=rewards is None or bool(rewards[-1] > 0),
        )

    def _array(self, name: str, shape: tuple[int | None, ...], dtype: type[_Number] = np.float32) -> NDArray[_Number]:
        """Read ``[N, *shape]``; None is any size."""
        dataset = self._file[f"{self._name}/{name}"]
        name = f"{self._name}/{name}"
        if not isinstance(dataset, self._h5py.Dataset):
            raise ValueError(f"{name} is not a dataset")
        if dataset.file.filename != str(self._path) or dataset.external or dataset.is_virtual:
            raise ValueError(f"{name} is stored in another file")
        found = tuple(dataset.shape)
        fits = len(found) == 1 + len(shape) and all(
            size in (None, n) for size, n in zip(shape, found[1:], strict=False)
        )
        self._length = self._length or (found[0] if found else 0)
        if not fits or found[0] != self._length or not found[0] or dataset.nbytes > MAX_BYTES:
            raise ValueError(f"{name} has the shape {list(found)} in an episode of {self._length} frames")
        numeric = dataset.dtype == dtype if dtype is np.uint8 else dataset.dtype.kind in "fiub"
        if not numeric:
            raise ValueError(f"{name} is {dataset.dtype}, not {dtype.__name__}")
        return np.asarray(dataset[()]).astype(dtype)


def moving(actions: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the frames of ``actions float32[N,7]`` that move, or change the last kept gripper command."""
    kept: list[int] = []
    for frame, action in enumerate(actions):
        gripper_stays = not kept or action[-1] == actions[kept[-1]][-1]
        if np.linalg.norm(action[:-1]) >= NOTHING or not gripper_stays:
            kept.append(frame)
    return np.array(kept, np.int64)
