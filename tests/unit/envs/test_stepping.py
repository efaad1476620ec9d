"""The stepping that all simulators share, with a simulator whose answers are scripted."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.envs.simulator import Replayed, SimStep, Simulator, SimulatorVectorEnv
from embodrl.envs.stepping import EpisodeRules, next_seed
from embodrl.errors import EnvError
from embodrl.processes.codec import decode
from embodrl.workers.env import check_environments

CAMERA = {"name": "top", "height": 2, "width": 2}
BOTH = np.ones(2, np.bool_)


class Script(Simulator):
    """Rewards are the actions; success, failure and a limit of its own come after so many steps."""

    action_low, action_high, state_dim, instruction = (-1.0,), (1.0,), 1, "follow"

    def __init__(self, task: str, events: dict[str, int]) -> None:
        self.task, self.events, self.drawn, self.count, self.drift = task, events, 0, 0, 0.0
        self.instruction = f"follow {task}"

    def reset(self, seed: int) -> None:
        self.seed, self.count = seed, 0

    def step(self, action: np.ndarray) -> SimStep:
        self.count += 1
        happens = {name: self.count == at for name, at in self.events.items()}
        return SimStep(float(action[0]) + self.drift, **{"success": False, **happens})

    def first_reward(self) -> float:
        return 0.25

    def images(self) -> np.ndarray:
        self.drawn += 1
        return np.full((1, 2, 2, 3), self.count, np.uint8)

    def proprioception(self) -> np.ndarray:
        return np.array([self.seed % 100 + self.count], np.float32)


class Waiting(Script):
    """Does the same, but waits at every reset and step; counts those that wait together."""

    now = most = 0

    async def wait(self) -> None:
        Waiting.now += 1
        Waiting.most = max(Waiting.most, Waiting.now)
        await asyncio.sleep(0)  # until all others have begun
        Waiting.now -= 1

    async def reset(self, seed: int) -> None:
        await self.wait()
        super().reset(seed)

    async def step(self, action: np.ndarray) -> SimStep:
        await self.wait()
        if action[0] > 90:
            raise ConnectionError("no answer")
        return super().step(action)


class Scripts(SimulatorVectorEnv):
    def __init__(self, tasks: tuple[str, ...] = ("a", "b"), replayed: bool = False, **options: Any) -> None:
        self.made: list[Script] = []
        self.kind = options.pop("kind", Script)
        self.events = options.pop("events", {})
        self.replayed = replayed
        super().__init__(2, tasks, [CAMERA], EpisodeRules(**options), include_state=True)

    def make_simulator(self, task: str) -> Simulator:
        self.made.append(self.kind(task, self.events))
        return Replayed(self.made[-1]) if self.replayed else self.made[-1]


def begin(env: Scripts, *tasks: int) -> Any:
    return env.reset(np.array([3, 4]), np.array(tasks or (0, 0), np.int32), np.arange(2))


def chunk(*values: float) -> np.ndarray:
    return np.tile(np.array(values, np.float32)[None, :, None], (2, 1, 1))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("dense", [0.5, 1.0 + 2.0, 0.75]),
        ("dense_delta", [0.25, 0.5 + 2.0, -0.25]),  # from 0.25
        ("sparse", [0.0, 2.0, 0.0]),
    ],
)
def test_reward_modes(mode: str, expected: list[float]) -> None:
    env = Scripts(reward_mode=mode, success_bonus=2.0, ignore_terminations=True, events={"success": 2})
    begin(env)
    step = env.chunk_step(chunk(0.5, 1.0, 0.75), BOTH)
    np.testing.assert_array_equal(step.reward, [expected] * 2)
    np.testing.assert_array_equal(step.episode_return, [sum(expected)] * 2)
    assert step.success.all() and not step.done.any()


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        # gamma phi' - phi at the end of a chunk, phi' - phi within; phi is 0.25 at first, 0 once terminated
        ({}, [0.25, 0.5, -0.25 - 0.1 * 0.75, 0.25, -0.25 - 0.1 * 0.75]),
        ({"discounts_actions": True}, [0.25 - 0.05, 0.5 - 0.1, -0.25 - 0.075, 0.25 - 0.1, -0.25 - 0.075]),
        ({"max_episode_steps": 4}, [0.25, 0.5, -0.25 - 0.1 * 0.75, 0.25 - 0.1, 0.0]),
        ({"events": {"success": 4}, "success_bonus": 2.0}, [0.25, 0.5, -0.25 - 0.1 * 0.75, 2.0 - 0.75, 0.0]),
    ],
)
def test_potentials_are_discounted_per_reward_step_and_end_with_the_episode(
    rules: dict[str, Any], expected: list[float]
) -> None:
    env = Scripts(**{"reward_mode": "potential", "shaping_gamma": 0.9, "auto_reset": False} | rules)
    begin(env)
    first = env.chunk_step(chunk(0.5, 1.0, 0.75), BOTH).reward
    second = env.chunk_step(chunk(1.0, 0.75), BOTH).reward
    np.testing.assert_allclose(np.concatenate([first, second], 1)[0], expected, rtol=1e-6)


def test_going_up_and_back_earns_nothing_but_with_discounted_potentials() -> None:
    """Return from the start of a walk over potentials up and back; D10 of the audit: 0.015 a cycle at 0.97."""
    gamma, walk = 0.97, (0.75, 0.25, 0.75, 0.25)

    def discounted(mode: str) -> float:
        env = Scripts(reward_mode=mode, shaping_gamma=gamma)
        begin(env)
        return sum(gamma**i * float(env.chunk_step(chunk(v), BOTH).reward[0, 0]) for i, v in enumerate(walk))

    # phi of the end remains, discounted: what V(end) is lower by
    assert discounted("potential") == pytest.approx(gamma**4 * 0.25 - 0.25)
    assert discounted("dense_delta") == pytest.approx(0.5 * (1 - gamma) * (1 + gamma**2))


@pytest.mark.parametrize("mode", ["dense", "dense_delta", "sparse"])
@pytest.mark.parametrize("replayed", [False, True])
def test_the_reward_of_a_simulation_that_has_diverged_is_no_number(mode: str, replayed: bool) -> None:
    env = Scripts(reward_mode=mode, replayed=replayed, events={"diverged": 2})
    begin(env)
    step = env.chunk_step(chunk(0.5, 1.0, 0.75), BOTH)
    np.testing.assert_array_equal(np.isnan(step.reward), [[False, True, False]] * 2)
    begin(env)
    assert np.isfinite(env.chunk_step(chunk(0.5), np.array([True, False])).reward).all()


@pytest.mark.parametrize("mode", ["dense", "dense_delta", "sparse"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_no_number_is_reported_even_where_it_counts_for_nothing(mode: str, value: float) -> None:
    env = Scripts(reward_mode=mode)
    begin(env)
    actions = chunk(0.5, 1.0, 0.75)
    actions[1, 1] = value  # which the simulator returns
    reward = env.chunk_step(actions, np.array([True, True])).reward
    assert np.isfinite(reward[0]).all() and np.isfinite(reward[1, 0]) and np.isnan(reward[1, 1])


@pytest.mark.parametrize(
    ("events", "ignore", "terminated", "truncated"),
    [
        ({"success": 2}, False, 2, 0),
        ({"success": 2}, True, 0, 3),
        ({"terminated": 2}, False, 2, 0),
        ({"terminated": 2}, True, 0, 3),
        ({"truncated": 2}, False, 0, 2),
        ({"truncated": 2}, True, 0, 2),
        ({"success": 2, "truncated": 2}, False, 2, 0),
    ],
)
def test_what_ends_an_episode_and_when(events: dict[str, int], ignore: bool, terminated: int, truncated: int) -> None:
    env = Scripts(max_episode_steps=3, ignore_terminations=ignore, auto_reset=False, events=events)
    begin(env)
    step = env.chunk_step(chunk(0, 0, 0, 0), BOTH)
    for found, at in ((step.terminated, terminated), (step.truncated, truncated)):
        np.testing.assert_array_equal(found, [np.arange(1, 5) == at] * 2)
    end = terminated or truncated
    np.testing.assert_array_equal(step.valid, [np.arange(1, 5) <= end] * 2)
    assert step.episode_length.tolist() == [end] * 2
    assert (step.final_observation is not None) == bool(truncated)
    assert all(sim.count == end for sim in env.made)  # nothing is simulated beyond


def test_pictures_are_drawn_only_where_the_policy_looks() -> None:
    env = Scripts(max_episode_steps=5)
    begin(env)
    drawn = [sim.drawn for sim in env.made]
    step = env.chunk_step(chunk(0, 0, 0), np.array([True, False]))
    assert [sim.drawn - before for sim, before in zip(env.made, drawn, strict=True)] == [1, 0]
    assert step.observation.images[0, 0, 0, 0, 0] == 3
    step = env.chunk_step(chunk(0, 0, 0), np.array([True, False]))  # the last picture, and that of the next episode
    assert [sim.drawn - before for sim, before in zip(env.made, drawn, strict=True)] == [3, 0]
    assert step.final_observation is not None and step.final_observation.images[0].max() == 5
    assert step.observation.images[0].max() == 0
    assert env.made[0].seed == next_seed(3)


def test_simulators_are_lent_to_whoever_plays_their_task() -> None:
    env = Scripts()
    assert begin(env, 0, 1).instruction == ["follow a", "follow b"]
    assert len(env.made) == 2
    begin(env, 1, 0)
    assert len(env.made) == 2
    begin(env, 1, 1)
    begin(env, 0, 0)
    assert sorted(sim.task for sim in env.made) == ["a", "a", "b", "b"]
    assert begin(env, 1, 0).instruction == ["follow b", "follow a"]


def test_no_more_simulators_are_built_than_play() -> None:
    env = Scripts(tasks=("a", "b", "c"))
    assert [sim.task for sim in env.made] == ["a"]  # which says what all are like
    begin(env, 1, 2)
    assert [sim.task for sim in env.made] == ["a", "b", "c"]
    begin(env, 0, 0)
    assert [sim.task for sim in env.made] == ["a", "b", "c", "a"]
    assert [sim.task for sim in Scripts(tasks=("a",)).made] == ["a", "a"]  # both will play it


def test_rows_that_have_never_played_have_a_state_and_no_simulator() -> None:
    env, other = Scripts(replayed=True), Scripts(replayed=True)
    env.reset(np.array([5]), np.array([1], np.int32), np.array([0]))
    state = env.get_state()
    assert decode(state)["sim"][1] is None
    other.set_state(state)
    assert other.get_state() == state
    other.set_row_state(1, env.get_row_state(1))
    assert [sim.task for sim in other.made] == ["a", "b"]
    for each in (env, other):
        each.reset(np.array([6]), np.array([0], np.int32), np.array([1]))
    expected, found = (each.chunk_step(chunk(0.3), BOTH) for each in (env, other))
    np.testing.assert_array_equal(found.observation.state, expected.observation.state)
    assert found.observation.instruction == ["follow b", "follow a"]


def test_a_replayed_simulator_continues_where_it_was() -> None:
    env, other = Scripts(replayed=True), Scripts(replayed=True)
    begin(env, 0, 1)
    env.chunk_step(chunk(0.1, 0.2), BOTH)
    state = env.get_state()
    assert decode(state)["sim"][1]["actions"].shape == (2, 1)
    other.set_state(state)
    assert other.get_state() == state
    assert {sim.task: sim.count for sim in other.made if sim.count} == {}  # a reset may follow
    expected, found = (each.chunk_step(chunk(0.3), BOTH) for each in (env, other))
    np.testing.assert_array_equal(found.observation.state, expected.observation.state)
    np.testing.assert_array_equal(found.episode_return, expected.episode_return)
    assert found.episode_length.tolist() == [3, 3] and found.observation.instruction[1] == "follow b"


def test_a_simulator_that_goes_another_way_is_refused() -> None:
    env = Scripts(replayed=True)
    begin(env)
    env.chunk_step(chunk(0.1, 0.2), BOTH)
    env.set_state(env.get_state())
    env.made[1].drift = 0.5
    with raises_code("env-not-deterministic", EnvError, "2", "4"):
        env.chunk_step(chunk(0.3), BOTH)


def test_a_simulator_without_a_state_says_so() -> None:
    env = Scripts()
    begin(env)
    with raises_code("env-state-unsupported", EnvError) as refused:
        env.get_state()
    assert "Replayed" in refused.value.hint
    assert "get_state" in str(env.call("check_state", {}))
    assert Scripts(replayed=True).call("check_state", {}) == ""


def test_a_reset_that_ignores_its_seed_and_an_empty_instruction_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Scripts()
    assert env.call("check_episodes", {}) == []
    for find in ("proprioception", "images"):
        drawn = iter((0, 40))
        shape, dtype = ((1,), np.float32) if find == "proprioception" else ((1, 2, 2, 3), np.uint8)
        with monkeypatch.context() as patch:
            patch.setattr(env.made[0], find, lambda d=drawn, s=shape, t=dtype: np.full(s, next(d), t))
            assert env.call("check_episodes", {}) == ["seed-ignored"]
            patch.setattr(env.made[0], "is_seeded", True)
            patch.setattr(env.made[0], "instruction", "")
            assert env.call("check_episodes", {}) == ["instruction-empty"]


class _Answers:
    """An EnvPool whose environments ignore seeds and have no instruction."""

    def call(self, method: str, *, restart: bool) -> list[object]:
        return [["seed-ignored", "instruction-empty"]] if method == "check_episodes" else [""]


def test_groups_of_episodes_need_seeds(caplog: pytest.LogCaptureFixture) -> None:
    pool: Any = _Answers()
    check_environments(load_config(["env=toy"]).config, pool)
    assert "start different episodes" in caplog.text and "instruction" in caplog.text
    with raises_code("seed-ignored", EnvError):
        check_environments(load_config(["env=toy", "algorithm=grpo"]).config, pool)


class _Stateless(_Answers):
    """An EnvPool whose environments can't tell their state."""

    def call(self, method: str, *, restart: bool) -> list[object]:
        return ["", "Robot has no get_state"] if method == "check_state" else [[], []]


