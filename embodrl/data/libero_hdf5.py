"""LIBERO's published demonstrations (HDF5) as demonstrations that `embodrl sft` trains on.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.data.demos import Episode, Writer
from embodrl.errors import EmbodrlError, MissingDependencyError
from embodrl.specs import ENVS

CAMERAS = {"agentview": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
STATE = ("ee_pos", "ee_ori", "gripper_states")
NOTHING = 1e-4  # OpenVLA's threshold for an action that does nothing


def convert(
    source: Path,
    make_writer: Callable[[], Writer],
    cameras: tuple[str, ...],
    keep_idle: bool,
    tell: Callable[[str], None],
) -> tuple[int, int]:
    """Write the demonstrations of a file, or of all ``*.hdf5`` in a directory.

    Pictures are turned by 180 degrees, as the environment gives them and published policies want them. Actions are
    LIBERO's own. Frames in which nothing is commanded are dropped, as in OpenVLA's data.

    Args:
        source: file or directory.
        make_writer: called once the source was found.
        cameras: keys of ``CAMERAS``, in the order of ``env.cameras``.
        keep_idle: keep the frames in which nothing is commanded.
        tell: called with lines of progress.

    Returns:
        How many episodes and frames were written.

    Raises:
        MissingDependencyError: h5py is not installed.
        EmbodrlError: there are none, or a file is not in LIBERO's layout.
    """
    unknown = [name for name in cameras if name not in CAMERAS]
    if unknown or not cameras or len(set(cameras)) < len(cameras):
        raise EmbodrlError(
            f"the demonstrations have no cameras '{', '.join(cameras)}'", f"name {', '.join(CAMERAS)}, each once"
        )
    files = sorted(source.glob("*.hdf5")) if source.is_dir() else [source] if source.is_file() else []
    if not files:
        raise EmbodrlError(f"there are no .hdf5 files in {source}", "give a file or the directory of a suite")
    h5py = _import_h5py()
    writer, episodes = make_writer(), 0
    try:
        for path in files:
            count = 0
            for episode in read_file(h5py, path, cameras, keep_idle):
                writer.add(episode)
                count += 1
            tell(f"{path.name}: {count} episodes")
            episodes += count
        frames = writer.num_frames
        writer.close({"env_type": "libero", "source": [path.name for path in files], "cameras": list(cameras)})
    except BaseException:
        writer.abort()
        raise
    return episodes, frames


def _import_h5py() -> Any:
    try:
        return import_module("h5py")
    except ImportError as error:
        raise MissingDependencyError("h5py is not installed", "pip install 'embodrl[libero-demos]'") from error


def read_file(h5py: Any, path: Path, cameras: tuple[str, ...], keep_idle: bool) -> Iterator[Episode]:
    """Yield the episodes of a file; see ``convert``."""
    task = path.stem.removesuffix("_demo")
    try:
        with h5py.File(path, "r") as file:
            data = file["data"]
            instruction = _instruction(task, data.attrs)
            for name in sorted(data, key=lambda name: int(name.rpartition("_")[2])):
                number = int(name.rpartition("_")[2])
                yield _episode(data[name], task, instruction, number, cameras, keep_idle)
    except (OSError, KeyError, ValueError) as error:
        raise EmbodrlError(
            f"{path} is not in the layout of LIBERO's demonstrations: {error}",
            "use the files of LIBERO's own download, as <task>_demo.hdf5",
        ) from error


def _instruction(task: str, attributes: Any) -> str:
    """Return the words that the environment uses for the task; those of the file where it is of no known suite."""
    known = ENVS.entry("libero").instructions()
    if task in known:
        return known[task]
    words = json.loads(attributes["problem_info"])["language_instruction"]
    return "".join(words).strip('"') if isinstance(words, list) else str(words).strip('"')


def _episode(demo: Any, task: str, instruction: str, number: int, cameras: tuple[str, ...], keep_idle: bool) -> Episode:
    actions = np.asarray(demo["actions"], np.float32)
    kept = np.arange(len(actions)) if keep_idle else moving(actions)
    obs = demo["obs"]
    views = [np.asarray(obs[CAMERAS[name]])[kept][:, ::-1, ::-1] for name in cameras]
    state = np.concatenate([np.asarray(obs[name], np.float32) for name in STATE], axis=1)
    return Episode(
        images=np.ascontiguousarray(np.stack(views, axis=1)),
        state=state[kept],
        actions=actions[kept],
        instruction=instruction,
        task=task,
        seed=number,
        success=bool(np.asarray(demo["rewards"])[-1] > 0) if "rewards" in demo else True,
    )


def moving(actions: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the frames of ``actions float32[N,7]`` that command a motion or another gripper than the last kept one."""
    kept: list[int] = []
    for frame, action in enumerate(actions):
        gripper_stays = not kept or action[-1] == actions[kept[-1]][-1]
        if np.linalg.norm(action[:-1]) >= NOTHING or not gripper_stays:
            kept.append(frame)
    return np.array(kept, np.int64)
