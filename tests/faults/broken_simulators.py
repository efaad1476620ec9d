"""Any environment of the registry, whose simulator fails on request: ``call("break_next", {"fault": NAME})``."""

import ctypes
import time
from pathlib import Path

import numpy as np
from garbage import GARBAGE, answer_twice

from embodrl.names import import_object
from embodrl.specs import ENVS


def raise_it(_):
    raise RuntimeError("contact solver diverged")


def crash(_):
    print("simulator: lost the device", flush=True)
    ctypes.string_at(0)


def spoil_reward(value):
    def spoil(step):
        step.reward[-1, 0] = value

    return spoil


def spoil_state(value):
    def spoil(result):
        getattr(result, "observation", result).state[-1, 0] = value

    return spoil


def diverge(env):
    """Let MuJoCo find a velocity beyond all measure: it warns, and begins again from its model."""
    simulator = getattr(env._sims[-1], "simulator", env._sims[-1])
    inside = getattr(simulator, "env", getattr(simulator, "_env", simulator))
    data = getattr(inside, "unwrapped", inside).data
    getattr(data, "_data", data).qvel[:] = 1e11


def draw_floats(step):
    step.observation.images = step.observation.images.astype(np.float32) * np.nan


# name -> the method that fails, before it does anything or in what it returns.
BEFORE = {
    "raise in step": ("chunk_step", raise_it),
    "hang in step": ("chunk_step", lambda _: time.sleep(1000)),
    "raise in reset": ("reset", raise_it),
    "crash in reset": ("reset", crash),
    "hang in reset": ("reset", lambda _: time.sleep(1000)),
    "crash": ("chunk_step", crash),
    "diverges": ("chunk_step", diverge),
    "answers twice": ("chunk_step", lambda _: answer_twice()),
    **{f"sends {name}": ("chunk_step", lambda _, send=send: send()) for name, (send, _) in GARBAGE.items()},
}
AFTER = {
    "reward is not a number": ("chunk_step", spoil_reward(np.nan)),
    "reward is infinite": ("chunk_step", spoil_reward(np.inf)),
    "reward out of bounds": ("chunk_step", spoil_reward(-1e30)),
    "state is not a number": ("chunk_step", spoil_state(np.nan)),
    "state out of bounds": ("chunk_step", spoil_state(1e30)),
    "state is not a number in reset": ("reset", spoil_state(np.nan)),
    "picture is not a picture": ("chunk_step", draw_floats),
}


def break_next(env, fault):
    """Let the next step or reset fail, and no other."""
    name, action = (BEFORE | AFTER)[fault]
    sound = getattr(env, name)

    def broken(*arguments):
        setattr(env, name, sound)
        if fault in BEFORE:
            action(env)
        result = sound(*arguments)
        if fault in AFTER:
            action(result)
        return result

    setattr(env, name, broken)


def make(env_type, slow_start, **kwargs):
    """Return the environment, a registered name or module:Class, once the file ``slow_start`` does not exist."""
    while Path(slow_start).exists():
        time.sleep(0.01)
    env = (import_object(env_type) if ":" in env_type else ENVS.get(env_type))(**kwargs)
    env.REQUESTS = (*env.REQUESTS, "break_next")
    env.break_next = lambda fault: break_next(env, fault)
    return env


ENVS.add("broken", make)
"""The name under which ``make`` is registered."""
