"""Videos of episodes, written by the simulator process itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("embodrl.envs")


class VideoWriter:
    """Collects frames of the rows that are filmed; a finished video is named after its outcome.

    Args:
        fps: frames a second.
    """

    def __init__(self, fps: int) -> None:
        self._fps = fps
        self._frames: dict[int, list[NDArray[np.uint8]]] = {}
        self._paths: dict[int, Path] = {}

    def start(self, row: int, path: str) -> None:
        """Film the episode of ``row`` that is about to be played; ``path`` without suffix."""
        self._frames[row] = []
        self._paths[row] = Path(path)

    def rows(self, mask: NDArray[np.bool_]) -> list[int]:
        """Return the filmed rows among those of ``mask bool[B]``."""
        return [row for row in self._frames if mask[row]]

    def add(self, row: int, frame: NDArray[np.uint8]) -> None:
        """Add a frame ``uint8[H,W,3]``."""
        self._frames[row].append(frame.copy())

    def finish(self, row: int, success: bool) -> None:
        """Write ``<path>_success.mp4`` or ``<path>_failure.mp4``."""
        import imageio.v2 as imageio

        frames, path = self._frames.pop(row), self._paths.pop(row)
        target = path.with_name(f"{path.name}_{'success' if success else 'failure'}.mp4")
        partial = target.with_name(f".{target.stem}.partial.mp4")
        target.parent.mkdir(parents=True, exist_ok=True)
        writer: Any = imageio.get_writer(partial, fps=self._fps, macro_block_size=2, quality=7)
        try:
            for frame in frames:
                writer.append_data(frame)
        finally:
            writer.close()
        partial.rename(target)

    def close(self) -> None:
        """Drop what was not finished."""
        if self._frames:
            logger.info("dropped %d unfinished videos", len(self._frames))
        self._frames, self._paths = {}, {}
