"""A workflow of two agents, who take turns at one dot."""

from __future__ import annotations

from typing import Any

from embodrl.workers.workflows.agent import AgentWorkflow
from embodrl.workers.workflows.workflow import EpisodeTask, RolloutWorkflow, Trajectory


class Pilots(RolloutWorkflow):
    """The first agent is paid 1 on top of its last reward, the second one 10."""

    agents = ("first", "second")

    async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> dict[str, Trajectory]:
        played = {agent: Trajectory(task) for agent in self.agents}
        observation = await env.initialize(task.name, task.seed)
        for turn in range(len(played) * task.max_chunks):
            agent = self.agents[turn % len(played)]
            output = await engine.act(observation)
            result = await env.execute("act", {"actions": output.actions[0]})
            played[agent].add(output, result)
            observation = result.observation
            if result.done:
                for other in played.keys() - {agent}:
                    played[other].end(result)
                break
        for trajectory, reward in zip(played.values(), (1.0, 10.0), strict=True):
            await trajectory.finish(engine, observation)
            trajectory.add_reward(reward)
        return played


class Called(AgentWorkflow):
    """Calls one function, and names two agents."""

    agents = ("first", "second")


class Alone(Pilots):
    """Names one agent."""

    agents = ("first",)
