"""Memory for the pictures of demonstrations: in RAM, or in a file that the kernel pages.

Above a limit, pictures are decoded once, in the order of their videos, to an unnamed file that is mapped into memory.
Rows of it are read by the same indexing as in RAM, and the kernel keeps as many as there is room for. Batches are
shuffled over all frames; decoding each from its video on demand would start a decoder, and decode from the preceding
key frame, for nearly every frame. At 224 x 224 pixels with a key frame every 10 frames this took 26 ms per frame on a
CPU, decoding in order 1 ms, and reading from the file, in the kernel's cache, 0.02 ms. All pictures are decoded at the
start anyway: damaged videos are found before training, and the checksum that a resumed run compares covers them.

The file takes as much disk as the pictures would take memory, and disappears with the process, however that ends.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from embodrl.errors import EmbodrlError

GB = 10**9
MEMORY_FRACTION = 0.7
"""Fraction of the free memory that data may fill."""
DISK_FRACTION = 0.9
"""Fraction of the free disk space that pictures may fill; checkpoints need the rest."""
Shape = tuple[int, ...]
Place = Callable[[object, Shape], NDArray[np.uint8]]
"""Returns zeros of a shape ``[N,V,H,W,3]`` for the pictures of a source, which errors name."""


def in_memory(source: object, shape: Shape) -> NDArray[np.uint8]:
    """Return an array in RAM; EmbodrlError if it does not fit."""
    wanted = math.prod(shape)
    free = psutil.virtual_memory().available
    if wanted > MEMORY_FRACTION * free:
        raise EmbodrlError(
            f"{_images_of(source, shape)} take {wanted / GB:.1f} GB of memory, and {free / GB:.1f} GB are free",
            "set sft.max_episodes, fewer sft.cameras, or smaller env.cameras; `embodrl sft` streams from disk what is"
            " above sft.memory_gb",
            code="dataset-too-large",
        )
    return np.zeros(shape, np.uint8)


class PictureStore:
    """Places pictures in memory as long as all of them take at most ``limit_gb``, and others in files.

    Args:
        limit_gb: limit in GB; None: 70 % of the memory that is free now.
        directory: existing directory on the disk for the files.
        tell: called with a line for each placement.

    Attributes:
        limit: in bytes.
        held: bytes placed in memory so far; those released since are included.
        on_disk: bytes placed in files so far.
    """

    def __init__(self, limit_gb: float | None, directory: Path, tell: Callable[[str], None]) -> None:
        free = psutil.virtual_memory().available
        self.limit = int(MEMORY_FRACTION * free if limit_gb is None else limit_gb * GB)
        self.directory = directory
        self.held = 0
        self.on_disk = 0
        self._tell = tell

    def place(self, source: object, shape: Shape) -> NDArray[np.uint8]:
        """Return ``uint8`` zeros; EmbodrlError if neither memory nor disk have room for them."""
        wanted = math.prod(shape)
        what = f"{_images_of(source, shape)} take {wanted / GB:.3g} GB"
        limit = f"{self.limit / GB:.3g} GB are allowed (sft.memory_gb), {self.held / GB:.3g} GB are used"
        if self.held + wanted <= self.limit:
            if wanted:
                self._tell(f"{what}, held in memory: {limit}")
            images = in_memory(source, shape)
            self.held += wanted
            return images
        self._tell(f"{what}, held on disk in {self.directory}: {limit}")
        images = self._on_disk(what, wanted)
        self.on_disk += wanted
        return images.reshape(shape)

    def _on_disk(self, what: str, wanted: int) -> NDArray[np.uint8]:
        hint = "free disk space, choose sft.output_dir on a larger disk, or set sft.max_episodes or smaller env.cameras"
        free = shutil.disk_usage(self.directory).free
        if wanted > DISK_FRACTION * free:
            raise EmbodrlError(
                f"{what}, and the disk of {self.directory} has {free / GB:.3g} GB free", hint, code="dataset-too-large"
            )
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                os.posix_fallocate(file.fileno(), 0, wanted)  # a full disk is found here, not as SIGBUS when written
                return np.frombuffer(mmap.mmap(file.fileno(), wanted), np.uint8)
        except OSError as error:
            message = f"{what}, which {self.directory} can't hold: {error}"
            raise EmbodrlError(message, hint, code="dataset-too-large") from error


def _images_of(source: object, shape: Shape) -> str:
    return f"the images of {shape[0]} frames in {source} at {shape[2]} x {shape[3]}"
