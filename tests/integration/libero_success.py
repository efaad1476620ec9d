"""Runs in LIBERO's own environment: opens a drawer by hand and tells when the task counts as solved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from embodrl.envs.libero.sim import NOTHING, LiberoScene, LiberoSim, SceneOptions


def main() -> None:
    options = SceneOptions("libero_goal", 1, None, ("agentview",), 64, 64, (64, 64), "fast", 0)
    scene = LiberoScene("open_the_middle_drawer_of_the_cabinet", options)
    drawer = scene.env.sim.model.get_joint_qpos_addr("wooden_cabinet_1_middle_level")
    found = {}
    for opening in (0.0, -0.05, -0.15):
        sim = LiberoSim(scene)
        sim.reset(0)
        sim.data.qpos[drawer] = opening
        found[opening] = sim.step(NOTHING.astype(np.float32)).success
    print(json.dumps(list(found.values())))


if __name__ == "__main__":
    main()
