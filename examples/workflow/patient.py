"""A workflow from outside the package: several turns, a tool, a reward from elsewhere, an early end.

PYTHONPATH=examples/workflow embodrl train --config examples/workflow/config.yaml
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

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

PATIENCE = 3  # turns in a row in which hardly anything moves
STILL = 0.05  # mean change of a pixel, of 255


class WithMotionSensor(Environment):
    """An environment with a tool of its own: how much the picture has changed since the tool was last used.

    Args:
        inner: the simulator.
    """

    def __init__(self, inner: Environment) -> None:
        self.inner = inner
        self._seen: Observation | None = None
        self._before: Observation | None = None

    async def initialize(self, task: str, seed: int) -> Observation:
        """See Environment."""
        self._seen = self._before = await self.inner.initialize(task, seed)
        return self._seen

    def list_tools(self) -> list[Tool]:
        """See Environment."""
        nothing = {"type": "object", "properties": {}}
        return [
            *self.inner.list_tools(),
            Tool("motion", "mean change of a pixel since the last call, 0 to 255", nothing),
        ]

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """See Environment."""
        if tool != "motion":
            result = await self.inner.execute(tool, arguments)
            self._seen = result.observation
            return result
        assert self._seen is not None and self._before is not None
        now, before = (seen.images.astype(np.float32) for seen in (self._seen, self._before))
        self._before = self._seen
        return ToolResult.answer(self._seen, float(np.abs(now - before).mean()))

    async def get_state(self) -> bytes:
        """See Environment; what the tool remembers is left out."""
        return await self.inner.get_state()

    async def load_state(self, state: bytes) -> Observation:
        """See Environment."""
        self._seen = self._before = await self.inner.load_state(state)
        return self._seen

    async def close(self) -> None:
        """See Environment."""
        await self.inner.close()


async def judge(observation: Observation) -> float:
    """Stand in for a model behind a network that scores the last picture: between 0 and 1."""
    await asyncio.sleep(0)
    return float(observation.images.mean()) / 255.0


class PatientWorkflow(RolloutWorkflow):
    """Acts until the episode ends, or until nothing has moved for a few turns; then asks for a verdict."""

    async def run_episode(self, engine: EpisodeEngine, env: Environment, task: EpisodeTask) -> Trajectory | None:
        """Play one episode; reject it if the camera sees nothing at the start."""
        env, trajectory, still = WithMotionSensor(env), Trajectory(task), 0
        observation = await env.initialize(task.name, task.seed)
        if not observation.images.any():
            return None
        while len(trajectory.chunks) < task.max_chunks and still < PATIENCE:
            output = await engine.act(observation)
            result = await env.execute("act", {"actions": output.actions[0]})
            trajectory.add(output, result)
            observation = result.observation
            if result.done:
                break
            motion = await env.execute("motion", {})
            still = still + 1 if motion.value < STILL else 0
        await trajectory.finish(engine, observation)
        trajectory.add_reward(0.1 * await judge(observation))
        return trajectory
