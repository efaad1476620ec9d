"""The Collector on the toy environment in this process, with experts and faults of our own making."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.numpy import load_file

from embodrl.config import load_config
from embodrl.config.schema import Config
from embodrl.data.demos import EXECUTED, LOG_PROB
from embodrl.data.load import load_demos
from embodrl.data.raw import RawWriter
from embodrl.envs.experts import EXPERTS
from embodrl.envs.pool.local import LocalPool
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import ConfigError, EmbodrlError, EnvError
from embodrl.fields import Fields
from embodrl.processes.frames import PeerGoneError
from embodrl.specs import ENVS
from embodrl.types import PolicyOutput
from embodrl.workers.collection import AttemptQueue, DemoCollector
from embodrl.workers.demonstrations import SHOWN, Attempted, Experts, NumberedAttempts
from embodrl.workers.env import make_single_pool
from embodrl.workers.policy import RecordedPolicy

NUM_ENVS, MAX_STEPS = 4, 21
TASKS = ("reach-red",)


def config(directory: Path, *overrides: str) -> Config:
    return load_config(
        [
            "env=toy",
            "env.tasks=[reach-red]",
            f"env.train.total_num_envs={NUM_ENVS}",
            "model.warm_start=null",
            "actor.global_batch_size=8",
            "actor.micro_batch_size=8",
            "collect.noise_fraction=0",
            f"collect.output_dir={directory}",
            *overrides,
        ]
    ).config


class Toy(ToyVectorEnv):
    """Experts do nothing in environments whose reset seed is odd, and so fail there."""

    def expert_actions(self):
        return super().expert_actions() * (self.episode_seed % 2 == 0)[:, None]


class Thirds(ToyVectorEnv):
    """Experts act in every third seed alone, the first of `embodrl collect` included."""

    def expert_actions(self):
        return super().expert_actions() * (self.episode_seed % 3 == 500_000 % 3)[:, None]


class ToyPool(LocalPool):
    """Counts its chunks; restarts as often as needed."""

    def __init__(self, make=Toy, tasks=("reach-red",), include_state=False, num_envs=NUM_ENVS):
        settings = {"image_size": 8, "max_episode_steps": MAX_STEPS, "auto_reset": False}
        kwargs = {"num_envs": num_envs, "tasks": tasks, "include_state": include_state, **settings}
        super().__init__(make, kwargs, max_restarts=1000)
        self.num_steps = 0
        self.start()

    def step_async(self, actions, active=None):
        self.num_steps += 1
        super().step_async(actions, active)


def run(settings: Config, pool: EnvPool, collector: DemoCollector, should_stop=lambda: False, engine=None) -> None:
    attempts = NumberedAttempts(settings, pool, engine, collector.take, collector.add)
    attempts.run(lambda: collector.finished or should_stop())


def collect(settings: Config, pool: EnvPool, should_stop=lambda: False) -> DemoCollector:
    collector = DemoCollector(settings, pool.spec.tasks, RawWriter(Path(settings.collect.output_dir)))
    run(settings, pool, collector, should_stop)
    collector.close({})
    return collector


def contents(directory: Path) -> tuple[list[dict], dict[str, bytes]]:
    """The episodes' entries without their shards, and the frames of all shards."""
    hidden = ("shard", "start")
    entries = [{key: each for key, each in one.items() if key not in hidden} for one in index(directory)["episodes"]]
    shards = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
    return entries, {name: np.concatenate([shard[name] for shard in shards]).tobytes() for name in shards[0]}


def index(directory: Path) -> dict:
    return json.loads((directory / "index.json").read_text())


def test_the_success_rate_is_that_of_the_expert_even_if_failures_are_kept(tmp_path: Path) -> None:
    collector = collect(config(tmp_path, "collect.keep_failures=true", "collect.num_episodes=12"), ToyPool())
    content = index(tmp_path)
    successes = [episode["success"] for episode in content["episodes"]]
    assert len(successes) == 12 and successes.count(False) > 0
    assert all(episode["success"] == (episode["seed"] % 2 == 0) for episode in content["episodes"])
    assert (int(collector.tried[0]), int(collector.solved[0])) == (12, 6)
    assert content["meta"]["expert_success_rate"] == {"reach-red": 0.5}
    assert content["meta"]["stopped_early"] is False


