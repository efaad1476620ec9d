"""Pictures into an MP4 file and back, by the ffmpeg that imageio-ffmpeg brings.

Lossless is H.264 of RGB (High 4:4:4 Predictive): every pixel comes back as it was. Lossy is H.264 of YUV 4:4:4, in
which colour has the full resolution; at 64 x 64 pixels the usual 4:2:0 costs more than the compression.
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

# A reader that wants one frame decodes from the last key frame on.
KEY_FRAME_INTERVAL = 10
CODEC = "h264"
CONTAINERS = "mov,matroska,avi"
"""ffmpeg's names of the formats that are read: mp4 and its variants, mkv and webm, avi. Each has its pictures in
itself; a playlist (ffconcat, HLS, ...), which ffmpeg knows by its content whatever the file is called, opens other
files."""
READING = ("-nostdin", "-protocol_whitelist", "file", "-format_whitelist", CONTAINERS)
"""Of a reading ffmpeg, which is given the video of a stranger: it opens that file and no other. Without -nostdin it
prints that q stops it, now and then within the lines that the size is read from."""
HLS = b"#EXTM3U"
"""First bytes of a playlist of HLS."""
BOM = b"\xef\xbb\xbf"
"""UTF-8's mark of byte order, which may come before them."""

NOT_SHOWN = 4
"""Flag of a packet: its frame is decoded for others, and cut off by the file's edit list."""


def pixel_format(crf: int) -> str:
    """Return ffmpeg's name of how pixels are stored."""
    return "yuv444p" if crf else "gbrp"


class VideoEncoder:
    """Writes one file.

    Args:
        path: of the MP4; its directory exists.
        height, width: pixels.
        fps: frames per second.
        crf: 0 is lossless; up to 51, smaller and worse.

    Raises:
        OSError: from ``add`` and ``close``, ffmpeg failed; its last output is the message.
    """

    def __init__(self, path: Path, height: int, width: int, fps: int, crf: int) -> None:
        (imageio_ffmpeg,) = require("imageio_ffmpeg")
        codec = ["libx264", "-crf", str(crf)] if crf else ["libx264rgb", "-qp", "0"]
        # Without B-frames pictures are stored in the order of time, from time 0 on.
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
        # In a session of its own: Ctrl-C is for the program, which ends the file properly.
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
        """End ffmpeg; what it has written is of no use."""
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
    """Return a file as an argument of ffmpeg: a name with a colon would be a protocol."""
    return f"file:{path}"


def _begins_with(path: Path, mark: bytes) -> bool:
    try:
        with open_regular_file(path, follow_links=True) as file:
            return file.read(len(BOM) + len(mark)).removeprefix(BOM).startswith(mark)
    except OSError:  # what ffmpeg said of it is the error
        return False


def _undecodable(path: Path, reason: object) -> OSError | EmbodrlError:
    """Return the error of a file that ffmpeg does not decode."""
    # One of HLS that is called .mp4 is no format at all to ffmpeg.
    if "Format not on whitelist" in str(reason) or _begins_with(path, HLS):
        return EmbodrlError(
            f"{path} is no mp4, mkv, webm or avi file by its content; playlists and others that name further files are"
            " not followed",
            "store the pictures themselves in an mp4 file",
            code="dataset-video-format",
        )
    return OSError(f"{path} can't be decoded: {str(reason)[-500:].strip()}")


def read_video(path: Path, first: int = 0, strict: bool = False) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames ``uint8[H,W,3]`` of a file in ``CONTAINERS`` from number ``first`` on, of any codec.

    Args:
        path: of the file.
        first: number of the first frame.
        strict: end at the first frame that can't be decoded without errors; by default ffmpeg conceals them.

    Raises:
        OSError: it can't be read.
        EmbodrlError: it is of another format than ``CONTAINERS``.
    """
    (imageio_ffmpeg,) = require("imageio_ffmpeg")
    # Every stored frame once: by default ffmpeg repeats or drops some to keep the rate.
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
    """Return when each frame that ``read_video`` yields is to be shown, in seconds, ``float64[F]``; decodes nothing.

    Raises:
        OSError: it can't be read.
        EmbodrlError: it is of another format than ``CONTAINERS``.
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
        # stream, time of decoding, time of presentation, duration, bytes, checksum, and flags where there are some
        parts = [part.strip() for part in line.split(",")]
        flags = next((int(part[2:], 16) for part in parts[6:] if part.startswith("F=")), 1)
        if line.startswith("0,") and not flags & NOT_SHOWN:
            if not parts[2].lstrip("-").isdigit():
                raise OSError(f"{path} can't be decoded: it has frames without a time")
            ticks.append(int(parts[2]))
    return np.sort(np.array(ticks, np.float64)) * int(unit[1]) / int(unit[2])


def frame_rate(path: Path) -> float:
    """Return the frames per second that a file states.

    Raises:
        OSError: it can't be read.
        EmbodrlError: it is of another format than ``CONTAINERS``.
    """
    (imageio_ffmpeg,) = require("imageio_ffmpeg")
    stream = imageio_ffmpeg.read_frames(_source(path), input_params=[*READING])
    try:
        return float(next(stream)["fps"])
    except (OSError, RuntimeError, StopIteration, KeyError) as error:
        raise _undecodable(path, error) from error
    finally:
        stream.close()
