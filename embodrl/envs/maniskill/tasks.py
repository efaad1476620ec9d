"""The ManiSkill tasks: what they are called in words, and what differs from stock."""

from __future__ import annotations

from dataclasses import dataclass


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
