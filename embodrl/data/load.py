"""Demonstrations of any format that is known by its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from embodrl.data.demos import Demos
from embodrl.data.lerobot import INFO
from embodrl.data.raw import load_raw


def load_demos(
    directory: Path,
    max_episodes: int | None = None,
    cameras: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    keys: Mapping[str, str] | None = None,
) -> Demos:
    """Load a LeRobot dataset, or what ``collect.format=raw`` wrote.

    Args:
        directory: of the dataset.
        max_episodes: only the first ones.
        cameras: which cameras of a LeRobot dataset, in that order; None takes all, in the order of the dataset.
        size: height and width that pictures of a LeRobot dataset are brought to; None leaves them.
        keys: ``sft.keys``: features of a LeRobot dataset by the names that embodrl gives them.

    Raises:
        EmbodrlError: there are none, a file is missing or damaged, or a camera is not there.
        MissingDependencyError: the extra ``datasets`` is not installed.
    """
    if is_lerobot(directory):
        from embodrl.data.lerobot_reader import load_lerobot

        return load_lerobot(directory, max_episodes, cameras, size, keys)
    return load_raw(directory, max_episodes)


def is_lerobot(directory: Path) -> bool:
    """Return whether a directory is a LeRobot dataset, which may be damaged."""
    return (directory / INFO).parent.is_dir()


def camera_names(directory: Path, keys: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the features of a LeRobot dataset's cameras, in its order; None for a format without names."""
    if not is_lerobot(directory):
        return None
    from embodrl.data.lerobot_info import read_info

    return read_info(directory, keys).cameras
