"""Runs in LIBERO's own environment: the same episode by LIBERO's code and by ours; prints how far they are apart.

Usage: libero_stock.py SUITE TASK SEED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from embodrl.envs.libero.sim import NOTHING, LiberoScene, LiberoSim, SceneOptions, import_libero
from embodrl.envs.libero.suites import init_state_of

CAMERAS = ("agentview", "wrist")
SIZE = 64


def main(suite: str, task: str, seed: int) -> None:
    options = SceneOptions(suite, 10, None, CAMERAS, SIZE, SIZE, (SIZE, SIZE), "full", 10)
    scene = LiberoScene(task, options)
    ours = LiberoSim(scene)
    ours.reset(seed)
    package = import_libero(None)
    from libero.libero.envs.env_wrapper import ControlEnv

    bddl = package / "bddl_files" / suite / f"{task}.bddl"
    # Its own pictures are drawn at the end only: they take most of the time.
    stock = ControlEnv(str(bddl), use_camera_obs=False, has_offscreen_renderer=True, hard_reset=False)
    np.random.seed(seed)
    stock.reset()
    stock.set_init_state(scene.init_states[init_state_of(seed, 10)])
    assert np.allclose(stock.env.sim.model._model.body_pos, scene.model.body_pos)
    for _ in range(10):
        stock.step(NOTHING.tolist())
    rng = np.random.default_rng(0)
    positions, states, decisions = [], [], 0
    for number in range(20):
        action = rng.uniform(-1, 1, 7).astype(np.float32)
        action[3:6] *= number % 3 != 0  # without rotation the last goal stands
        obs, _, done, _ = stock.step(action.astype(np.float64))
        decisions += bool(done) != ours.step(action).success
        positions.append(np.abs(stock.env.sim.data.qpos - ours.data.qpos).max())
        hand = np.concatenate([obs["robot0_eef_pos"], obs["robot0_gripper_qpos"]])
        states.append(float(np.abs(hand - ours.proprioception()[[0, 1, 2, 6, 7]]).max()))
    views = ours.images().astype(int)
    sim = stock.env.sim
    sim.forward()
    sim._render_context_offscreen.gl_ctx.make_current()
    names = ("agentview", "robot0_eye_in_hand")
    theirs = [sim.render(SIZE, SIZE, camera_name=name)[::-1, ::-1].astype(int) for name in names]
    picture = float(np.abs(np.stack(theirs) - views).mean())
    print(json.dumps({"qpos": max(positions), "picture": picture, "state": max(states), "decisions": decisions}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
