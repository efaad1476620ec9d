"""The toy environment with a fault built in; imported by the simulator process as an extension."""

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np

from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.specs import ENVS


class FaultyVectorEnv(ToyVectorEnv):
    """Fails in the given way at the ``at_step``-th chunk; once only if ``marker`` names a file."""

    def __init__(self, fault, at_step=1, marker=None, num_envs=2, image_size=8, **kwargs):
        super().__init__(num_envs=num_envs, image_size=image_size, **kwargs)
        self._fault, self._at_step, self._marker, self._chunks = fault, at_step, marker, 0
        if fault == "build":
            raise RuntimeError("no licence for the simulator")

    def _due(self):
        if self._chunks != self._at_step or (self._marker and Path(self._marker).exists()):
            return False
        if self._marker:
            Path(self._marker).touch()
        return True

    def reset(self, seeds, task_ids, indices):
        if self._fault == "reset":
            raise RuntimeError("the scene is broken")
        return super().reset(seeds, task_ids, indices)

    def chunk_step(self, actions, active):
        self._chunks += 1
        if not self._due():
            return super().chunk_step(actions, active)
        if self._fault == "raise":
            raise RuntimeError("contact solver diverged")
        if self._fault == "memory":
            bytearray(1 << 60)
        if self._fault == "exit":
            print("simulator: fatal: lost the device", flush=True)
            os._exit(7)
        if self._fault == "system_exit":
            raise SystemExit(4)
        if self._fault == "cancelled":
            raise asyncio.CancelledError("4")
        if self._fault == "segfault":
            ctypes.string_at(0)
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "hang":
            time.sleep(1000)
        if self._fault == "hang_in_native_code":
            ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter lock
        if self._fault == "fork_and_exit":  # the helper keeps the process's socket open
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(3)
        step = super().chunk_step(actions, active)
        if self._fault == "nan_reward":
            step.reward[1, 0] = np.nan
        if self._fault == "nan_state":
            step.observation.state[1, 0] = np.inf
        if self._fault == "long_instruction":
            step.observation.instruction[0] = "pick " * 200
        if self._fault == "wrong_shape":
            step.observation.images = step.observation.images[:, :, :-1]
        return step

    def get_state(self):
        return {"chunks": self._chunks} if self._fault == "state" else super().get_state()

    def call(self, method, arguments):
        if method == "spawn_helper":
            return subprocess.Popen(["sleep", "1000"], start_new_session=arguments["own_session"]).pid
        return super().call(method, arguments)


ENVS.add("faulty", FaultyVectorEnv)
