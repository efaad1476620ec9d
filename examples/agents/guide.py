"""Two agents of one policy that must cooperate: a guide reads the instruction, a driver calls the controller.

PYTHONPATH=examples/agents:examples/planner embodrl train --config examples/agents/config.yaml

The driver never sees the instruction, so that it can be right more often than by chance only if it listens to the
guide. Seed 0, 30 iterations, 7 minutes on two busy cores: sampled success 30 to 94 %, greedy 59 to 100 % of 64.
"""

from __future__ import annotations

from reach import COLOUR, WithReach  # examples/planner

from embodrl import Environment, EpisodeEngine, EpisodeTask, RolloutWorkflow, Tool, Trajectory

SAY = Tool("say", "name a colour", {"type": "object", "properties": {"colour": COLOUR}, "required": ["colour"]})
NAMED = 0.5  # reward of the guide for the colour of the instruction


class GuideWorkflow(RolloutWorkflow):
    """The guide reads the instruction and says a colour; the driver reads this word alone and calls ``reach``, once."""

    agents = ("guide", "driver")

    async def run_episode(
        self, engine: EpisodeEngine, env: Environment, task: EpisodeTask
    ) -> dict[str, Trajectory] | None:
        """Play one episode of one message from each agent; both are rewarded if the dot is on the right square."""
        guide, driver, env = Trajectory(task), Trajectory(task), WithReach(env)
        instruction = (await env.initialize(task.name, task.seed)).instruction[0]
        said = await engine.generate([{"role": "user", "content": instruction}], [SAY], tool_choice="required")
        colour = str(said.tool_calls[0].arguments["colour"])
        choice = await engine.generate([{"role": "user", "content": colour}], env.list_tools(), tool_choice="required")
        call = choice.tool_calls[0]
        result = await env.execute(call.name, call.arguments)
        if result.lost:
            return None
        for trajectory, message in ((guide, said), (driver, choice)):
            trajectory.add_message(message, float(result.success), terminated=True, success=result.success)
        guide.add_reward(NAMED * (colour in instruction.split()))
        return {"guide": guide, "driver": driver}
