"""Several agents in an episode: their columns, groups, ends and figures, by hand and on the toy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from test_workflow import CHUNK, CONFIG, NUM_ENVS, SETTINGS, TASK, Compass, rollout
from two_agents import Pilots

from embodrl.algorithms.episodes import split_episodes
from embodrl.algorithms.groups import grpo
from embodrl.config import load_config
from embodrl.config.explain import summary
from embodrl.envs.environment import ToolResult
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError, WorkflowError
from embodrl.names import agents_of
from embodrl.preflight.run_memory import chunks_of
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.async_collector import AsyncCollector, make_runners
from embodrl.workers.collector import EpisodeSchedule
from embodrl.workers.env import make_pool
from embodrl.workers.evaluator import EpisodeResults, EvalResult, join_results
from embodrl.workers.outcomes import EpisodeStats
from embodrl.workers.workflows.team import Played, checked, columns_of, count
from embodrl.workers.workflows.workflow import EpisodeTask, Trajectory, stack_trajectories

AGENTS = ("guide", "driver")
FLAGS = ("valid", "terminated", "truncated")


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    with make_pool(CONFIG, NUM_ENVS) as made:
        yield made


def trajectory(*rewards: float, ended: bool = True, success: bool = False, lost: bool = False) -> Trajectory:
    """Chunks of one action each."""
    made = Trajectory(TASK)
    seen = Observation(np.zeros((1, 1, 4, 4, 3), np.uint8), np.zeros((1, 0), np.float32), [""], np.zeros(1, np.int32))
    for number, reward in enumerate(rewards):
        last = number == len(rewards) - 1
        output = PolicyOutput(np.zeros((1, 1, 1), np.float32), torch.zeros(1, 1, 1), torch.zeros(1, 1), {}, 0)
        flags = [np.array([value]) for value in (not (lost and last), ended and not lost and last, lost and last)]
        made.add(output, ToolResult(seen, np.array([reward], np.float32), *flags, success=success and last))
    return made


def test_every_agent_has_a_row_and_groups_of_its_own() -> None:
    episodes: list[Played | None] = [
        (trajectory(1.0), trajectory(5.0)),
        (trajectory(0.0), trajectory(2.0, 3.0)),
        None,
        (trajectory(4.0), Trajectory(TASK)),
    ]
    columns, groups = columns_of(episodes, 2, torch.tensor([3, 3, 4, 4]))
    assert groups.tolist() == [6, 6, 7, 7, 8, 8, 9, 9]
    returns = [None if column is None else column.total_reward for column in columns]
    assert returns == [1.0, 0.0, 5.0, 5.0, None, 4.0, None, 0.0]
    batch = stack_trajectories(columns, 2, groups)
    assert batch.batch_size == torch.Size([2, 8]) and batch.group_id is not None
    assert batch.valid[..., 0].any(0).tolist() == [True, True, True, True, False, True, False, False]
    assert batch.valid[1, :, 0].tolist() == [False, False, False, True, False, False, False, False]
    named = {name: getattr(batch, name) for name in ("rewards", "valid", "terminated", "truncated", "group_id")}
    # The guides got 1 and 0, the drivers 5 and 5: across agents, all of them would have an advantage.
    found = grpo(**named, gamma=1.0).advantages[0, :, 0]
    assert found.tolist() == [0.5, -0.5, 0, 0, 0, 0, 0, 0]


def test_a_single_agent_keeps_its_columns() -> None:
    episodes = [trajectory(1.0), None, trajectory(2.0)]
    groups = torch.tensor([0, 0, 1])
    columns, same = columns_of([each and (each,) for each in episodes], 1, groups)
    assert columns == episodes and torch.equal(same, groups) and same.dtype == groups.dtype


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (trajectory(1.0), ["guide", "driver"]),
        ({"guide": trajectory(1.0)}, ["driver"]),
        ({"guide": trajectory(1.0), "driver": trajectory(1.0), "judge": trajectory(1.0)}, ["guide, driver"]),
        ({"guide": trajectory(1.0), "driver": None}, ["driver"]),
        ({"guide": Trajectory(TASK), "driver": Trajectory(TASK)}, ["driver"]),
        ({"guide": trajectory(*[0.0] * 5), "driver": trajectory(1.0)}, ["5", "4"]),
    ],
)
def test_what_are_not_the_trajectories_of_its_agents_is_refused(returned: Any, names: list[object]) -> None:
    with raises_code("workflow-trajectory", WorkflowError, *names):
        checked(returned, AGENTS, TASK, "Mine")


def test_agents_of_a_single_trajectory_are_refused() -> None:
    with raises_code("workflow-trajectory", WorkflowError):
        checked({"guide": trajectory(1.0), "driver": trajectory(1.0)}, (), TASK, "Mine")


def test_the_trajectories_of_an_episode_are_lost_together() -> None:
    returned = {"driver": trajectory(1.0, 2.0, success=True), "guide": trajectory(1.0, 0.0, lost=True)}
    played = checked(returned, AGENTS, TASK, "Mine")
    assert played == (returned["guide"], returned["driver"])
    columns, groups = columns_of([played, (trajectory(1.0), trajectory(1.0))], 2, torch.tensor([0, 1]))
    batch = stack_trajectories(columns, 2, groups)
    assert split_episodes(batch.valid, batch.terminated, batch.truncated).lost.tolist() == [True, True, False, False]
    stats = count([played], ["reach-red"], AGENTS, 4)
    assert (stats.lost, stats.episodes, stats.by_agent["driver"][0]) == (1, 0, 0)


def test_another_agents_action_ends_a_trajectory() -> None:
    waiting, acting = trajectory(1.0, 2.0, ended=False), trajectory(3.0, success=True)
    chunk = acting.chunks[-1]
    seen: Any = None
    ended = ToolResult(seen, *(chunk.__dict__[name].numpy() for name in ("rewards", *FLAGS)), success=True)
    waiting.end(ended)
    assert waiting.done and waiting.success and waiting.total_reward == 3.0
    assert [bool(each.terminated) for each in waiting.chunks] == [False, True]
    nothing = Trajectory(TASK)
    nothing.end(ended)  # it had no turn
    assert not nothing.chunks


def test_an_episode_counts_once_and_each_agent_by_itself() -> None:
    episodes: list[Played | None] = [
        (trajectory(1.0, success=True), trajectory(2.0, 3.0, success=True)),
        (trajectory(4.0, success=True), trajectory(0.0)),
        (trajectory(7.0), Trajectory(TASK)),
        (trajectory(*[1.0] * 4, ended=False), trajectory(1.0)),  # one agent is still at it at the end of the rollout
        None,
    ]
    stats = count(episodes, ["reach-red"], AGENTS, 4)
    stats.merge(count(episodes, ["reach-red"], AGENTS, 4))
    stats = EpisodeStats(**stats.as_dict())
    found = stats.metrics()
    assert found["rollout/episodes"] == 6 and stats.by_task == {"reach-red": [2, 6]}
    assert found["rollout/success_rate"] == pytest.approx(1 / 3)  # where both succeeded
    assert found["rollout/return"] == pytest.approx((3.0 + 2.0 + 7.0) / 3)  # of means over the agents that acted
    assert found["rollout/episode_length"] == pytest.approx((3 + 2 + 1) / 3)
    assert found["rollout/agent/guide/success_rate"] == pytest.approx(2 / 3)
    assert found["rollout/agent/guide/return"] == pytest.approx(4.0)
    assert found["rollout/agent/driver/success_rate"] == pytest.approx(1 / 2)
    assert found["rollout/agent/driver/return"] == pytest.approx(2.5)
    assert found["rollout/agent/driver/episode_length"] == pytest.approx(1.5)
    assert not any("agent" in name for name in count([(trajectory(1.0),)], ["reach-red"], (), 4).metrics())


def test_evaluations_join_the_figures_of_agents() -> None:
    def part(count: int, agents: dict[str, Any]) -> dict[Any, EpisodeResults]:
        return {"greedy": EpisodeResults(np.zeros((count, 4)), [""] * count, [""] * count, agents=agents)}

    nothing = np.full((1, 3), np.nan)
    acted = {"guide": np.array([[1.0, 2.0, 3.0]]), "driver": nothing}
    joined = join_results([part(2, {}), part(1, acted)], sum)["greedy"].agents
    assert np.isnan(joined["guide"][:2]).all() and joined["guide"][2].tolist() == [1, 2, 3]
    result = EvalResult(1.0, 1, {}, 0.0, 0.0, per_agent={"guide": (0.5, 2.0, 3.0)})
    assert result.metrics()["eval/agent/guide/success_rate"] == 0.5
    assert result.metrics()["eval/agent/guide/return"] == 2.0


@pytest.mark.parametrize("agents", [("one",), ("a", "a"), ["a", "b"], "ab", ("a", 3), ("a", "b/c")])
def test_agents_are_several_different_names(agents: Any) -> None:
    with raises_code("workflow-agents", EmbodrlError, "proposer"):
        agents_of(type("Mine", (), {"agents": agents}))


def test_turns_on_the_toy_become_two_rows_an_environment(pool: EnvPool) -> None:
    class Failing(Pilots):
        seen = 0

        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> dict[str, Trajectory]:
            played = await super().run_episode(engine, env, task)
            self.seen += 1
            if self.seen == 1:
                raise RuntimeError("the judge is down")
            return played

    engine: Any = Compass()
    batch, metrics = rollout(pool, Failing(), engine=engine).gather(4)
    assert batch.batch_size == torch.Size([4, 2 * NUM_ENVS]) and batch.group_id is not None
    assert batch.group_id[0].tolist() == [group for group in range(NUM_ENVS) for _ in range(2)]
    assert metrics["workflow/failed_episodes"] == 1 and metrics["rollout/episodes"] == NUM_ENVS - 1
    empty = ~batch.valid.any(-1).any(0)
    # Rows 4n and 4n + 1 are the first agent in the two episodes of a group, the next two the second one in them.
    twin = torch.arange(2 * NUM_ENVS).reshape(-1, 2, 2)
    first, second = twin[:, 0].flatten(), twin[:, 1].flatten()
    assert int(empty[first].sum()) == 1 and empty[second][empty[first]].all()
    both = ~(empty[first] | empty[second])  # some episodes end before the second one's turn
    assert 0 < int(both.sum()) < NUM_ENVS - 1
    ends = (batch.terminated | batch.truncated).flatten(-1).any(-1).sum(0)
    assert (ends[~empty] == 1).all(), "an end by one agent is the end for both"
    cut = batch.truncated.any(-1).any(0)
    assert torch.equal(cut[first][both], cut[second][both]) and cut[first][both].any()
    assert batch.terminated[:, first].any()
    totals = batch.rewards.sum(dim=(0, 2))
    assert (totals[second] - totals[first] > 5)[both].all(), "each has its own rewards"
    assert metrics["rollout/agent/second/return"] > metrics["rollout/agent/first/return"] + 5  # type: ignore[operator]
    assert int(batch.valid.sum()) > CHUNK * NUM_ENVS


def test_rows_of_agents_are_counted_before_work_starts() -> None:
    one = load_config([*SETTINGS, "rollout.workflow=embodrl.workers.workflows.workflow:ChunkWorkflow"]).config
    two = load_config([*SETTINGS, "rollout.workflow=two_agents:Pilots"]).config
    assert chunks_of(two) == 2 * chunks_of(one) == 2 * 4 * NUM_ENVS
    assert "each of 2 agents = 96 chunks" in summary(two) and "agents" not in summary(one)
    with raises_code("workflow-exists", EmbodrlError, "first"):
        load_config([*SETTINGS, "rollout.workflow=two_agents:Alone"])


def test_agents_act_ahead_of_training_in_stages() -> None:
    ahead = ["rollout.workflow=two_agents:Pilots", "runner.max_iterations=2", "runner.max_staleness=1"]
    config = load_config([*SETTINGS, *ahead, "rollout.pipeline_stages=2", "env.num_processes=2"]).config
    policy: Any = Compass()
    policy.version = 0
    policy.update_weights = lambda weights, version: setattr(policy, "version", version)
    with make_pool(config, NUM_ENVS) as pool:
        schedule = EpisodeSchedule(config, NUM_ENVS, len(pool.spec.tasks))
        worker = AsyncCollector(config, schedule, make_runners(config, pool, policy), policy, lambda: False)
        with closing(worker):
            for version in range(2):
                batch, metrics = worker.gather(version)
                assert batch.batch_size == torch.Size([4, 2 * NUM_ENVS]) and batch.group_id is not None
                assert batch.group_id[0].tolist() == [group for group in range(NUM_ENVS) for _ in range(2)]
                assert metrics["rollout/episodes"] == NUM_ENVS and metrics["rollout/agent/first/return"]
                assert int(batch.policy_version.max()) <= version
                worker.update_weights([], version + 1)
