"""LIBERO's own SubprocVectorEnv with random actions, for ``embodrl bench libero``; runs in LIBERO's interpreter.

Usage: stock.py ASSETS SUITE TASK NUM_ENVS SIZE STEPS. Prints "begin" once all is warm, and "end" after the steps, each
waiting for a line on standard input before it goes on.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def main(assets: str, suite: str, task: str, num_envs: int, size: int, steps: int) -> None:
    """Make the environments, warm them up, and step them."""
    sys.path[:1] = [str(Path(__file__).resolve().parents[3])]
    from embodrl.envs.libero.sim import NOTHING, import_libero

    package = import_libero(assets)
    import numpy as np

    libero: Any = importlib.import_module("libero.libero.envs")

    bddl = str(package / "bddl_files" / suite / f"{task}.bddl")
    makers = [
        lambda: libero.OffScreenRenderEnv(bddl_file_name=bddl, camera_heights=size, camera_widths=size)
        for _ in range(num_envs)
    ]
    envs = libero.SubprocVectorEnv(makers)
    envs.reset()
    for _ in range(2):
        envs.step(np.tile(NOTHING, (num_envs, 1)))
    rng = np.random.default_rng(0)
    _say("begin")
    for _ in range(steps):
        envs.step(rng.uniform(-1, 1, (num_envs, 7)))
    _say("end")
    envs.close()


def _say(word: str) -> None:
    sys.__stdout__.write(word + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *(int(text) for text in sys.argv[4:7]))
