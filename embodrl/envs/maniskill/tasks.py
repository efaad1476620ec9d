"""The ManiSkill tasks: language instructions and differences from stock."""

from __future__ import annotations

from dataclasses import dataclass

from embodrl.envs.axes import COMMON
from embodrl.specs import Axis


@dataclass(frozen=True)
class Task:
    """A task of ManiSkill.

    Attributes:
        name: gymnasium id.
        instruction: language instruction for the policy.
        robot: the only supported robot, or the robot its reward is written for.
        show_hidden: render objects that ManiSkill hides from cameras (PickCube's goal is otherwise invisible).
        reward_keeps_state: the reward depends on earlier evaluations, so that scenes are evaluated one by one.
    """

    name: str
    instruction: str
    show_hidden: bool = False
    reward_keeps_state: bool = False
    robot: str = "panda"


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("PushCube-v1", "push the blue cube to the target"),
        Task("PullCube-v1", "pull the blue cube to the target"),
        Task("PickCube-v1", "pick up the red cube and hold it at the green goal", show_hidden=True),
        Task("StackCube-v1", "stack the red cube on the green cube"),
        Task("LiftPegUpright-v1", "lift the peg and stand it upright"),
        Task("PegInsertionSide-v1", "insert the peg into the hole of the box from the side", robot="panda_wristcam"),
        Task("PokeCube-v1", "poke the cube with the peg"),
        Task("PullCubeTool-v1", "pull the cube closer with the tool"),
        Task("RollBall-v1", "roll the ball into the goal", reward_keeps_state=True),
        Task("PlaceSphere-v1", "pick up the ball and put it into the bin"),
    )
}
INSTRUCTIONS: dict[str, str] = {task.name: task.instruction for task in TASKS.values()}
GOALS = {
    **{"PushCube-v1": "goal_region", "PullCube-v1": "goal_region", "PickCube-v1": "goal_site"},
    "RollBall-v1": "goal_region",
}
"""Tasks with a movable goal: its name in the scene."""
AXES = {
    "light": Axis("vision", "all lights dimmed to 40 to 70 % or raised to 140 to 180 %, and tinted by up to 25 %"),
    "texture": Axis("vision", "table and ground with checks, stripes or speckles of two random colours"),
    "camera": Axis("vision", "each camera moved by up to 5 cm and turned by up to 4 degrees about each axis"),
    **COMMON,
    "colours": Axis("semantics", "red, green and blue swapped on all objects and in the instruction"),
    "distractors": Axis("semantics", "four more objects of random shape and colour on the table, without collisions"),
    "objects": Axis("execution", "objects and goal moved together by 4 to 8 cm from their initial place"),
    "robot": Axis("execution", "each joint of the arm begins displaced, by a standard deviation of 0.1 rad"),
    "goal": Axis("execution", "the goal moves back and forth by 4 cm within 80 steps", tasks=tuple(GOALS)),
}
