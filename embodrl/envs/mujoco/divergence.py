"""Detection of diverged MuJoCo simulations: MuJoCo only warns, and restarts from the model's initial state."""

from __future__ import annotations

import logging
import sys
from typing import cast

from embodrl.envs.mujoco.types import MjData, WarningCount

logger = logging.getLogger("embodrl.envs")

_WARNINGS = ("mjWARN_BADQPOS", "mjWARN_BADQVEL", "mjWARN_BADQACC")


class Divergence:
    """Watches a simulation's warnings, since its state is finite again by the time anyone looks."""

    def __init__(self) -> None:
        self._data: object = None
        self._counters: dict[str, WarningCount] = {}

    def struck(self, data: object) -> bool:
        """Whether the simulation diverged since the last call; False for anything but ``MjData``."""
        if data is not self._data:
            self._data = data
            self._counters = _counters(data)
        found = [name for name, counter in self._counters.items() if counter.number]
        if not found:
            return False
        logger.warning("a simulation has diverged (%s), and MuJoCo has reset it to its initial state", ", ".join(found))
        for counter in self._counters.values():
            # MuJoCo's own reset clears the counts: a second divergence would give the same number.
            counter.number = 0
        return True


def _counters(data: object) -> dict[str, WarningCount]:
    mujoco = sys.modules.get("mujoco")  # whoever has an MjData has imported mujoco
    if mujoco is None or not isinstance(data, mujoco.MjData):
        return {}
    counts = cast(MjData, data).warning
    return {name: counts[getattr(mujoco.mjtWarning, name)] for name in _WARNINGS}
