"""Any environment of the registry, with a simulator that raises or returns a reward that is no number, once."""

from pathlib import Path

import numpy as np

from embodrl.registry import ENVS


def make(env_type, fault, marker, **kwargs):
    env = ENVS.get(env_type)(**kwargs)
    play = env.play

    def broken(actions, running):
        result = play(actions, running)
        if running.all() and not Path(marker).exists():
            Path(marker).touch()
            if fault == "raise":
                raise RuntimeError("contact solver diverged")
            result.reward[1] = np.nan
        return result

    env.play = broken
    return env


ENVS.register("broken", make)
"""The name under which ``make`` is registered."""
