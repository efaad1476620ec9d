"""Videos of episodes, written by the simulator process."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.storage.atomic import atomic_file

logger = logging.getLogger("embodrl.envs")


LABELLED_PX = 96
"""Frames of at least this height show the step number; in smaller ones the text would hide the scene."""
SUCCESS = (47, 143, 78)
BEHIND = (24, 24, 24)


class VideoWriter:
    """Collects one frame per step of the recorded rows; a finished video is named after its outcome.

    Frames show their step number and, from the successful step on, the success. A video that can't be written is
    dropped with a warning, since the episodes matter more.

    Args:
        fps: frames per second.
    """

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._frames: dict[int, list[NDArray[np.uint8]]] = {}
        self._paths: dict[int, Path] = {}

    def start(self, row: int, path: str) -> None:
        """Record the upcoming episode of ``row``; ``path`` without suffix."""
        self._frames[row] = []
        self._paths[row] = Path(path)

    def rows(self, mask: NDArray[np.bool_]) -> list[int]:
        """Return the recorded rows among those of ``mask bool[B]``."""
        return [row for row in self._frames if mask[row]]

    def add(self, row: int, frame: NDArray[np.uint8], success: bool = False) -> None:
        """Add the frame ``uint8[H,W,3]`` after a step; ``success``: the episode has succeeded by then."""
        try:
            self._frames[row].append(_labelled(frame, len(self._frames[row]) + 1, success))
        except Exception as error:  # noqa: BLE001  (any simulator's frame; the episode continues without its video)
            self._frames.pop(row)
            _warn(self._paths.pop(row), error)

    def finish(self, row: int, success: bool) -> None:
        """Write ``<path>_success.mp4`` or ``<path>_failure.mp4``; on failure, only warn."""
        frames = self._frames.pop(row)
        path = self._paths.pop(row)
        target = path.with_name(f"{path.name}_{'success' if success else 'failure'}.mp4")
        try:
            with atomic_file(target) as partial:
                _encode(frames, partial, self._fps)
        except Exception as error:  # noqa: BLE001  (any codec may fail in its own way; the episodes matter more)
            _warn(target, error)

    def close(self) -> None:
        """Drop unfinished videos."""
        if self._frames:
            logger.info("dropped %d unfinished videos", len(self._frames))
        self._frames = {}
        self._paths = {}


def _labelled(frame: NDArray[np.uint8], step: int, success: bool) -> NDArray[np.uint8]:
    """Return a copy of a frame with the step number in the lower left corner, if the frame is large enough."""
    if len(frame) < LABELLED_PX:
        return frame.copy()
    from PIL import Image, ImageDraw  # imageio needs it, too

    picture = Image.fromarray(frame)
    draw = ImageDraw.Draw(picture)
    text = f"step {step}{': success' * success}"
    _, _, width, height = draw.textbbox((0, 0), text)
    top = picture.height - height - 7
    draw.rectangle((0, top, width + 8, picture.height), fill=SUCCESS if success else BEHIND)
    draw.text((4, top + 3), text, fill=(255, 255, 255))
    return np.array(picture)


def _encode(frames: list[NDArray[np.uint8]], path: Path, fps: float) -> None:
    import imageio.v2 as imageio
    import imageio_ffmpeg

    # imageio's default of 16 would rescale most images; the codec only needs even sides.
    writer: object = imageio.get_writer(path, fps=fps, macro_block_size=2, quality=7)
    try:
        for frame in frames:
            writer.append_data(frame)
    finally:
        writer.close()
    # imageio ignores the exit status of ffmpeg, which fails at the end if the disk is full.
    written, _ = imageio_ffmpeg.count_frames_and_secs(str(path))
    if written != len(frames):
        raise OSError(f"ffmpeg wrote {written} of {len(frames)} frames; is the disk full?")


def _warn(path: Path, error: Exception) -> None:
    logger.warning("the video %s was dropped: %s: %s", path, type(error).__name__, str(error).strip() or "no reason")
