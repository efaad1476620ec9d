"""A robot's time and limits on a clock that tests move, and a robot with lerobot's interface."""

import logging
from typing import ClassVar

import numpy as np
import pytest
from expect import raises_code

from embodrl.config.schema.real_time import RealTimeConfig
from embodrl.envs.real_time.clock import Clock, Pacer
from embodrl.envs.real_time.safety import CommandLimits
from embodrl.envs.robot.env import RobotVectorEnv
from embodrl.envs.toy.env import ToyVectorEnv

ROW = np.zeros(1, np.int64)
FIRST = np.zeros(1, np.int32)
ACTIVE = np.ones(1, np.bool_)
RIGHT = np.array([1, 0, 0, 0, 0, 0, 0], np.float32)


class FakeClock(Clock):
    """Time passes in ``sleep`` alone; ``events`` are called at the times that they have."""

    def __init__(self, events=()) -> None:
        super().__init__()
        self.time, self.events = 0.0, list(events)

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds
        while self.events and self.events[0][0] <= self.time:
            self.events.pop(0)[1]()


def timed(env, clock=None, **settings):
    env.set_real_time(RealTimeConfig(**settings).model_dump(mode="json"))
    env.real_time.pacer.clock = clock or FakeClock()
    return env


def toy(clock=None, steps=20, **settings):
    return timed(
        ToyVectorEnv(1, ["reach-red"], 8, steps, include_state=True, auto_reset=False),
        clock,
        **{"control_hz": 10.0, **settings},
    )


def reset(env, seed=3):
    return env.reset(np.array([seed]), FIRST, ROW)


def act(env, *actions):
    return env.chunk_step(np.array([actions], np.float32), ACTIVE)


# -- time -----------------------------------------------------------------------------------------------------------


def test_the_rate_is_held_and_a_late_command_is_counted():
    clock = FakeClock()
    pacer = Pacer(clock, 10.0)
    pacer.begin()
    for thinking in (0.02, 0.05, 0.17, 0.03):
        clock.time += thinking
        pacer.command()
        pacer.wait()
    # Observed at 0, 0.1, 0.2, 0.37 (late), 0.47; commanded at 0.02, 0.15, 0.37, 0.4.
    assert clock.time == pytest.approx(0.47)
    status = pacer.status()
    assert status["missed_deadlines"] == 1 and status["periods"] == 3
    assert status["period_p50_s"] == pytest.approx(0.13) and status["period_max_s"] == pytest.approx(0.22)
    assert pacer.status() == {"periods": 0, "missed_deadlines": 0}


def test_each_action_of_a_chunk_has_its_time():
    clock = FakeClock()
    env = toy(clock)
    reset(env)
    act(env, RIGHT, RIGHT, RIGHT)
    assert clock.time == pytest.approx(0.3) and env.spec.control_hz == 10
    assert env.call("status", {})["periods"] == 2


def test_a_fast_clock_has_more_seconds():
    assert Clock(1e6).now() / Clock(1.0).now() == pytest.approx(1e6, rel=1e-2)


# -- what is seen -----------------------------------------------------------------------------------------------------


def test_observations_are_as_old_as_the_latency():
    plain, late = toy(), toy(latency_s=0.2)
    states = [reset(plain).state, *(act(plain, RIGHT * way).observation.state for way in (1, -1, 0.5, 0.2))]
    seen = [reset(late).state, *(act(late, RIGHT * way).observation.state for way in (1, -1, 0.5, 0.2))]
    np.testing.assert_array_equal(np.stack(seen), np.stack([states[i] for i in (0, 0, 0, 1, 2)]))
    reset(late)
    np.testing.assert_array_equal(act(late, RIGHT, -RIGHT, RIGHT * 0.5).observation.state, states[1])  # within a chunk


def test_lost_pictures_are_the_last_ones_and_the_state_is_not_lost():
    env = toy(dropped_frames=0.999)
    first = reset(env)
    step = act(env, -RIGHT)
    assert (step.observation.images == first.images).all() and (step.observation.state != first.state).any()
    assert env.call("status", {})["dropped_frames"] == 1
    assert (reset(env, 4).images != first.images).any()  # an episode begins with a picture of its own


def test_noise_is_that_of_the_seeds():
    def run(episode, **settings):
        env = toy(state_noise=0.1, action_noise=0.2, **settings)
        return [reset(env, episode).state, act(env, RIGHT).observation.state]

    np.testing.assert_array_equal(run(3), run(3))
    plain = toy()
    clean = [reset(plain).state, act(plain, RIGHT).observation.state]
    for other in (run(3, seed=1), clean):
        assert all((a != b).any() for a, b in zip(run(3), other, strict=True))


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def said(tmp_path):
    def say(name):
        (tmp_path / name).touch()

    say.directory = str(tmp_path)
    say.gone = lambda name: not (tmp_path / name).exists()
    say.take_back = lambda name: (tmp_path / name).unlink()
    return say


