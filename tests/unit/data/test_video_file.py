"""Reading videos by ffmpeg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodrl.data.video_file import frame_rate, read_video

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")


def test_ffmpeg_is_not_to_print_what_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did so in the midst of the line with the size, once in some hundred reads, and the file counted as damaged."""
    asked: list[list[str]] = []

    def refuse(path: str, input_params: list[str], **_: Any) -> Any:
        asked.append(input_params)
        yield from ()

    monkeypatch.setattr(imageio_ffmpeg, "read_frames", refuse)
    for read in (lambda path: list(read_video(path)), lambda path: list(read_video(path, strict=True)), frame_rate):
        with pytest.raises(OSError):
            read(Path("video.mp4"))
    assert len(asked) == 3 and all("-nostdin" in each for each in asked)
