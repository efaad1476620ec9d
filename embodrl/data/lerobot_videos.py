"""Images of a LeRobot dataset, located in its video files by the times of the rows. Shapes: n rows, H x W image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data.demos import damaged
from embodrl.data.video_file import frame_times, read_video
from embodrl.errors import EmbodrlError

TOLERANCE = 0.1
"""Fraction of the time between two rows: an image further from its row's time shows another moment."""
LEAST_TOLERANCE_S = 1e-4
"""Tolerance of the lerobot package."""


def shown_in(path: Path) -> NDArray[np.float64]:
    """Return the display time of each frame of a file in seconds, ``float64[F]``, ascending.

    Raises FileDamagedError if the file is missing or unreadable, EmbodrlError if its format is unsupported.
    """
    if not path.is_file():
        raise damaged(path, "it is missing")
    try:
        return frame_times(path)
    except OSError as error:
        raise damaged(path, error) from error


def frames_at(
    path: Path,
    shown: NDArray[np.float64],
    times_s: NDArray[np.float64],
    fps: float,
    name: Callable[[int], str],
    is_whole: bool = True,
) -> tuple[NDArray[np.int64], int]:
    """Return the index of the frame shown at each time, and the number of frames after the last of them.

    Args:
        path: video file.
        shown: its display times, from ``shown_in``.
        times_s: ``float64[n]``, seconds in the file.
        fps: rows per second.
        name: names the row of an index into ``times_s``.
        is_whole: the rows cover the whole file from its beginning.

    Raises:
        FileDamagedError: the file ends too early.
        EmbodrlError: no frame is near one of the times, or two rows share a frame.
    """
    if is_whole and len(shown) == len(times_s):  # one frame per row, whenever the clock of the rows was started
        times_s = times_s - times_s.min() + shown[0]
    tolerance = max(LEAST_TOLERANCE_S, TOLERANCE / fps)
    last = int(np.argmax(times_s))
    if not len(shown) or times_s[last] > shown[-1] + 0.5 / fps:
        needed = f"{times_s[last]:.3f} s is needed for {name(last)}"
        short = f"ends after {len(shown)} frames, at {shown.max(initial=0):.3f} s, and {needed}"
        if len(shown) < len(times_s) or not is_whole:
            raise damaged(path, f"it {short}")
        hint = "correct timestamp, from_timestamp, fps or the rate of the video; times are in seconds"
        raise EmbodrlError(f"{path} {short}", hint, code="dataset-frame-times")
    after = np.clip(np.searchsorted(shown, times_s), 1, max(1, len(shown) - 1))
    numbers = np.where(times_s - shown[after - 1] <= np.abs(shown[after % len(shown)] - times_s), after - 1, after)
    off = np.abs(shown[numbers] - times_s)
    hint = "correct timestamp, from_timestamp and fps, or the video; images would show other moments than the actions"
    if not off.max() <= tolerance:
        at = int(np.argmax(~(off <= tolerance)))
        raise EmbodrlError(
            f"{path} has no frame at {times_s[at]:.4f} s, the time of {name(at)}; the nearest is at"
            f" {shown[numbers[at]]:.4f} s, and {tolerance:.4f} s are allowed",
            hint,
            code="dataset-frame-times",
        )
    order = np.argsort(numbers, kind="stable")
    if len(same := np.flatnonzero(np.diff(numbers[order]) == 0)):
        first, second = (int(order[same[0] + n]) for n in (0, 1))
        raise EmbodrlError(
            f"{path} has a single frame for {name(first)} and {name(second)}, at {shown[numbers[first]]:.4f} s",
            hint,
            code="dataset-frame-times",
        )
    return numbers, int((shown > times_s[last] + 0.95 / fps).sum())


def frames_of(path: Path, numbers: NDArray[np.int64], size: tuple[int, int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield indices into ``numbers int64[n]`` with their frames ``uint8[H,W,3]``, in the order of the file.

    Raises FileDamagedError if a frame can't be decoded, EmbodrlError if frames have another height or width.
    """
    order = np.argsort(numbers)
    first = at = int(numbers[order[0]])
    try:
        frames = read_video(path, first, strict=True)
        for place in order:
            frame = next(frames, None)
            while frame is not None and at < numbers[place]:
                frame = next(frames, None)
                at += 1
            if frame is None:
                raise damaged(path, f"it ends after {at} frames, and {int(numbers.max()) + 1} are needed")
            check_size(path, "a frame", (frame.shape[0], frame.shape[1]), size)
            yield int(place), frame
            at += 1
    except OSError as error:
        raise damaged(path, error) from error


def check_size(path: Path, what: str, found: tuple[int, int], stated: tuple[int, int]) -> None:
    """Raise EmbodrlError if height and width of an image differ from info.json."""
    if found != stated:
        hint = "correct shape and names in meta/info.json"
        if found == stated[::-1]:
            hint += ": height and width are swapped there, or the video is displayed rotated"
        raise EmbodrlError(
            f"{path}: {what} is {found[0]} x {found[1]} (height x width), and {stated[0]} x {stated[1]} by info.json",
            hint,
            code="dataset-picture-size",
        )
