"""Workflows: trajectories, their batch, and what WorkflowCollector makes of episodes, on the toy in real processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from expect import raises_code

from embodrl.algorithms.episodes import split_episodes
from embodrl.config import load_config
from embodrl.data.rng import RowGenerators
from embodrl.envs.environment import ToolResult
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError, EnvError, WorkflowError
from embodrl.hybrid_engines.rollout.batched import BatchedEngine
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.async_collector import AsyncCollector, make_runners
from embodrl.workers.collector import WHOLE, EpisodeSchedule, Share, SyncCollector, share_config
from embodrl.workers.env import make_pool
from embodrl.workers.recorders import Judging
from embodrl.workers.workflows.async_pool import AsyncPool
from embodrl.workers.workflows.runner import WorkflowCollector
from embodrl.workers.workflows.workflow import (
    ChunkWorkflow,
    EpisodeTask,
    RolloutWorkflow,
    Trajectory,
    stack_trajectories,
)

CHUNK = 3
NUM_ENVS = 12
SETTINGS = [
    "env=toy",
    "env.tasks=[reach-red,reach-green]",
    "env.max_episode_steps=12",
    "env.include_state=true",
    "env.pin_cpus=false",
    f"env.train.total_num_envs={NUM_ENVS}",
    "env.train.max_steps_per_rollout_epoch=12",
    "env.train.auto_reset=false",
    f"model.num_action_chunks={CHUNK}",
    "model.warm_start=null",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=8",
    "algorithm.group_size=2",
]
CONFIG = load_config(SETTINGS).config
TASK = EpisodeTask("reach-red", 0, 5, 4, 0)


class Compass:
    """A policy that moves by what it sees; log-probs and values tell which observation they belong to."""

    version = 3

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.batches: list[int] = []

    def offload(self) -> None:
        pass

    def row_generators(self, seeds: Any) -> None:
        return None

    def random_state(self) -> list[str]:
        return []

    def set_random_state(self, states: list[str]) -> None:
        assert states == []

    def act(self, observation: Observation, compute_values: bool, generators: Any = None) -> PolicyOutput:
        self.threads.add(threading.current_thread().name)
        batch = observation.batch_size
        self.batches.append(batch)
        actions = np.zeros((batch, CHUNK, 7), np.float32)
        turn = observation.images.reshape(batch, -1).astype(np.int64).sum(axis=1) % 7
        actions[:, :, 0], actions[:, :, 1] = np.cos(turn)[:, None], np.sin(turn)[:, None]
        seen = torch.from_numpy(observation.state.copy())
        logprobs = seen[:, :1, None].expand(batch, CHUNK, 7).clone()
        values = self.values(observation) if compute_values else None
        return PolicyOutput(actions, logprobs, values, {"seen": seen}, self.version)

    def values(self, observation: Observation) -> torch.Tensor:
        return torch.from_numpy(observation.state[:, 1:].copy())


WITH_FRAMES = Judging(keep_frames=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    with make_pool(CONFIG, NUM_ENVS) as made:
        yield made


def rollout(pool: EnvPool, workflow: RolloutWorkflow, config: Any = CONFIG, **options: Any) -> WorkflowCollector:
    stop = options.pop("should_stop", lambda: False)
    return WorkflowCollector(config, pool, options.pop("engine", Compass()), stop, workflow=workflow, **options)


def test_the_built_in_workflow_gathers_what_the_lockstep_worker_gathers(pool: EnvPool) -> None:
    wanted, metrics = SyncCollector(CONFIG, pool, Compass(), lambda: False, WITH_FRAMES).gather(4)
    engine = Compass()
    worker = rollout(pool, ChunkWorkflow(), engine=engine, judging=WITH_FRAMES)
    found, others = worker.gather(4)
    assert found.batch_size == wanted.batch_size == torch.Size([4, NUM_ENVS])
    for name in ("rewards", "valid", "terminated", "truncated", "bootstrap_values", "task_id", "group_id"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    played = wanted.valid.any(-1)
    assert int(played.sum()) > 0 and wanted.truncated.any() and wanted.terminated.any() and not played.all()
    for name in ("logprobs", "success", "policy_version", "frames"):
        assert torch.equal(getattr(found, name)[played], getattr(wanted, name)[played]), name
    assert torch.equal(found.values[:-1][played], wanted.values[:-1][played])
    assert torch.equal(found.forward_inputs["seen"][played], wanted.forward_inputs["seen"][played])
    assert found.meta["env_steps"] == wanted.meta["env_steps"]
    names = [name for name in metrics if name.startswith("rollout/")]
    assert "rollout/reach-green/success_rate" in names
    for name in names:
        assert others[name] == pytest.approx(metrics[name], rel=1e-5), name
    assert others["workflow/failed_episodes"] == others["workflow/rejected_episodes"] == 0
    # Episodes that run at the same time share the calls of policy and simulators.
    assert max(engine.batches) >= NUM_ENVS // 2 and others["workflow/env_batch"] > 2


def test_groups_begin_in_the_same_state_and_epochs_differ(pool: EnvPool) -> None:
    class Seeds(ChunkWorkflow):
        played: ClassVar[list[EpisodeTask]] = []

        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory:
            self.played.append(task)
            return await super().run_episode(engine, env, task)

    config = load_config([*SETTINGS, "algorithm.rollout_epoch=2"]).config
    batch, _ = rollout(pool, Seeds(), config).gather(1)
    seeds = [task.seed for task in Seeds.played]
    assert len(seeds) == 2 * NUM_ENVS and seeds[0::2] == seeds[1::2] and len(set(seeds)) == NUM_ENVS
    assert batch.batch_size[1] == 2 * NUM_ENVS and batch.group_id is not None
    assert batch.group_id[0].tolist() == [group for group in range(NUM_ENVS) for _ in range(2)]


def test_processes_draw_the_random_numbers_of_one(pool: EnvPool) -> None:
    """Episodes of one group that different processes play would otherwise be equal."""

    class Seeded(Compass):
        def __init__(self) -> None:
            super().__init__()
            self.drawn: set[tuple[int, ...]] = set()

        def row_generators(self, seeds: Any) -> None:
            self.drawn |= {tuple(seed) for seed in seeds}

    def drawn(pool: EnvPool, share: Share = WHOLE) -> set[tuple[int, ...]]:
        engine = Seeded()
        rollout(pool, ChunkWorkflow(), share_config(CONFIG, share), engine=engine, share=share).gather(2)
        return engine.drawn

    shares = [Share(rank, 2) for rank in range(2)]
    with make_pool(share_config(CONFIG, shares[0]), NUM_ENVS // 2) as half:
        parts = [drawn(half, share) for share in shares]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == drawn(pool)


def test_failed_and_rejected_episodes_are_counted_and_not_trained_on(pool: EnvPool) -> None:
    class Choosy(ChunkWorkflow):
        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory | None:
            trajectory = await super().run_episode(engine, env, task)
            self.count = getattr(self, "count", 0) + 1
            if self.count <= 2:
                return None
            if self.count <= 5:
                raise RuntimeError("the reward service is down")
            return trajectory

    batch, metrics = rollout(pool, Choosy()).gather(0)
    assert metrics["workflow/rejected_episodes"] == 2 and metrics["workflow/failed_episodes"] == 3
    assert metrics["rollout/episodes"] == NUM_ENVS - 5
    empty = ~batch.valid.any(-1).any(0)
    assert int(empty.sum()) == 5 and not batch.rewards[:, empty].any() and batch.group_id is not None
    episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
    assert len(episodes) == NUM_ENVS - 5 and not episodes.lost.any()


def test_if_all_episodes_fail_the_run_stops_with_the_cause(pool: EnvPool) -> None:
    class Broken(RolloutWorkflow):
        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory | None:
            raise KeyError("prompt")

    with raises_code("workflow", WorkflowError, "12", "0", "KeyError", "'prompt'") as caught:
        rollout(pool, Broken()).gather(0)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("returned", "names"),
    [(7, [7]), (Trajectory(TASK), []), (None, [48])],
)
def test_what_is_no_trajectory_is_refused(pool: EnvPool, returned: Any, names: list[object]) -> None:
    class Wrong(RolloutWorkflow):
        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory | None:
            return returned

    with raises_code("workflow", WorkflowError, *names):
        rollout(pool, Wrong()).gather(0)


def test_a_signal_ends_the_episodes_and_leaves_the_pool_usable(pool: EnvPool) -> None:
    asked = threading.Event()

    class Endless(RolloutWorkflow):
        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory | None:
            await env.initialize(task.name, task.seed)
            asked.set()
            await asyncio.Event().wait()

    threads = set(threading.enumerate())
    with pytest.raises(InterruptedError):
        rollout(pool, Endless(), should_stop=asked.is_set).gather(0)
    assert set(threading.enumerate()) <= threads
    batch, _ = rollout(pool, ChunkWorkflow()).gather(0)
    assert batch.valid.any()


def test_an_episode_that_its_workflow_cuts_off_counts_as_truncated_there(pool: EnvPool) -> None:
    class Short(RolloutWorkflow):
        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory | None:
            trajectory = Trajectory(task)
            output = await engine.act(await env.initialize(task.name, task.seed))
            result = await env.execute("act", {"actions": output.actions[0, :2]})  # two of three actions
            trajectory.add(output, result)
            await trajectory.finish(engine, result.observation)
            trajectory.add_reward(10.0)
            self.last = result.observation.state[0, 1]
            return trajectory

    workflow = Short()
    config = load_config([*SETTINGS, "algorithm.bootstrap_type=truncation"]).config
    batch, metrics = rollout(pool, workflow, config).gather(0)
    assert metrics["rollout/episodes"] == NUM_ENVS and metrics["rollout/episode_length"] <= 2
    going = ~batch.terminated.any(-1).any(0)
    assert batch.valid[0, going].tolist() == [[True, True, False]] * int(going.sum()) and not batch.valid[1:].any()
    assert batch.truncated[0, going].tolist() == [[False, True, False]] * int(going.sum())
    assert (batch.rewards[0, going, 1] > 9).all() and (batch.rewards[0, :, 2] == 0).all()
    assert float(workflow.last) in batch.bootstrap_values[0].flatten().tolist()


def test_stacking_pads_and_stands_in_for_what_is_missing() -> None:
    def chunk(version: int) -> tuple[PolicyOutput, ToolResult]:
        inputs = {"x": torch.full((1, 2), float(version))}
        output = PolicyOutput(np.zeros((1, 2, 1), np.float32), torch.ones(1, 2, 1), torch.ones(1, 1), inputs, version)
        seen = Observation(
            np.zeros((1, 1, 4, 4, 3), np.uint8), np.zeros((1, 0), np.float32), [""], np.zeros(1, np.int32)
        )
        yes, no = np.ones(2, np.bool_), np.zeros(2, np.bool_)
        return output, ToolResult(seen, np.array([1, 2], np.float32), yes, no, no, success=version == 2)

    whole, short = Trajectory(TASK), Trajectory(TASK)
    for version in (0, 1, 2):
        whole.add(*chunk(version))
    short.add(*chunk(0))
    whole.end_value, short.end_value = torch.tensor([5.0]), torch.tensor([7.0])
    batch = stack_trajectories([short, None, whole], 3, torch.tensor([0, 0, 1]))
    assert batch.policy_version[:, 2].tolist() == [0, 1, 2] and batch.policy_version[:, 0].tolist() == [0, 0, 0]
    assert batch.values[:, :, 0].tolist() == [[1, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 5]]
    assert batch.bootstrap_values[:, :, 0].tolist() == [[7, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert batch.truncated[0].tolist() == [[False, True], [True, False], [False, False]]
    assert not batch.truncated[1:].any() and batch.valid.any(-1).tolist() == [
        [True, False, True],
        [False, False, True],
        [False, False, True],
    ]
    assert batch.success is not None and batch.success[:, 2].tolist() == [False, False, True]
    assert stack_trajectories([short], 1, torch.tensor([0]), bootstrap=False).bootstrap_values.sum() == 0
    with raises_code("workflow-trajectory", EmbodrlError, "3", "2"):
        stack_trajectories([whole], 2, torch.tensor([0]))


def test_the_environment_names_its_tool_and_refuses_what_it_can_not_do(pool: EnvPool) -> None:
    async def play() -> None:
        environments = AsyncPool(pool)
        env = environments.environments()[3]
        (tool,) = env.list_tools()
        schema = tool.parameters["properties"]["actions"]
        assert tool.name == "act" and schema["maxItems"] == CHUNK and schema["items"]["maxItems"] == 7
        assert schema["items"]["prefixItems"][0] == {"type": "number", "minimum": -1.0, "maximum": 1.0}
        fine = {"actions": np.zeros((2, 7))}
        with raises_code("episode-not-started", EnvError):
            await env.execute("act", fine)
        with raises_code("task-unknown", EnvError, "'reach-blue'"):
            await env.initialize("reach-blue", 1)
        await env.initialize("reach-green", 1)
        for tool_name, arguments, code, names in (
            ("fly", fine, "tool-unknown", ["'fly'"]),
            ("act", {}, "actions-shape", []),
            ("act", {"actions": np.zeros((4, 7))}, "actions-shape", ["[4, 7]"]),
            ("act", {"actions": np.zeros((2, 6))}, "actions-shape", ["[2, 6]"]),
            ("act", {"actions": np.full((1, 7), np.nan)}, "actions-not-finite", []),
        ):
            with raises_code(code, EnvError, *names):
                await env.execute(tool_name, arguments)
        assert (await env.execute("act", fine)).valid.all()
        await env.close()
        environments.close()

    asyncio.run(play())


def test_the_state_of_one_episode_continues_bit_exactly_beside_others_and_elsewhere(pool: EnvPool) -> None:
    rng = np.random.default_rng(0)
    moves = [{"actions": rng.uniform(-1, 1, (2, 7)).astype(np.float32)} for _ in range(5)]

    async def play() -> None:
        environments = AsyncPool(pool)
        first, second, third = environments.environments()[:3]
        await asyncio.gather(*(env.initialize("reach-red", 9) for env in (first, second)))
        await first.execute("act", moves[0])
        state = await first.get_state()
        wanted = [await first.execute("act", move) for move in moves[1:4]]
        await second.execute("act", moves[4])
        for env in (third, first):
            seen = await env.load_state(state)
            assert seen.batch_size == 1
            for move, before in zip(moves[1:4], wanted, strict=True):
                again = await env.execute("act", move)
                np.testing.assert_array_equal(again.observation.images, before.observation.images)
                np.testing.assert_array_equal(again.reward, before.reward)
                assert again.episode_length == before.episode_length and again.done == before.done
        environments.close()

    asyncio.run(play())


def test_a_slow_process_delays_only_its_own_episodes(pool: EnvPool, monkeypatch: pytest.MonkeyPatch) -> None:
    release, slow = threading.Event(), pool.managers[0]
    receive = slow.wait_reset

    def wait_reset(*args: Any, **kwargs: Any) -> Observation:
        assert release.wait(60)
        return receive(*args, **kwargs)

    monkeypatch.setattr(slow, "wait_reset", wait_reset)

    async def play() -> None:
        environments = AsyncPool(pool)
        all_of_them = environments.environments()
        held = asyncio.create_task(all_of_them[0].initialize("reach-red", 1))
        other = all_of_them[-1]
        await other.initialize("reach-red", 2)
        await other.execute("act", {"actions": np.zeros((1, 7))})
        assert not held.done()
        release.set()
        await held
        environments.close()

    asyncio.run(play())


def test_the_engine_joins_requests_and_answers_each_with_its_own() -> None:
    engine = Compass()

    async def play() -> None:
        shared = BatchedEngine(engine, compute_values=True, max_batch=4)
        observations = [
            Observation(
                np.full((1, 1, 2, 2, 3), row, np.uint8), np.full((1, 2), row, np.float32), ["go"], np.zeros(1, np.int32)
            )
            for row in range(10)
        ]
        episodes = [shared.for_episode(row) for row in range(10)]
        outputs = await asyncio.gather(*(e.act(o) for e, o in zip(episodes, observations, strict=True)))
        assert [float(output.logprobs[0, 0, 0]) for output in outputs] == list(range(10))
        assert all(output.actions.shape == (1, CHUNK, 7) and output.version == 3 for output in outputs)
        values = await asyncio.gather(*(e.values(o) for e, o in zip(episodes, observations, strict=True)))
        assert [float(value[0, 0]) for value in values] == list(range(10))
        shared.close()

    asyncio.run(play())
    assert engine.batches == [4, 4, 2] and len(engine.threads) == 1
    assert threading.current_thread().name not in engine.threads


def test_an_episode_asks_several_things_at_once(pool: EnvPool) -> None:
    """Two samples and a value of one observation; all go to the policy together, and each gets its own answer."""

    class Several(RolloutWorkflow):
        async def run_episode(self, engine: Any, env: Any, task: EpisodeTask) -> Trajectory:
            trajectory = Trajectory(task)
            observation = await env.initialize(task.name, task.seed)
            while not trajectory.done and len(trajectory.chunks) < task.max_chunks:
                output, second, values = await asyncio.gather(
                    engine.act(observation), engine.act(observation), engine.values(observation)
                )
                assert output.actions.tobytes() == second.actions.tobytes() and torch.equal(values, output.values)
                result = await env.execute("act", {"actions": output.actions[0]})
                trajectory.add(output, result)
                observation = result.observation
            await trajectory.finish(engine, observation)
            return trajectory

    wanted, _ = rollout(pool, ChunkWorkflow()).gather(4)
    found, metrics = rollout(pool, Several()).gather(4)
    assert metrics["workflow/failed_episodes"] == 0
    for name in ("rewards", "logprobs", "valid", "values", "group_id"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name

    async def play() -> list[PolicyOutput]:
        shared = BatchedEngine(policy, compute_values=False, max_batch=4)
        episode = shared.for_episode(1)
        images = np.zeros((1, 1, 2, 2, 3), np.uint8)
        rows = (Observation(images, np.full((1, 2), n, np.float32), [""], np.zeros(1, np.int32)) for n in (5, 6))
        outputs = await asyncio.gather(*map(episode.act, rows))
        shared.close()
        return outputs

    policy = Compass()
    assert [float(output.logprobs[0, 0, 0]) for output in asyncio.run(play())] == [5, 6] and policy.batches == [2]


def test_an_episode_asks_the_policy_while_it_moves(pool: EnvPool) -> None:
    """The policy answers only once the simulator has: a workflow that waited for one of them would never end."""
    moved = threading.Event()

    class Waiting(Compass):
        def act(self, *args: Any, **kwargs: Any) -> PolicyOutput:
            assert moved.wait(60.0)
            moved.clear()
            return super().act(*args, **kwargs)

    async def play() -> None:
        environments, shared = AsyncPool(pool), BatchedEngine(Waiting(), compute_values=False, max_batch=1)
        env, engine = environments.environments()[0], shared.for_episode(0)

        async def move(actions: Any) -> ToolResult:
            result = await env.execute("act", {"actions": actions})
            moved.set()
            return result

        trajectory = Trajectory(TASK)
        observation = await env.initialize("reach-red", 5)
        moved.set()
        output = await engine.act(observation)
        for _ in range(3):  # the policy plans from what was seen before the move
            following, result = await asyncio.gather(engine.act(observation), move(output.actions[0]))
            trajectory.add(output, result)
            assert torch.equal(following.forward_inputs["seen"], torch.from_numpy(observation.state))
            output, observation = following, result.observation
        assert trajectory.num_actions == 3 * CHUNK and not trajectory.lost
        shared.close()
        environments.close()

    asyncio.run(play())


def test_an_error_of_the_policy_reaches_all_who_asked() -> None:
    class Broken(Compass):
        def act(self, *args: Any, **kwargs: Any) -> PolicyOutput:
            raise ValueError("out of memory")

    async def play() -> None:
        shared = BatchedEngine(Broken(), compute_values=False, max_batch=4)
        seen = Observation(
            np.zeros((1, 1, 2, 2, 3), np.uint8), np.zeros((1, 2), np.float32), [""], np.zeros(1, np.int32)
        )
        asked = [shared.for_episode(row).act(seen) for row in range(3)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(result) for result in results] == ["out of memory"] * 3
        shared.close()

    asyncio.run(play())


def test_rows_draw_from_their_own_generators_whatever_their_company() -> None:
    from embodrl.models.common.sampling import exponential_noise, standard_normal

    def rows(*seeds: int) -> RowGenerators:
        return RowGenerators(tuple(torch.Generator().manual_seed(seed) for seed in seeds))

    cpu = torch.device("cpu")
    for draw, dim in ((exponential_noise, 0), (standard_normal, 0)):
        alone = draw((1, 5), rows(7), cpu)
        company = draw((3, 5), rows(1, 7, 2), cpu)
        assert torch.equal(company[1:2], alone) and not torch.equal(company[0], company[1]) and dim == 0
    alone = standard_normal((4, 1, 5), rows(7), cpu, dim=1)
    assert torch.equal(standard_normal((4, 2, 5), rows(3, 7), cpu, dim=1)[:, 1:], alone)
    with pytest.raises(ValueError, match="2 generators for 3 rows"):
        exponential_noise((3, 5), rows(1, 2), cpu)


def test_workflows_run_ahead_of_training_stage_by_stage() -> None:
    """What an episode draws follows from its numbers, so that one without interference is as in turns."""
    overrides = ["rollout.workflow=embodrl.workers.workflows.workflow:ChunkWorkflow", "runner.max_iterations=3"]
    ahead = [*overrides, "runner.max_staleness=1", "rollout.pipeline_stages=2", "env.num_processes=2"]
    config = load_config([*SETTINGS, *ahead]).config
    with make_pool(config, NUM_ENVS) as pool:
        policy: Any = Compass()
        policy.update_weights = lambda weights, version: setattr(policy, "version", version)
        schedule = EpisodeSchedule(config, NUM_ENVS, len(pool.spec.tasks))
        worker = AsyncCollector(config, schedule, make_runners(config, pool, policy), policy, lambda: False)
        with closing(worker):
            policy.version = 0
            batches = []
            for version in range(3):
                batch, metrics = worker.gather(version)
                batches.append(batch)
                assert metrics["workflow/failed_episodes"] == 0 and metrics["rollout/episodes"] == NUM_ENVS
                assert int(batch.policy_version.max()) <= version
                worker.update_weights([], version + 1)
    with make_pool(config, NUM_ENVS) as pool:
        plain: Any = Compass()
        halves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for iteration in range(4):  # a quick stage may be one update ahead of the other
            worker = WorkflowCollector(config, pool, plain, lambda: False, workflow=ChunkWorkflow())
            expected, _ = worker.gather(iteration)
            halves += [(expected.rewards[:, part], expected.valid[:, part]) for part in (slice(6), slice(6, 12))]
    played: list[int] = []
    for batch in batches:
        for part in (slice(6), slice(6, 12)):
            found = batch.rewards[:, part], batch.valid[:, part]
            played += [n for n, half in enumerate(halves) if all(map(torch.equal, half, found))]
        assert batch.group_id is not None and expected.group_id is not None
        assert sorted(batch.group_id[0].tolist()) == sorted(expected.group_id[0].tolist())
    assert len(played) == len(set(played)) == 6
