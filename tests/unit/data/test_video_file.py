"""Reading videos by ffmpeg."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expect import raises_code

from embodrl.data.video_file import VideoEncoder, frame_rate, frame_times, read_video

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


READERS = {"pictures": lambda path: list(read_video(path)), "times": frame_times, "rate": frame_rate}


def encode(path: Path) -> Path:
    encoder = VideoEncoder(path, 32, 48, 10, 0)
    encoder.add(np.full((3, 32, 48, 3), 7, np.uint8))
    encoder.close()
    return path


@pytest.mark.parametrize("read", READERS)
def test_a_playlist_is_not_followed_to_another_file(tmp_path: Path, read: str) -> None:
    encode(tmp_path / "other.mp4")
    playlist = tmp_path / "video.mp4"
    hls = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.mp4\n#EXT-X-ENDLIST\n"
    for content in ("ffconcat version 1.0\nfile other.mp4\n", hls, "\ufeff" + hls):
        playlist.write_text(content, encoding="utf-8")
        with raises_code("dataset-video-format") as refused:
            READERS[read](playlist)
        assert "ffmpeg" not in str(refused.value.hint)  # it would open what the playlist names


@pytest.mark.parametrize("read", READERS)
def test_a_name_is_no_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str) -> None:
    encode(tmp_path / "other.mp4")
    monkeypatch.chdir(tmp_path)
    name = Path("concat:other.mp4|other.mp4")
    with pytest.raises(OSError):
        READERS[read](name)
    shutil.copyfile("other.mp4", name)
    READERS[read](name)
