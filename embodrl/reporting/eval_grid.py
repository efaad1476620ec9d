"""The videos of an evaluation as one grid: one tile per episode, framed by its outcome."""

from __future__ import annotations

import contextlib
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data.video_file import frame_rate, read_video
from embodrl.storage.atomic import atomic_file

BORDER_PX = 6
CAPTION_PX = 44
LINE_PX = 16
RUNNING = (110, 110, 110)
SUCCESS = (47, 143, 78)
FAILURE = (179, 38, 30)
# How long the outcomes stay visible after the last episode has ended.
HOLD_S = 1.0


@dataclass(frozen=True)
class Tile:
    """One episode: video file, and caption of number, task and instruction, in that order."""

    video: Path
    caption: str
    success: bool


def write_grid(tiles: list[Tile], path: Path) -> None:
    """Write an MP4 that every browser plays: frames are grey while an episode runs, then green or red.

    Args:
        tiles: at least one; videos may differ in length and size, but not in frame rate.
        path: path of the MP4.

    Raises:
        OSError: a video can't be read.
        OutputError: the file can't be written.
    """
    import imageio.v2 as imageio

    fps = frame_rate(tiles[0].video)
    clips = [np.stack(list(read_video(tile.video))) for tile in tiles]
    height, width = (max(clip.shape[axis] for clip in clips) for axis in (1, 2))
    captions = [_caption(tile, width + 2 * BORDER_PX) for tile in tiles]
    columns = math.ceil(math.sqrt(len(tiles)))
    with atomic_file(path) as partial:
        writer: object = imageio.get_writer(partial, fps=fps, macro_block_size=2, quality=7)
        with contextlib.closing(writer):
            for at in range(max(len(clip) for clip in clips) + math.ceil(HOLD_S * fps)):
                drawn = [
                    _draw(clip, at, tile.success, caption, (height, width))
                    for tile, clip, caption in zip(tiles, clips, captions, strict=True)
                ]
                writer.append_data(arrange(drawn, columns))


def arrange(pictures: list[NDArray[np.uint8]], columns: int) -> NDArray[np.uint8]:
    """Arrange images of one size ``uint8[H,W,3]`` in rows of ``columns``; unused cells are black."""
    blank = np.zeros_like(pictures[0])
    rows = [pictures[start : start + columns] for start in range(0, len(pictures), columns)]
    rows[-1] = rows[-1] + [blank] * (columns - len(rows[-1]))
    return np.concatenate([np.concatenate(row, axis=1) for row in rows])


def _draw(
    clip: NDArray[np.uint8], at: int, success: bool, caption: NDArray[np.uint8], size: tuple[int, int]
) -> NDArray[np.uint8]:
    ended = at >= len(clip) - 1
    colour = (SUCCESS if success else FAILURE) if ended else RUNNING
    frame = clip[min(at, len(clip) - 1)]
    tile = np.empty((size[0] + 2 * BORDER_PX, size[1] + 2 * BORDER_PX, 3), np.uint8)
    tile[:] = colour
    top = BORDER_PX + (size[0] - frame.shape[0]) // 2
    left = BORDER_PX + (size[1] - frame.shape[1]) // 2
    tile[top : top + frame.shape[0], left : left + frame.shape[1]] = frame
    # A shape next to the colour: not everyone can tell red from green.
    if ended:
        _mark(tile, success, colour)
    return np.concatenate([tile, caption])


def _mark(tile: NDArray[np.uint8], success: bool, colour: tuple[int, int, int]) -> None:
    """Draw a tick or a cross into the upper right corner."""
    from PIL import Image, ImageDraw

    side = 22
    corner = Image.new("RGB", (side, side), colour)
    draw = ImageDraw.Draw(corner)
    strokes = [(5, 12, 9, 16), (9, 16, 17, 6)] if success else [(6, 6, 16, 16), (6, 16, 16, 6)]
    for stroke in strokes:
        draw.line(stroke, fill="white", width=3)
    tile[:side, -side:] = np.asarray(corner)


def _caption(tile: Tile, width: int) -> NDArray[np.uint8]:
    """Return ``uint8[CAPTION_PX,width,3]`` with the text in at most two lines."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (width, CAPTION_PX), (24, 24, 24))
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(12)
    letters = max(int((width - 12) / max(draw.textlength("n", font=font), 1)), 4)
    lines = textwrap.wrap(tile.caption, letters, max_lines=2, placeholder=" ...") or [""]
    for number, line in enumerate(lines):
        draw.text((BORDER_PX, 5 + LINE_PX * number), line, fill=(235, 235, 235), font=font)
    return np.asarray(picture)
