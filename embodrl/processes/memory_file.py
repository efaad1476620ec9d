"""Memory that several processes read: a file without a name, which is gone when no process has it open."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import MessageError
from embodrl.processes.codec import placed

FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of memory that two processes map, so that neither can crash the other with a bus error."""


class MemoryFile:
    """A sealed memory file; messages carry its descriptor in place of its bytes.

    Args:
        descriptor: of the file; closed with this object.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, blobs: Sequence[NDArray[np.uint8]]) -> MemoryFile:
        """Return a new file with the blobs at the offsets of ``placed``.

        Raises:
            MessageError: memory is lacking.
        """
        return cls(write_memory("embodrl-inputs", [(start, blob.data) for start, blob in placed(blobs)]))

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def mapped(self) -> memoryview:
        """Return the content, of which only the pages that are read become memory of this process."""
        return memoryview(mmap.mmap(self.descriptor, self.num_bytes))


def write_memory(name: str, parts: Sequence[tuple[int, memoryview]], size: int = 1) -> int:
    """Return the descriptor of a new, sealed memory file of at least ``size`` bytes, with each part at its offset.

    Raises:
        MessageError: memory is lacking.
    """
    total = max([size, *(start + part.nbytes for start, part in parts)])
    memory = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Not through a mapping: faulting in new pages takes longer than the copy, and full memory causes a bus error.
        os.ftruncate(memory, total)
        for start, part in parts:
            _write(memory, part, start)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, FIXED_SIZE)
    except OSError as error:
        os.close(memory)
        raise MessageError(
            f"no {total / 2**20:.0f} MiB of memory for a message: {error}", "send less at once"
        ) from error
    return memory


def _write(memory: int, rest: memoryview, offset: int) -> None:
    """Write bytes; the system accepts at most 2 GiB per call."""
    while rest:
        written = os.pwrite(memory, rest, offset)
        rest = rest[written:]
        offset = offset + written