def test_slow_demonstrators_move_by_a_part_of_the_expert_that_each_episode_draws(tmp_path: Path) -> None:
    drawn, speeds = [], []
    pool = ToyPool()
    expert = pool.expert_actions
    pool.expert_actions = lambda: drawn.append(expert()) or drawn[-1].copy()
    slow = ("collect.min_speed=0.2", "collect.max_speed=0.5", "collect.keep_failures=true", "collect.num_episodes=4")
    experts = Experts(config(tmp_path, *slow).collect, pool)
    every = np.arange(NUM_ENVS)
    for first in (0, 100):
        observation = pool.reset(first + every, np.zeros(NUM_ENVS, np.int32), every)
        experts.begin(every, first + every)
        output = experts(observation, every >= 0, 0)
        speeds.append(experts.speed.copy())
        np.testing.assert_array_equal(output.actions[:, 0, :-1], drawn[-1][:, :-1] * experts.speed[:, None])
        np.testing.assert_array_equal(output.actions[:, 0, -1], drawn[-1][:, -1])
        np.testing.assert_array_equal(output.forward_inputs[SHOWN], output.actions[:, 0])
    values = np.concatenate(speeds)
    assert len(set(values.tolist())) == len(values) and 0.2 <= values.min() < values.max() <= 0.5


def test_episodes_whose_success_is_ignored_go_on_to_the_step_limit(tmp_path: Path) -> None:
    chosen = config(tmp_path / "data", "env.train.ignore_terminations=true", "collect.num_episodes=4")
    with make_single_pool(chosen, NUM_ENVS) as pool:
        collect(chosen, pool)
    found = load_demos(tmp_path / "data")
    assert found.outcomes is not None and not found.outcomes.terminated.any()
    assert len(found.actions) == 4 * chosen.env.max_episode_steps
    assert found.outcomes.rewards.sum() > 0


def test_asked_to_stop_it_has_an_index_of_what_was_kept(tmp_path: Path) -> None:
    pool = ToyPool()
    settings = config(tmp_path, "collect.num_episodes=50")
    collector = collect(settings, pool, lambda: pool.num_steps == 2 * MAX_STEPS)
    content = index(tmp_path)
    assert 0 < len(content["episodes"]) == int(collector.kept.sum()) < 50
    assert content["meta"]["stopped_early"] is True


def test_what_is_committed_when_it_is_stopped_is_continued(tmp_path: Path) -> None:
    directory, pool = tmp_path / "demos", ToyPool()
    settings = config(directory, "collect.num_episodes=12")
    writer = RawWriter(directory)
    collector = DemoCollector(settings, pool.spec.tasks, writer)
    run(settings, pool, collector, lambda: pool.num_steps == 2 * MAX_STEPS)
    kept = int(collector.kept.sum())
    collector.commit()
    writer.abort()
    assert 0 < kept < 12 and not directory.exists()
    again = DemoCollector(settings, TASKS, RawWriter(directory, resume=True))
    assert int(again.kept.sum()) == kept
    run(settings, ToyPool(), again)
    again.close({})
    assert len(index(directory)["episodes"]) == 12 and index(directory)["meta"]["stopped_early"] is False
    collect(config(tmp_path / "at_once", "collect.num_episodes=12"), ToyPool())
    assert contents(directory) == contents(tmp_path / "at_once")


def interrupted(directory: Path, policy: RecordedPolicy | None = None, *overrides: str) -> RawWriter:
    """A collection that was committed and not completed; returns the writer that continues it."""
    pool, writer = ToyPool(), RawWriter(directory)
    settings = config(directory, "collect.num_episodes=12", *overrides)
    collector = DemoCollector(settings, pool.spec.tasks, writer, policy)
    engine = None if policy is None else policy.policy
    run(settings, pool, collector, lambda: pool.num_steps == 2 * MAX_STEPS, engine)
    collector.commit()
    writer.abort()
    return RawWriter(directory, resume=True)


@pytest.mark.parametrize(
    "setting",
    [
        "env.max_episode_steps=5",
        "env.cameras=[{name: base, height: 24, width: 24}]",
        "env.reward_mode=sparse",
        "env.success_bonus=7",
        "env.include_state=true",
        "collect.noise_std=0.5",
        "collect.seed=7000000",
        "env.tasks=[reach-green]",
    ],
)
def test_an_interrupted_collection_is_not_continued_with_other_settings(setting: str, tmp_path: Path) -> None:
    writer = interrupted(tmp_path / "demos")
    key = setting.partition("=")[0]
    with raises_code("collect-other-settings", EmbodrlError, key):
        DemoCollector(config(tmp_path / "demos", "collect.num_episodes=12", setting), TASKS, writer)


