"""Loading of demonstrations; the format is detected from the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from embodrl.data.demos import Demos
from embodrl.data.lerobot import INFO
from embodrl.data.pictures import Place, in_memory
from embodrl.data.raw import load_raw


def load_demos(
    directory: Path,
    max_episodes: int | None = None,
    cameras: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    keys: Mapping[str, str] | None = None,
    place: Place = in_memory,
) -> Demos:
    """Load a LeRobot dataset or the output of ``collect.format=raw``.

    Args:
        directory: dataset directory.
        max_episodes: maximum number of episodes.
        cameras: cameras of a LeRobot dataset, in this order; None takes all, in the order of the dataset.
        size: height and width to resize images of a LeRobot dataset to; None keeps them.
        keys: ``sft.keys``: features of a LeRobot dataset by embodrl's names.
        place: makes the array of all images.

    Raises:
        EmbodrlError: no demonstrations, images without room, a missing or damaged file, or an unknown camera.
        MissingDependencyError: the extra ``datasets`` is not installed.
    """
    if is_lerobot(directory):
        from embodrl.data.lerobot_reader import load_lerobot

        return load_lerobot(directory, max_episodes, cameras, size, keys, place)
    return load_raw(directory, max_episodes, place)


def is_lerobot(directory: Path) -> bool:
    """Whether a directory is a LeRobot dataset, possibly a damaged one."""
    return (directory / INFO).parent.is_dir()


def camera_names(directory: Path, keys: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the camera features of a LeRobot dataset, in its order; None for a format without names."""
    if not is_lerobot(directory):
        return None
    from embodrl.data.lerobot_info import read_info

    return read_info(directory, keys).cameras
