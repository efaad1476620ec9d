"""Wrong configurations of LIBERO; see config_cases.py."""

from __future__ import annotations

from config_case import Wrong

LIBERO = [
    Wrong("no suite", "env.suite", "nearest:  libero_spatial", ("env.suite=libero_spatail", "env=libero")),
    Wrong("task of another suite", "env.tasks", "of libero_goal", ("env.tasks=[turn_on_the_stove]", "env=libero")),
    Wrong("progress of LIBERO", "env.reward_mode", "no dense reward", ("env.reward_mode=dense_delta", "env=libero")),
    Wrong(
        "camera that hangs in its scene",
        "env.cameras.0.fov_rad",
        "scenes put them",
        ("env.cameras=[{name:agentview,fov_rad:1.0}]", "env=libero"),
    ),
    Wrong("no assets", "env.libero_assets", "no directory", ("env.libero_assets={tmp}/absent", "env=libero")),
    Wrong("no interpreter to be found", "env.python", "of its own for toy", ("env.python=auto", "env=toy")),
]
