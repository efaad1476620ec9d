"""The standard suites: tasks, instructions and published step limits. Needs no simulator."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from embodrl.envs.axes import COMMON
from embodrl.specs import Axis

NUM_INIT_STATES = 50
AXES = {
    "light": Axis("vision", "all lights dimmed to 40 to 70 % or raised to 140 to 180 %, and tinted by up to 25 %"),
    "texture": Axis("vision", "every material tinted: each colour channel at 40 to 100 %"),
    "camera": Axis("vision", "each camera moved by up to 5 cm and turned by up to 4 degrees about each axis"),
    **COMMON,
    "robot": Axis("execution", "each joint of the arm begins displaced, by a standard deviation of 0.1 rad"),
}


@dataclass(frozen=True)
class TaskFacts:
    """Language instruction of a task, and SHA-256 of its official file of initial states."""

    instruction: str
    sha256: str


@dataclass(frozen=True)
class Suite:
    """Ten tasks in LIBERO's order, with the step limit of published evaluations (OpenVLA)."""

    max_episode_steps: int
    tasks: dict[str, TaskFacts]


def read_suites() -> dict[str, Suite]:
    """Read the suites of ``suites.json``."""
    content = json.loads(Path(__file__).with_name("suites.json").read_text())
    return {
        name: Suite(suite["max_episode_steps"], {task: TaskFacts(**facts) for task, facts in suite["tasks"].items()})
        for name, suite in content.items()
    }


SUITES = read_suites()


def init_state_of(seed: int, num_tasks: int) -> int:
    """Return the index of the official initial state for a reset seed.

    The seeds ``s + i`` of an evaluation, whose episode ``i`` runs task ``i mod num_tasks``, cover all initial states of
    every task before any repeats, for any ``s``: a task's seeds are ``num_tasks`` apart.
    """
    return seed // num_tasks % NUM_INIT_STATES
