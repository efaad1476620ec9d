"""Bytes that this process exchanges with the processes that it started, by their kind: actor, rollout, env.

Shared memory counts as if it were sent: the arrays that the reader of a message reads. What Ray, a collective or the
disk carries is not counted.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

_KIND = re.compile("[a-z]*")


class Traffic(NamedTuple):
    """Bytes over a link since the start of this process."""

    sent: int
    received: int


@dataclass(frozen=True)
class _Links:
    """Bytes by link; several threads send and receive."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sent: dict[str, int] = field(default_factory=dict[str, int])
    received: dict[str, int] = field(default_factory=dict[str, int])
    shared: list[int] = field(default_factory=list[int])


_LINKS = _Links()


def kind_of(name: str) -> str:
    """Return the kind of a process from its name, e.g. of ``env/3`` or ``rollout[0]``: the letters at the start."""
    found = _KIND.match(name)
    return found[0] if found else ""


def count_sent(link: str, num_bytes: int) -> None:
    """Count bytes to a process of the kind ``link``."""
    with _LINKS.lock:
        _LINKS.sent[link] = _LINKS.sent.get(link, 0) + num_bytes


def count_received(link: str, num_bytes: int) -> None:
    """Count bytes from a process of the kind ``link``."""
    with _LINKS.lock:
        _LINKS.received[link] = _LINKS.received.get(link, 0) + num_bytes


def count_shared(num_bytes: int) -> None:
    """Count bytes in a memory file that this process passes on without reading it."""
    with _LINKS.lock:
        _LINKS.shared.append(num_bytes)


def take_shared() -> int | None:
    """Return the bytes of ``count_shared`` since the last call; None if there never were any."""
    with _LINKS.lock:
        if not _LINKS.shared:
            return None
        found = sum(_LINKS.shared)
        _LINKS.shared[:] = [0]
    return found


def totals() -> dict[str, Traffic]:
    """Return the bytes of every link so far."""
    with _LINKS.lock:
        names = sorted(_LINKS.sent.keys() | _LINKS.received.keys())
        return {name: Traffic(_LINKS.sent.get(name, 0), _LINKS.received.get(name, 0)) for name in names}
