"""Any environment of the registry, with a simulator that fails once: it raises, or a reward or state is no number."""

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
            env.draw = draw_nonsense if env.rules.reward_mode == "sparse" else draw
        return result

    draw = env.draw

    def draw_nonsense(rows, images, state):
        draw(rows, images, state)
        state[1] = np.nan
        env.draw = draw

    env.play = broken
    return env


ENVS.register("broken", make)
"""The name under which ``make`` is registered."""
