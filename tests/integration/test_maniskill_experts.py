"""Experts of the ManiSkill tasks with a peg, a tool or a bin."""

from __future__ import annotations

import numpy as np
import pytest

from embodrl.errors import MissingDependencyError

LIMITS = {  # steps, as in the presets
    "PegInsertionSide-v1": 100,
    "PokeCube-v1": 50,
    "PullCubeTool-v1": 100,
    "RollBall-v1": 80,
    "PlaceSphere-v1": 50,
}
NUM_ENVS = 4


@pytest.mark.parametrize("task", LIMITS)
@pytest.mark.long
def test_they_mostly_succeed(task: str) -> None:
    from embodrl.envs.maniskill.env import ManiSkillVectorEnv

    camera = {"name": "base_camera", "height": 16, "width": 16, "fov_rad": 1.0, "eye": None, "target": None}
    options = {"include_images": False, "auto_reset": False, "max_episode_steps": LIMITS[task]}
    try:
        env = ManiSkillVectorEnv(NUM_ENVS, [task], [camera], **options)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    rows = np.arange(NUM_ENVS)
    env.reset(300 + rows, np.zeros(NUM_ENVS, np.int32), rows)
    env.expert_reset(rows.tolist())
    active, success = np.ones(NUM_ENVS, np.bool_), np.zeros(NUM_ENVS, np.bool_)
    while active.any():
        step = env.chunk_step(env.expert_actions()[:, None], active)
        success |= step.success & active
        active &= ~step.done
    env.close()
    assert success.sum() >= NUM_ENVS - 1