def test_who_acts_in_an_interrupted_collection_stays_the_same(tmp_path: Path) -> None:
    settings = config(tmp_path, "collect.num_episodes=12")
    one, other = (RecordedPolicy("a run", Policy(), text) for text in ("one", "other"))  # pyright: ignore
    by_experts = interrupted(tmp_path / "experts")
    by_policy = interrupted(tmp_path / "policy", one, "collect.keep_failures=true")
    kept = config(tmp_path / "policy", "collect.num_episodes=12", "collect.keep_failures=true")
    for collecting, writer, policy in ((settings, by_experts, one), (kept, by_policy, None), (kept, by_policy, other)):
        with raises_code("collect-other-settings", EmbodrlError, "policy"):
            DemoCollector(collecting, TASKS, writer, policy)
    assert DemoCollector(kept, TASKS, by_policy, one).kept.any()


def test_where_a_collection_runs_and_how_long_may_change(tmp_path: Path) -> None:
    writer = interrupted(tmp_path / "demos")
    changed = ("collect.num_episodes=20", "env.num_processes=2", "runner.logger.console=off", "env.step_timeout_s=9")
    assert DemoCollector(config(tmp_path / "demos", *changed), TASKS, writer).kept.any()


def test_a_collection_of_an_earlier_version_is_compared_as_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(tmp_path / "demos", "collect.num_episodes=12")
    writer = interrupted(tmp_path / "demos")
    assert writer.progress is not None
    progress = {name: value for name, value in writer.progress.content.items() if name != "identity"}
    known = settings.collect.model_dump(mode="json", exclude={"num_episodes", "output_dir"})
    progress["settings"] = {"env": "toy", "tasks": ["reach-red"], **known}
    writer.progress = Fields(progress, "commit")
    assert DemoCollector(settings, TASKS, writer).kept.any()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with raises_code("collect-other-settings", EmbodrlError, "collect.noise_std"):
        DemoCollector(config(tmp_path / "demos", "collect.noise_std=0.5"), TASKS, writer)


