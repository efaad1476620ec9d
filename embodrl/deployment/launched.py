"""The variables by which a launcher of SPMD programs, such as torchrun, tells a process its place among others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Launched(NamedTuple):
    """Place of this process among those that a launcher has started."""

    rank: int
    size: int


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Return the place that ``VARIABLES`` name; None if one of them is missing, or no number where one is needed."""
    if not all(environ.get(name) for name in VARIABLES):
        return None
    try:
        return Launched(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
    except ValueError:
        return None
