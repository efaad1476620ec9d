"""The baseline of the end-to-end benchmark: ManiSkill with its own meshes, rendered at every environment step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.maniskill.env import ManiSkillVectorEnv
from embodrl.specs import ENVS


class EveryStepVectorEnv(ManiSkillVectorEnv):
    """Renders after each action of a chunk, not only what the policy sees next."""

    def _substep(
        self, actions: NDArray[np.float32], running: NDArray[np.bool_], last: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_]]:
        result = super()._substep(actions, running, last)
        self._draw(np.flatnonzero(running))
        return result


def make(**kwargs: object) -> EveryStepVectorEnv:
    """Return the environment with undecimated meshes."""
    return EveryStepVectorEnv(**{**kwargs, "mesh_decimation": 0.0})


ENVS.add("bench_every_step", make)
