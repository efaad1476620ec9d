"""Demonstrations of any format that is known by its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embodrl.data.demos import Demos
from embodrl.data.lerobot import INFO
from embodrl.data.raw import load_raw


def load_demos(
    directory: Path,
    max_episodes: int | None = None,
    cameras: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
) -> Demos:
    """Load a LeRobot dataset, or what ``collect.format=raw`` wrote.

    Args:
        directory: of the dataset.
        max_episodes: only the first ones.
        cameras: which cameras of a LeRobot dataset, in that order; None takes all, in the order of the dataset.
        size: height and width that pictures of a LeRobot dataset are brought to; None leaves them.

    Raises:
        EmbodrlError: there are none, a file is missing or damaged, or a camera is not there.
        MissingDependencyError: the extra ``datasets`` is not installed.
    """
    if is_lerobot(directory):
        from embodrl.data.lerobot_reader import load_lerobot

        return load_lerobot(directory, max_episodes, cameras, size)
    return load_raw(directory, max_episodes)


def is_lerobot(directory: Path) -> bool:
    """Return whether a directory is a LeRobot dataset, which may be damaged."""
    return (directory / INFO).parent.is_dir()


def camera_names(directory: Path) -> list[str] | None:
    """Return the names of a LeRobot dataset's cameras, in its order; None for another format, which has no names."""
    if not is_lerobot(directory):
        return None
    from embodrl.data.lerobot_reader import read_info

    return read_info(directory).cameras
