"""Encoding and decoding of MP4 files with the ffmpeg of imageio-ffmpeg.

Lossless is H.264 of RGB (High 4:4:4 Predictive): pixels are recovered exactly. Lossy is H.264 of YUV 4:4:4 with full
colour resolution; at 64 x 64 pixels the usual 4:2:0 costs more than the compression.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.data.lerobot import require
from embodrl.errors import EmbodrlError
from embodrl.fields import open_regular_file

# Reading one frame decodes from the preceding key frame on.
KEY_FRAME_INTERVAL = 10
CODEC = "h264"
CONTAINERS = "mov,matroska,avi"
"""ffmpeg's names of the supported formats: mp4 and its variants, mkv and webm, avi. These contain their images;
playlists (ffconcat, HLS, ...), which ffmpeg detects by content whatever the file name, open other files."""
READING = ("-nostdin", "-protocol_whitelist", "file", "-format_whitelist", CONTAINERS)
"""ffmpeg options for untrusted videos: open that file and no other. Without -nostdin, ffmpeg prints its "press q"
prompt, at times within the lines the size is read from."""
HLS = b"#EXTM3U"
"""First bytes of an HLS playlist."""
BOM = b"\xef\xbb\xbf"
"""UTF-8 byte order mark, which may precede them."""

NOT_SHOWN = 4
"""Packet flag: the frame is decoded for others, but cut off by the file's edit list."""


def pixel_format(crf: int) -> str:
    """Return ffmpeg's name of the pixel format."""
    return "yuv444p" if crf else "gbrp"


class VideoEncoder:
    """Writes one MP4 file of ``height`` x ``width`` pixels in an existing directory.

    ``crf`` 0 is lossless; up to 51, smaller and worse. ``add`` and ``close`` raise OSError with ffmpeg's last output.
    """

    def __init__(self, path: Path, height: int, width: int, fps: int, crf: int) -> None:
        (imageio_ffmpeg,) = require("imageio_ffmpeg")
        codec = ["libx264", "-crf", str(crf)] if crf else ["libx264rgb", "-qp", "0"]
        # Without B-frames, images are stored in display order, starting at time 0.
        order = ["-bf", "0", "-g", str(KEY_FRAME_INTERVAL)]
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"]
        stored = ["-pix_fmt", "yuv444p" if crf else "rgb24", *order, "-threads", "1"]
        command = [
            imageio_ffmpeg.get_ffmpeg_exe(),
            "-v",
            "error",
            "-y",
            *raw,
            "-an",
            "-c:v",
            *codec,
            *stored,
            str(path),
        ]
        self.path = path
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # In its own session: Ctrl-C must reach only the program, which finishes the file properly.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._log, start_new_session=True
        )

    def add(self, frames: NDArray[np.uint8]) -> None:
        """Add ``uint8[N,H,W,3]``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(np.ascontiguousarray(frames).tobytes())
        except OSError as error:
            self.abort()
            raise OSError(self._last_output or str(error)) from error

    def close(self) -> None:
        """Finish the file."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError as error:
            self.abort()
            raise OSError(self._last_output or str(error)) from error
        code = self._process.wait()
        self._read_log()
        if code:
            raise OSError(self._last_output or f"ffmpeg ended with code {code}")

    def abort(self) -> None:
        """Stop ffmpeg; its output is unusable."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._read_log()

    _last_output = ""

    def _read_log(self) -> None:
        if not self._log.closed:
            self._log.seek(0)
            self._last_output = self._log.read()[-500:].decode(errors="replace").strip()
            self._log.close()


def _source(path: Path) -> str:
    """Return a file as an ffmpeg argument: a name with a colon would be read as a protocol."""
    return f"file:{path}"


def _begins_with(path: Path, mark: bytes) -> bool:
    try:
        with open_regular_file(path, follow_links=True) as file:
            return file.read(len(BOM) + len(mark)).removeprefix(BOM).startswith(mark)
    except OSError:  # ffmpeg's output becomes the error
        return False


def _undecodable(path: Path, reason: object) -> OSError | EmbodrlError:
    """Return the error for a file that ffmpeg can't decode."""
    # For ffmpeg, an HLS playlist named .mp4 has no known format.
    if "Format not on whitelist" in str(reason) or _begins_with(path, HLS):
        return EmbodrlError(
            f"{path} is not an mp4, mkv, webm or avi file by its content; playlists and other references to files are"
            " not followed",
            "store the images themselves in an mp4 file",
            code="dataset-video-format",
        )
    return OSError(f"{path} can't be decoded: {str(reason)[-500:].strip()}")


def read_video(path: Path, first: int = 0, strict: bool = False) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames ``uint8[H,W,3]`` of a file in ``CONTAINERS``, with any codec, from index ``first`` on.

    Args:
        path: video file.
        first: index of the first frame.
        strict: stop at the first frame with decoding errors; by default ffmpeg conceals them.

    Raises:
        OSError: the file can't be read.
        EmbodrlError: the format is not in ``CONTAINERS``.
    """
    (imageio_ffmpeg,) = require("imageio_ffmpeg")
    # Every stored frame once: by default ffmpeg repeats or drops frames to keep the rate.
    stream = imageio_ffmpeg.read_frames(
        _source(path), input_params=[*READING, *["-xerror"] * strict], output_params=["-fps_mode", "passthrough"]
    )
    try:
        width, height = next(stream)["size"]
        for number, frame in enumerate(stream):
            if number >= first:
                yield np.frombuffer(frame, np.uint8).reshape(height, width, 3)
    except (OSError, RuntimeError, StopIteration, KeyError) as error:
        raise _undecodable(path, error) from error
    finally:
        stream.close()


def frame_times(path: Path) -> NDArray[np.float64]:
    """Return the display time in seconds of each frame of ``read_video``, ``float64[F]``, without decoding.

    Raises as ``read_video``.
    """
    (imageio_ffmpeg,) = require("imageio_ffmpeg")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), *READING, "-v", "error", "-copyts", "-i", _source(path)]
    command += ["-map", "0:v:0", "-c", "copy", "-f", "framecrc", "-"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    unit = re.search(r"^#tb 0: (\d+)/(\d+)$", done.stdout, re.MULTILINE)
    if done.returncode or unit is None:
        raise _undecodable(path, done.stderr)
    ticks: list[int] = []
    for line in done.stdout.splitlines():
        # stream, decoding time, presentation time, duration, bytes, checksum, and flags if any
        parts = [part.strip() for part in line.split(",")]
        flags = next((int(part[2:], 16) for part in parts[6:] if part.startswith("F=")), 1)
        if line.startswith("0,") and not flags & NOT_SHOWN:
            if not parts[2].lstrip("-").isdigit():
                raise OSError(f"{path} can't be decoded: it has frames without a timestamp")
            ticks.append(int(parts[2]))
    return np.sort(np.array(ticks, np.float64)) * int(unit[1]) / int(unit[2])


def frame_rate(path: Path) -> float:
    """Return the frame rate stated by a file; raises as ``read_video``."""
    (imageio_ffmpeg,) = require("imageio_ffmpeg")
    stream = imageio_ffmpeg.read_frames(_source(path), input_params=[*READING])
    try:
        return float(next(stream)["fps"])
    except (OSError, RuntimeError, StopIteration, KeyError) as error:
        raise _undecodable(path, error) from error
    finally:
        stream.close()