def test_only_offloading_needs_states_and_synchronous_training_warns(caplog: pytest.LogCaptureFixture) -> None:
    pool: Any = _Stateless()
    check_environments(load_config(["env=toy", "runner.max_staleness=1"]).config, pool)
    check_environments(load_config(["env=toy"]).config, pool, training=False)
    assert not caplog.text
    check_environments(load_config(["env=toy"]).config, pool)
    assert "Robot has no get_state" in caplog.text and not pool.keeps_state
    with raises_code("env-state-unsupported", EnvError):
        check_environments(load_config(["env=toy", "env.enable_offload=true"]).config, pool)


def test_experts_act_only_where_they_have_begun() -> None:
    env = Scripts()
    begin(env)
    assert env.expert_actions().tolist() == [[0.0], [0.0]]
    with raises_code("expert-missing", EnvError):
        env.expert_reset([0])


@pytest.mark.parametrize("bounds", [((-2.0,), (2.0,)), ((0.0,), (1.0,)), ((-float("inf"),), (float("inf"),))])
def test_actions_of_other_bounds_are_refused(monkeypatch: pytest.MonkeyPatch, bounds: Any) -> None:
    """Policies and noise know -1 to 1 alone."""
    monkeypatch.setattr(Script, "action_low", bounds[0])
    monkeypatch.setattr(Script, "action_high", bounds[1])
    with raises_code("action-bounds", EnvError, "0", "-1", "1") as caught:
        Scripts()
    assert "map them to its own in step" in caught.value.hint


