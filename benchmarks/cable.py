"""A cable of Ethernet with a length: ``python benchmarks/cable.py DEVICE DEVICE MILLISECONDS``.

Makes both network devices (taps) and carries the frames of each to the other one, that much later, until it is killed;
says ``ready`` when both are there. For kernels without netem. Needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000  # linux/if_tun.h
MAX_FRAME = 65535
MAX_WAITING = 10_000
"""Frames on the way; what is sent beyond is lost, as in a full queue of a switch."""


def make_device(name: str) -> int:
    """Make a tap; return its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def carry(ends: tuple[int, int], delay_s: float) -> None:
    """Carry frames between two descriptors, forever."""
    other = dict(zip(ends, reversed(ends), strict=True))
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], timeout)[0]:
            with contextlib.suppress(BlockingIOError):  # all is read
                while True:
                    frame = os.read(end, MAX_FRAME)
                    if len(waiting) < MAX_WAITING:
                        waiting.append((time.monotonic() + delay_s, other[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # a device that is down takes nothing
                os.write(end, frame)


def main() -> None:
    """Lay a cable between two devices."""
    first, second, milliseconds = sys.argv[1:]
    ends = make_device(first), make_device(second)
    print("ready", flush=True)
    carry(ends, float(milliseconds) / 1000)


if __name__ == "__main__":
    main()
