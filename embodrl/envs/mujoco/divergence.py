"""How to tell that a simulation of MuJoCo has diverged, which it hides: it warns, and begins again from its model."""

from __future__ import annotations

import logging
import sys
from typing import cast

from embodrl.envs.mujoco.types import MjData, WarningCount

logger = logging.getLogger("embodrl.envs")

_WARNINGS = ("mjWARN_BADQPOS", "mjWARN_BADQVEL", "mjWARN_BADQACC")


class Divergence:
    """Watches the warnings of a simulation, which is finite again by the time that anybody looks at it."""

    def __init__(self) -> None:
        self._data: object = None
        self._counters: dict[str, WarningCount] = {}

    def struck(self, data: object) -> bool:
        """Tell whether positions, velocities or accelerations were beyond all measure since this was last asked.

        Args:
            data: an ``MjData``; of anything else nothing is known, and the answer is False.
        """
        if data is not self._data:
            self._data = data
            self._counters = _counters(data)
        found = [name for name, counter in self._counters.items() if counter.number]
        if not found:
            return False
        logger.warning("a simulation has diverged (%s), and MuJoCo began again from its model", ", ".join(found))
        for counter in self._counters.values():
            # MuJoCo's own reset takes the counts of before with it: a second divergence would have the same number.
            counter.number = 0
        return True


def _counters(data: object) -> dict[str, WarningCount]:
    mujoco = sys.modules.get("mujoco")  # whoever has an MjData has imported it
    if mujoco is None or not isinstance(data, mujoco.MjData):
        return {}
    counts = cast(MjData, data).warning
    return {name: counts[getattr(mujoco.mjtWarning, name)] for name in _WARNINGS}