class Policy:
    """An engine: chunk k has two actions, k/100 in one dimension and 0, 1 in another, of log-probs -k and -k-1."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.generators = []

    def row_generators(self, seeds):
        return None

    def decide(self, observation, decoding, generators=None):
        self.asked.append(observation.batch_size)
        chunk = len(self.asked)
        actions = np.zeros((observation.batch_size, 2, 7), np.float32)
        actions[:, :, 5], actions[:, 1, 4] = chunk / 100, 1.0  # the toy reads other dimensions
        logprobs = torch.zeros(actions.shape)
        logprobs[:, :, 0] = -torch.tensor([chunk, chunk + 1])
        return PolicyOutput(actions, logprobs, None, {})

    def act(self, observation, compute_values, generators=None):
        assert not compute_values
        return self.decide(observation, "greedy")


def record(settings: Config) -> tuple[DemoCollector, Policy]:
    writer, engine = RawWriter(Path(settings.collect.output_dir)), Policy()
    collector = DemoCollector(settings, TASKS, writer, RecordedPolicy("a run", engine))  # pyright: ignore
    run(settings, ToyPool(), collector, engine=engine)
    collector.close({})
    return collector, engine


@pytest.mark.parametrize("sample", [False, True])
def test_a_policy_is_recorded_step_by_step(tmp_path: Path, sample: bool) -> None:
    overrides = ("collect.keep_failures=true", "collect.num_episodes=4", f"collect.sample={str(sample).lower()}")
    _, engine = record(config(tmp_path, *overrides))
    (shard,) = tmp_path.glob("*.safetensors")
    columns = load_file(shard)
    # No episode ends before the step limit of 21: 11 chunks of two actions, the second of the last one is not used.
    assert engine.asked == [NUM_ENVS] * 11
    first = np.repeat(np.arange(1, 12), 2)[:MAX_STEPS]
    np.testing.assert_allclose(columns["actions"][:MAX_STEPS, 5], first / 100, rtol=1e-6)
    np.testing.assert_array_equal(columns["actions"][:MAX_STEPS, 4], np.arange(MAX_STEPS) % 2)
    np.testing.assert_array_equal(columns["actions"], columns[EXECUTED])
    assert (LOG_PROB in columns) == sample
    if sample:
        np.testing.assert_array_equal(columns[LOG_PROB][:MAX_STEPS], -first - np.arange(MAX_STEPS) % 2)
    content = index(tmp_path)
    assert content["meta"]["policy"] == "a run" and content["meta"]["policy_success_rate"] == {"reach-red": 0.0}
    assert load_demos(tmp_path).outcomes is not None


def test_a_policy_that_hardly_succeeds_is_recorded_only_with_its_failures(tmp_path: Path) -> None:
    with raises_code("policy-fails"):
        record(config(tmp_path, "collect.num_episodes=100"))


def losing() -> Callable[..., Toy]:
    """Return what makes simulators of which the first dies in its first chunk."""
    chunks = itertools.count()

    class Losing(Toy):
        def chunk_step(self, actions, active):
            if next(chunks) == 0:
                raise PeerGoneError
            return super().chunk_step(actions, active)

    return Losing


def test_attempts_that_are_lost_with_their_process_are_played_again(tmp_path: Path) -> None:
    settings = ("collect.keep_failures=true", "collect.num_episodes=8")
    collector = collect(config(tmp_path / "lost", *settings), ToyPool(losing()))
    collect(config(tmp_path / "whole", *settings), ToyPool())
    assert contents(tmp_path / "lost") == contents(tmp_path / "whole")
    assert (int(collector.tried[0]), int(collector.lost[0])) == (8, 0)


def test_attempts_whose_process_always_dies_are_given_up(tmp_path: Path) -> None:
    class Deadly(Toy):
        """Dies in episodes with the first seed."""

        def chunk_step(self, actions, active):
            if (active & (self.episode_seed == first)).any():
                raise PeerGoneError
            return super().chunk_step(actions, active)

    settings = config(tmp_path, "collect.keep_failures=true", "collect.num_episodes=2")
    first = settings.collect.seed
    collector = collect(settings, ToyPool(Deadly, num_envs=1))
    assert int(collector.lost[0]) == 1
    assert [episode["seed"] for episode in index(tmp_path)["episodes"]] == [first + 1, first + 2]


class Breaking(Toy):
    """Every episode plays well for a while, and is then lost to a fault; one in ``whole`` is not."""

    whole = 0
    ends = 0

    def chunk_step(self, actions, active):
        step = super().chunk_step(actions, active)
        for row in np.flatnonzero(step.done):
            self.ends += 1
            if not (self.whole and self.ends % self.whole == 0):
                step.reward[row] = np.nan
        return step


class BreakingOften(Breaking):
    whole = 5


@pytest.mark.parametrize("keep_failures", ["true", "false"])
def test_a_simulator_that_loses_nearly_every_episode_stops_the_collection(tmp_path: Path, keep_failures: str) -> None:
    settings = config(tmp_path, f"collect.keep_failures={keep_failures}", "collect.num_episodes=1000")
    with raises_code("too-many-faults", EnvError, "reach-red"):
        collect(settings, ToyPool(Breaking))


def test_a_simulator_that_loses_many_episodes_continues(tmp_path: Path) -> None:
    settings = config(tmp_path, "collect.keep_failures=true", "collect.num_episodes=20")
    collector = collect(settings, ToyPool(BreakingOften))
    assert int(collector.kept[0]) == 20 and int(collector.lost[0]) > 50


def failing_reset() -> Callable[..., Toy]:
    """Return what makes simulators that fail at the second reset of all, and so begin all episodes again."""
    resets = itertools.count()

    class FailingReset(Toy):
        def reset(self, seeds, task_ids, indices):
            if next(resets) == 1:
                raise PeerGoneError
            return super().reset(seeds, task_ids, indices)

    return FailingReset


def test_a_restart_in_a_reset_restarts_every_episode(tmp_path: Path) -> None:
    collect(config(tmp_path, "collect.keep_failures=true", "collect.num_episodes=8"), ToyPool(failing_reset()))
    assert max(episode["length"] for episode in index(tmp_path)["episodes"]) <= MAX_STEPS


def test_an_expert_that_always_fails_is_refused(tmp_path: Path) -> None:
    pool = ToyPool()
    pool.expert_actions = lambda: np.zeros((NUM_ENVS, pool.spec.action_dim), np.float32)
    settings = config(tmp_path, "collect.num_episodes=1000")
    with raises_code("expert-fails", EmbodrlError, "reach-red"):
        collect(settings, pool)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_dataset_does_not_depend_on_how_many_attempts_run_at_once(num_envs: int, tmp_path: Path) -> None:
    settings = ("collect.noise_fraction=0.5", "collect.noise_std=0.2", "collect.num_episodes=7")
    tasks = ("reach-red", "reach-green")
    found = {}
    for size in (NUM_ENVS, num_envs):
        chosen = config(tmp_path / str(size), *settings)
        chosen = chosen.model_copy(update={"env": chosen.env.model_copy(update={"tasks": tasks})})
        collector = collect(chosen, ToyPool(Thirds, tasks, num_envs=size))
        found[size] = (*contents(tmp_path / str(size)), collector.tried.tolist(), collector.solved.tolist())
    assert found[num_envs] == found[NUM_ENVS]
    entries, first = found[NUM_ENVS][0], config(tmp_path).collect.seed
    # Of each task the first attempts with every third seed, in the order of their numbers: 7 episodes over 2 tasks.
    expected = [(3 * place, tasks[place % 2]) for place in range(7)]
    assert [(one["seed"] - first, one["task"]) for one in entries] == expected


def test_outcomes_are_put_back_in_order_and_numbers_without_a_use_are_passed_over() -> None:
    queue, wanted = AttemptQueue(3, most=3), {0, 1}
    assert queue.take(9, lambda number: number % 2 in wanted) == [3, 4, 5], "at most three are open"
    assert queue.take(1, lambda number: True) == [] and queue.waits
    queue.put(Attempted(4, True))
    assert queue.pop(lambda number: True) is None, "the outcome of attempt 3 is not known"
    queue.put(Attempted(3, None))
    queue.put(Attempted(3, True))  # played again after a restart: the first outcome counts
    assert queue.pop(lambda number: True) == Attempted(3, None)
    assert queue.pop(lambda number: True) == Attempted(4, True)
    assert queue.first == 5
    # Odd numbers have enough episodes: attempt 5 is not waited for, and not handed out again.
    assert queue.pop(lambda number: number % 2 == 0) is None and not queue.waits
    assert queue.take(2, lambda number: number % 2 == 0) == [6, 8]
    queue.put(Attempted(5, True))
    assert queue.first == 6


@pytest.mark.parametrize("include_state", [False, True])
def test_the_state_before_each_action_is_kept(tmp_path: Path, include_state: bool) -> None:
    collect(config(tmp_path, "collect.num_episodes=4"), ToyPool(include_state=include_state))
    demos = load_demos(tmp_path)
    assert demos.state.shape == (len(demos.actions), 2 if include_state else 0)
    if include_state:  # without noise each state is the one before, moved by the expert's action
        within = demos.episode[1:] == demos.episode[:-1]
        moved = np.clip(demos.state[:-1] + 0.15 * demos.actions[:-1, :2], -1, 1)
        np.testing.assert_allclose(demos.state[1:][within], moved[within], atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "key", "says", "hint"),
    [
        (("env=gymnasium_reacher",), "env.env_type", "gymnasium has no scripted experts", "choose an environment"),
        (("env=libero_goal",), "env.tasks", "no scripted expert for open_the_middle_drawer", "tasks that have one"),
        (("env=maniskill_poke",), "env.tasks", "no scripted expert for PokeCube-v1", "tasks that have one"),
    ],
)
def test_tasks_without_an_expert_are_refused(
    arguments: tuple[str, ...], key: str, says: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = dataclasses.replace(ENVS.entry("maniskill"), expert_tasks=("PushCube-v1", "PullCube-v1"))
    monkeypatch.setitem(ENVS._entries, "maniskill", some)
    wrong = (*arguments, "collect.fps=0")
    with pytest.raises(ConfigError) as caught:
        load_config(list(wrong), verb="collect")
    problems = {problem.key: problem for problem in caught.value.problems}
    assert set(problems) == {key, "collect.fps"}
    assert says in problems[key].message and hint in problems[key].hint
    assert ("pick_up_the_milk" if "libero_goal" in arguments[0] else "PushCube-v1, PullCube-v1") in problems[
        key
    ].allowed
    if key == "env.env_type":
        assert "metaworld (all tasks)" in problems[key].allowed
    load_config(list(arguments))


@pytest.mark.parametrize("preset", ["maniskill_mix", "metaworld", "toy"])
def test_tasks_with_an_expert_are_not(preset: str) -> None:
    load_config([f"env={preset}"], verb="collect")


def test_the_tasks_that_have_experts_are_known() -> None:
    assert ENVS.entry("maniskill").expert_tasks is None and set(EXPERTS) == set(ENVS.entry("maniskill").tasks)