@pytest.mark.parametrize("replayed", [False, True])
def test_simulators_that_wait_wait_together_and_do_the_same(replayed: bool) -> None:
    Waiting.most = 0
    plain, waiting = (Scripts(replayed=replayed, kind=kind, success_bonus=2.0) for kind in (Script, Waiting))
    for env in (plain, waiting):
        begin(env)
    assert Waiting.most == 2
    Waiting.most = 0
    for values in ((0.5, 1.0), (0.25, -0.5)):
        expected, found = (env.chunk_step(chunk(*values), BOTH) for env in (plain, waiting))
        assert np.array_equal(expected.reward, found.reward) and expected.reward.any()
        assert np.array_equal(expected.observation.state, found.observation.state)
    assert Waiting.most == 2 and Waiting.now == 0
    if replayed:
        restored = Scripts(replayed=True, kind=Waiting, success_bonus=2.0)
        restored.set_state(waiting.get_state())
        expected, found = (env.chunk_step(chunk(0.75), BOTH) for env in (plain, restored))
        assert np.array_equal(expected.observation.state, found.observation.state)


def test_what_a_waiting_simulator_raises_is_raised_once_all_have_ended() -> None:
    env = Scripts(kind=Waiting)
    begin(env)
    actions = chunk(0.5)
    actions[0] = 99
    with pytest.raises(ConnectionError):
        env.chunk_step(actions, BOTH)
    assert Waiting.now == 0 and env.made[1].count == 1