def test_an_emergency_stop_sends_nothing_and_holds_until_it_is_taken_back(said, caplog):
    clock = FakeClock([(5.0, lambda: said.take_back("stop"))])
    env = toy(clock, control_dir=said.directory)
    reset(env)
    before = env.position.copy()
    said("stop")
    with caplog.at_level(logging.WARNING):
        step = act(env, RIGHT, RIGHT)
    assert step.terminated.tolist() == [[True, False]] and not step.success[0] and step.reward[0, 0] == 0
    assert (env.position == before).all() and "emergency stop" in caplog.text
    assert env.call("status", {})["stops"] == 1
    reset(env)
    assert clock.time >= 5.0 and said.gone("stop")


def test_a_pause_is_no_missed_deadline(said):
    clock = FakeClock([(7.0, lambda: said.take_back("pause"))])
    env = toy(clock, control_dir=said.directory)
    reset(env)
    act(env, RIGHT)
    said("pause")
    act(env, RIGHT)
    status = env.call("status", {})
    assert clock.time >= 7.0 and status["pauses"] == 1
    assert status["missed_deadlines"] == 0 and status["periods"] == 0  # the two commands are not of one interval


@pytest.mark.parametrize("word", ["success", "failure"])
def test_a_person_ends_an_episode(said, word):
    env = toy(control_dir=said.directory)
    said(word)
    reset(env)
    assert not act(env, RIGHT * 0).terminated.any()  # what was said of the episode before is over
    said(word)
    step = act(env, RIGHT * 0)
    assert step.terminated.all() and step.success[0] == (word == "success") and said.gone(word)


def test_an_episode_begins_when_a_person_says_so(said):
    clock = FakeClock([(30.0, lambda: said("ready"))])
    reset(toy(clock, control_dir=said.directory, wait_for_person=True))
    assert clock.time >= 30.0 and said.gone("ready")


# -- limits -----------------------------------------------------------------------------------------------------------


def test_commands_are_kept_within_each_limit_and_counted():
    limits = CommandLimits(low=[-1.0, 0.0], high=[1.0, 5.0], max_step=[0.5], max_velocity=[4.0, 100.0], period_s=0.1)
    previous = np.array([0.9, 4.8])
    allowed = limits.apply(np.array([2.0, 5.2]), previous)
    np.testing.assert_allclose(allowed, [1.0, 5.0])  # no longer further than 0.5 away, nor than 0.4
    assert limits.counts == {"position": 1, "step": 0, "velocity": 0, "not_finite": 0}
    np.testing.assert_allclose(limits.apply(np.array([0.0, 4.8]), previous), [0.5, 4.8])
    within = np.array([0.8, 4.9])
    assert limits.apply(within, previous) is not None and (limits.counts["step"], limits.counts["velocity"]) == (1, 1)
    assert limits.apply(np.array([np.nan, 0.0]), previous) is None and limits.counts["not_finite"] == 1
    assert limits.apply(within, np.array([np.nan, 0.0])) is None and limits.counts["not_finite"] == 2
    # From outside of its range a robot goes back in steps.
    np.testing.assert_allclose(limits.apply(np.array([3.0, 4.8]), np.array([3.0, 4.8])), [2.6, 4.8])


def test_a_command_beyond_a_limit_stops_where_it_should():
    env = toy(safety={"max_step": (0.5,), "on_violation": "stop"})
    reset(env)
    before = env.position.copy()
    assert not act(env, RIGHT * 0.4).done[0]
    assert act(env, RIGHT).done[0]
    np.testing.assert_allclose(env.position - before, [[0.4 * 0.15, 0]], atol=1e-6)
    status = env.call("status", {})
    assert status["stops"] == 1 and status["limited_step"] == 1


# -- robots -----------------------------------------------------------------------------------------------------------

CAMERA = {"name": "front", "height": 4, "width": 4, "fov_rad": None, "eye": None, "target": None}
MADE = []


class Stub:
    """What is used of lerobot's Robot, with two joints that go where they are sent."""

    observation_features: ClassVar = {"a.pos": float, "b.pos": float, "current": float, "front": (8, 8, 3)}
    action_features: ClassVar = {"a.pos": float, "b.pos": float}

    def __init__(self, at=(10.0, 50.0), is_calibrated=True):
        self.at, self.is_calibrated = dict(zip(self.action_features, at, strict=True)), is_calibrated
        self.sent, self.fails, self.is_connected = [], 0, False
        MADE.append(self)

    def connect(self, calibrate):
        assert not calibrate
        self.is_connected = True

    def disconnect(self):
        self.is_connected = False

    def get_observation(self):
        if self.fails:
            self.fails -= 1
            raise TimeoutError("no frame")
        return {**self.at, "current": 0.25, "front": np.full((8, 8, 3), 7, np.uint8)}

    def send_action(self, action):
        self.at = dict(action)
        self.sent.append(list(action.values()))


