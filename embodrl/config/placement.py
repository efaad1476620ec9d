"""The placement grammar: ``all``, or ``devices[:processes]`` pieces such as ``0-3`` or ``0-1:0-3,3:4``."""

from __future__ import annotations

import re
from dataclasses import dataclass

COMPONENTS = ("actor", "rollout", "env")
RANKS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


class PlacementError(ValueError):
    """A placement can't be read.

    Attributes:
        allowed: what could stand there.
    """

    allowed = "all, or ranks such as 0, 0-3, 0-1:0-3 or 0,2"


@dataclass(frozen=True)
class Place:
    """Devices, and how many processes share them."""

    devices: tuple[int, ...]
    num_processes: int


def parse_range(text: str) -> list[int]:
    """Return the ranks of ``3`` or ``0-3``.

    Raises:
        PlacementError: it is neither.
    """
    match = RANKS.fullmatch(text.strip())
    if match is None:
        raise PlacementError(f"'{text.strip()}' is not a rank or a range of ranks")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise PlacementError(f"the range '{text.strip()}' ends before it starts")
    if last - first > 100_000:
        raise PlacementError(f"the range '{text.strip()}' is far too long")
    return list(range(first, last + 1))


def parse_ranks(text: str) -> Place | None:
    """Return the devices and processes of a placement, None for ``all``.

    Raises:
        PlacementError: the text does not follow the grammar, or devices and processes do not fit each other.
    """
    if text.strip() == "all":
        return None
    devices: list[int] = []
    processes = 0
    for piece in text.split(","):
        device_text, colon, process_text = piece.partition(":")
        ranks = parse_range(device_text)
        count = len(parse_range(process_text)) if colon else len(ranks)
        if count % len(ranks) and len(ranks) % count:
            raise PlacementError(
                f"in '{piece.strip()}', {count} processes do not divide {len(ranks)} devices, nor they them"
            )
        if set(ranks) & set(devices):
            raise PlacementError(f"a device of '{piece.strip()}' is named twice")
        devices += ranks
        processes += count
    return Place(tuple(devices), processes)
