"""Wrong configurations of LIBERO; see config_cases.py."""

from __future__ import annotations

from config_case import Wrong

BOWL = (
    "env=libero",
    "env.tasks=[pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate]",
)
LIBERO = [
    Wrong("no suite", "env.suite", "nearest:  libero_spatial", ("env.suite=libero_spatail", *BOWL)),
    Wrong("task of another suite", "env.tasks", "of libero_goal", ("env.tasks=[turn_on_the_stove]", "env=libero")),
    Wrong("progress of LIBERO", "env.reward_mode", "no dense reward", ("env.reward_mode=dense_delta", *BOWL)),
    Wrong(
        "camera that hangs in its scene",
        "env.cameras.0.fov_rad",
        "scenes put them",
        ("env.cameras=[{name:agentview,fov_rad:1.0}]", *BOWL),
    ),
    Wrong("no assets", "env.libero_assets", "no directory", ("env.libero_assets={tmp}/absent", *BOWL)),
    Wrong("no interpreter to be found", "env.python", "no environment of its own for maniskill", ("env.python=auto",)),
]