def go_home(robot, seed):
    robot.at = {"a.pos": 0.0, "b.pos": 50.0}


def is_there(observation):
    return observation["a.pos"] > 30


def robot(settings=None, clock=None, **arguments):
    ranges = {"action_low": [-100.0, 0.0], "action_high": [100.0, 100.0]}
    names = {"robot": f"{__name__}:Stub", "reset_fn": f"{__name__}:go_home", "success_fn": f"{__name__}:is_there"}
    others = {"cameras": [CAMERA], "instruction": "go", "auto_reset": False}
    env = RobotVectorEnv(1, ["task"], **{**names, **ranges, **others, **arguments})
    return timed(env, clock, **{"control_hz": 10.0, **(settings or {})}), MADE[-1]


def test_after_a_pause_relative_actions_begin_where_the_robot_is(said):
    clock = FakeClock([(7.0, lambda: (MADE[-1].at.update({"a.pos": -40.0}), said.take_back("pause")))])
    env, stub = robot({"control_dir": said.directory}, clock, relative_actions=True, max_change=0.2)
    reset(env)
    act(env, [1.0, 0.0])
    said("pause")
    act(env, [1.0, 0.0])  # meanwhile a person has moved it to -40
    np.testing.assert_allclose(stub.sent, [[20, 50], [-20, 50]])


def test_an_emergency_stop_holds_before_the_scene_is_reset(said):
    at = []
    clock = FakeClock([(5.0, lambda: (at.append(MADE[-1].at["a.pos"]), said.take_back("stop")))])
    env, stub = robot({"control_dir": said.directory}, clock)
    said("stop")
    reset(env)
    assert at == [10.0] and stub.at["a.pos"] == 0.0  # where it began, and where the reset script moved it


def test_actions_beyond_1_stay_within_the_range():
    env, stub = robot()
    reset(env)
    act(env, [3.0, -3.0])
    assert stub.sent[-1] == [100.0, 0.0]


def test_actions_are_commands_in_units_of_the_robot():
    env, stub = robot()
    seen = reset(env)
    assert seen.state[0].tolist() == [0.0, 50.0, 0.25] and (seen.images == 7).all() and seen.images.shape[2] == 4
    step = act(env, [0.2, -0.5])
    np.testing.assert_allclose(stub.sent, [[20.0, 25.0]], rtol=1e-6)
    np.testing.assert_array_equal(step.observation.state[0], np.float32([*stub.sent[0], 0.25]))
    assert not step.done[0] and act(env, [0.4, 0.0]).success[0]
    env.close()
    assert not stub.is_connected


def test_relative_actions_change_the_last_command_within_the_range():
    env, stub = robot(relative_actions=True, max_change=0.2, state_keys=["current"])
    assert reset(env).state[0].tolist() == [0.25]
    act(env, [1.0, 1.0], [0.5, 0.0])
    np.testing.assert_allclose(stub.sent, [[20, 60], [30, 60]])
    act(env, [0.0, 1.0], [0, 1.0], [0, 1.0], [0, 1.0], [0, 1.0])
    assert stub.sent[-1][1] == 100


@pytest.mark.parametrize("relative", [False, True])
def test_limits_are_in_units_and_begin_where_the_robot_is(relative):
    env, stub = robot({"safety": {"max_step": (5.0,)}}, relative_actions=relative)
    reset(env)
    act(env, [1.0, 1.0], [1.0, 1.0])
    np.testing.assert_allclose(stub.sent, [[5, 55], [10, 60]], atol=1e-4)
    assert env.call("status", {})["limited_step"] == 2


def test_a_camera_may_fail_for_a_while():
    env, stub = robot({"max_dropped_frames": 2})
    reset(env)
    stub.fails = 2
    act(env, [0.1, 0.0], [0.1, 0.0])
    act(env, [0.1, 0.0])
    assert env.call("status", {})["dropped_frames"] == 2
    stub.fails = 3
    with raises_code("robot-no-observation"):
        act(env, [0.1, 0.0], [0.1, 0.0], [0.1, 0.0])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"action_low": [0.0], "action_high": [1.0]}, "robot-actions"),
        ({"state_keys": ["c.pos"]}, "robot-observation"),
        ({"cameras": [{**CAMERA, "name": "wrist"}]}, "robot-observation"),
        ({"robot_settings": {"is_calibrated": False}}, "robot-settings"),
    ],
)
def test_a_robot_that_does_not_fit_is_refused(arguments, code):
    with raises_code(code):
        robot(**arguments)
