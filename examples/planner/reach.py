"""A planner above a low-level controller: a language model calls a tool, the tool drives the simulator.

PYTHONPATH=examples/planner embodrl train --config examples/planner/config.yaml

From random weights (seed 0) 40 iterations of GRPO raise the success of 64 evaluation episodes from 53 to 100 % with
sampled messages, and from 59 to 100 % with the most probable ones, which solve every episode with the first message
(before: 1.4 messages). The planner learns to copy the colour of the instruction into its call: two of the four colours
are on the board, and the text of the instruction alone says which of them is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl import (
    Environment,
    EpisodeEngine,
    EpisodeTask,
    Observation,
    RolloutWorkflow,
    Tool,
    ToolResult,
    Trajectory,
)

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
DOT = (255, 255, 255)
STEP = 0.15  # of the dot, per action of size 1
MOST_ACTIONS = 18  # the board's diagonal
TURNS = 2  # messages of the planner in an episode
COST = 0.2  # of each message after the first

COLOUR = {"type": "string", "enum": list(COLOURS)}
REACH = Tool("reach", "move to a square", {"type": "object", "properties": {"colour": COLOUR}, "required": ["colour"]})


class WithReach(Environment):
    """An environment whose tool ``reach`` moves the dot to the square of a colour, which it looks for in the picture.

    Args:
        inner: the simulator.
    """

    def __init__(self, inner: Environment) -> None:
        self.inner = inner
        self.seen: Observation | None = None

    async def initialize(self, task: str, seed: int) -> Observation:
        """See Environment."""
        self.seen = await self.inner.initialize(task, seed)
        return self.seen

    def list_tools(self) -> list[Tool]:
        """See Environment."""
        return [REACH]

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Drive to the square until the dot is on it, the episode ends, or ``MOST_ACTIONS`` are done."""
        assert tool == REACH.name and self.seen is not None
        colour = str(arguments["colour"])
        goal = centre(self.seen, COLOURS[colour])
        result = ToolResult.answer(self.seen, f"there is no {colour} square")
        if goal is None:
            return result
        for _ in range(MOST_ACTIONS):
            dot = centre(result.observation, DOT)
            assert dot is not None  # it is drawn last, and never leaves the board
            if np.abs(goal - dot).max() < STEP / 2:
                break
            action = np.zeros((1, 7), np.float32)
            action[0, :2] = np.clip((goal - dot) / STEP, -1, 1)
            result = await self.inner.execute("act", {"actions": action})
            result.value = f"reached {colour}"
            if result.done:
                break
        self.seen = result.observation
        return result

    async def get_state(self) -> bytes:
        """See Environment."""
        return await self.inner.get_state()

    async def load_state(self, state: bytes) -> Observation:
        """See Environment."""
        self.seen = await self.inner.load_state(state)
        return self.seen

    async def close(self) -> None:
        """See Environment."""
        await self.inner.close()


def centre(observation: Observation, colour: tuple[int, int, int]) -> NDArray[np.float32] | None:
    """Return the middle ``float32[2]`` of a colour's pixels, -1 to 1 to the right and down; None without any."""
    image = observation.images[0, 0]
    rows, columns = np.nonzero((image == np.array(colour, np.uint8)).all(axis=-1))
    if not len(rows):
        return None
    middle = np.array([columns.min() + columns.max(), rows.min() + rows.max()], np.float32) / 2
    return middle / (len(image) - 1) * 2 - 1


class ReachWorkflow(RolloutWorkflow):
    """The planner reads the instruction, calls ``reach``, reads what came of it, and may call again."""

    async def run_episode(self, engine: EpisodeEngine, env: Environment, task: EpisodeTask) -> Trajectory | None:
        """Play one episode of at most ``TURNS`` messages."""
        env, trajectory = WithReach(env), Trajectory(task)
        observation = await env.initialize(task.name, task.seed)
        messages: list[dict[str, object]] = [{"role": "user", "content": observation.instruction[0]}]
        for turn in range(TURNS):
            completion = await engine.generate(messages, env.list_tools(), tool_choice="required")
            call = completion.tool_calls[0]
            result = await env.execute(call.name, call.arguments)
            if result.lost:
                return None
            reward = float(result.success) - COST * (turn > 0)
            ended = result.done or turn + 1 == TURNS
            trajectory.add_message(completion, reward, terminated=ended, success=result.success)
            if ended:
                break
            messages += [
                {"role": "assistant", "content": completion.text},
                {"role": "tool", "content": str(result.value)},
            ]
        return trajectory
