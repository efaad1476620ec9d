"""The ManiSkill tasks: what they are called in words, and what differs from stock."""

from __future__ import annotations

from dataclasses import dataclass

from embodrl.envs.axes import COMMON
from embodrl.specs import Axis


@dataclass(frozen=True)
class Task:
    """A task of ManiSkill.

    Attributes:
        name: gymnasium id.
        instruction: for the policy, in words.
        robot: the only one, or the one that its reward is for.
        show_hidden: draw what ManiSkill hides from cameras (the goal of PickCube can't be seen otherwise).
        reward_keeps_state: the reward depends on earlier evaluations, and is evaluated scene by scene.
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
"""Tasks with a goal that can move: what it is called in the scene."""
AXES = {
    "light": Axis("vision", "all lights dimmed to 40 to 70 % or raised to 140 to 180 %, and tinted by up to 25 %"),
    "texture": Axis("vision", "table and ground with checks, stripes or speckles of two random colours"),
    "camera": Axis("vision", "each camera moved by up to 5 cm and turned by up to 4 degrees about each axis"),
    **COMMON,
    "colours": Axis("semantics", "red, green and blue exchanged on all objects and in the instruction"),
    "distractors": Axis("semantics", "four more things of random shape and colour on the table; they can't be touched"),
    "objects": Axis("execution", "objects and goal moved together by 4 to 8 cm from where episodes begin"),
    "robot": Axis("execution", "each joint of the arm begins off its place, by a standard deviation of 0.1 rad"),
    "goal": Axis("execution", "the goal moves to and fro by 4 cm within 80 steps", tasks=tuple(GOALS)),
}
