"""Wrong configurations of LIBERO; see config_cases.py."""

from __future__ import annotations

from config_case import Wrong

BOWL = (
    "env=libero",
    "env.tasks=[pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate]",
)
LIBERO = [
    Wrong("no suite", "env.suite", "suite-exists", ("env.suite=libero_spatail", *BOWL), names="libero_spatial"),
    Wrong(
        "task of another suite", "env.tasks", "tasks-are-of-the-suite", ("env.tasks=[turn_on_the_stove]", "env=libero")
    ),
    Wrong(
        "camera that hangs in its scene",
        "env.cameras.0.fov_rad",
        "cameras-stay-in-the-scene",
        ("env.cameras=[{name:agentview,fov_rad:1.0}]", *BOWL),
    ),
    Wrong("no assets", "env.libero_assets", "assets-are-there", ("env.libero_assets={tmp}/absent", *BOWL)),
    Wrong("no interpreter to be found", "env.python", "interpreter-can-be-found", ("env.python=auto",)),
]
