"""Runs in LIBERO's own environment: fixtures after LIBERO's seeding and resets, and ours; prints the largest distance.

Usage: libero_fixtures.py SUITE TASK SEED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from embodrl.envs.libero.sim import LiberoScene, LiberoSim, SceneOptions, import_libero


def main(suite: str, task: str, seed: int) -> None:
    package = import_libero(None)
    from libero.libero.envs.env_wrapper import ControlEnv

    bddl = package / "bddl_files" / suite / f"{task}.bddl"
    stock = ControlEnv(str(bddl), use_camera_obs=False, has_offscreen_renderer=False)
    stock.seed(seed)
    placements = []
    for _ in range(3):  # before ours: both draw from numpy's global generator
        stock.reset()
        placements.append(stock.env.sim.model._model.body_pos.copy())
    distances = []
    for redrawn in (True, False):
        options = SceneOptions(suite, 10, None, ("agentview",), 16, 16, (16, 16), "fast", 0, seed, redrawn)
        ours = LiberoSim(LiberoScene(task, options))
        for init_state in range(3):
            ours.reset(10 * init_state)
            there = placements[init_state if redrawn else 0]
            distances.append(float(np.abs(there - ours.scene.model.body_pos).max()))
    moved = float(np.abs(placements[0] - placements[1]).max())
    print(json.dumps({"distance": max(distances), "moved": moved}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
