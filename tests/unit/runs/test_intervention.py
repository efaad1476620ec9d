"""Who intervenes from a policy: a stand-in by the rule of HG-DAgger, and a person at a keyboard or a space mouse."""

import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from expect import raises_code

from embodrl.config.schema import DaggerConfig
from embodrl.data.demos import ACTED_BY, Demos
from embodrl.data.imitation import corrected_frames
from embodrl.data.replay import EXPERT, HUMAN, POLICY
from embodrl.envs.real_time.controls import Controls
from embodrl.envs.real_time.devices import SpaceMouse, open_device, open_space_mouse, wanted_action
from embodrl.envs.real_time.keyboard import HOLD_S, Keyboard
from embodrl.errors import EnvWorkerDied
from embodrl.runs.intervention import Gate, Person


class Expert:
    """Wants 1 everywhere, and is lost where ``lost`` is set."""

    lost = False

    def begin(self, rows):
        self.begun = rows.tolist()

    def actions(self, observation):
        if self.lost:
            raise EnvWorkerDied("lost")
        return np.ones((2, 3), np.float32)


def corrected(gate, *actions):
    return [gate.correct(None, np.full((2, 3), [[near], [far]], np.float32))[1].tolist() for near, far in actions]


def test_the_stand_in_takes_over_for_a_while_where_the_policy_is_far_off():
    expert = Expert()
    gate = Gate(DaggerConfig(gate_threshold=0.5, gate_steps=2), 2, expert.actions, expert.begin)
    gate.begin(np.array([0, 1]))
    actions, acted_by = gate.correct(None, np.array([[0.9] * 3, [0.0] * 3], np.float32))
    np.testing.assert_allclose(actions, [[0.9] * 3, [1.0] * 3])
    assert acted_by.tolist() == [POLICY, EXPERT] and expert.begun == [0, 1]
    assert corrected(gate, (0.9, 0.9), (0.9, 0.9)) == [[POLICY, EXPERT], [POLICY, POLICY]]
    assert corrected(gate, (0.9, 0.0)) == [[POLICY, EXPERT]]
    gate.begin(np.array([1]))
    assert corrected(gate, (0.9, 0.9)) == [[POLICY, POLICY]]  # in a new episode it has not intervened


def test_without_its_expert_the_policy_acts_until_the_next_episode():
    expert = Expert()
    gate = Gate(DaggerConfig(gate_threshold=0.5), 2, expert.actions, expert.begin)
    expert.lost = True
    assert corrected(gate, (0.0, 0.0)) == [[POLICY, POLICY]]


def keyboard(tmp_path, dims=7):
    pressed, time = [], [0.0]
    keys = Keyboard(dims, Controls(str(tmp_path)), keys=lambda: pressed.pop(0) if pressed else "", now=lambda: time[0])
    return keys, pressed, time


def test_keys_move_while_they_are_held(tmp_path):
    device, pressed, time = keyboard(tmp_path)
    assert device.read() is None
    pressed.append("ds")
    assert device.read().tolist() == [1, -1, 0, 0, 0, 0, 1]
    time[0] = HOLD_S / 2
    pressed.append("g")
    assert device.read().tolist() == [1, -1, 0, 0, 0, 0, -1]
    time[0] = HOLD_S * 1.2  # d and s are no longer held, g is
    assert device.read().tolist() == [0, 0, 0, 0, 0, 0, -1]
    time[0] = HOLD_S * 3
    assert device.read() is None
    pressed.append("w")
    few, _, _ = keyboard(tmp_path, dims=2)
    assert few.read() is None and device.read().tolist() == [0, 1, 0, 0, 0, 0, -1]


def test_keys_are_signals(tmp_path):
    device, pressed, _ = keyboard(tmp_path)
    pressed += ["p \ny", "p  ", "c"]
    device.read()
    assert {path.name for path in tmp_path.iterdir()} == {"pause", "stop", "ready", "success"}
    device.read()
    assert {path.name for path in tmp_path.iterdir()} == {"stop", "ready", "success"}  # space twice is still a stop
    device.read()
    assert {path.name for path in tmp_path.iterdir()} == {"ready", "success"}


def test_keys_of_a_terminal_are_heard_while_nobody_asks_for_them(tmp_path, monkeypatch):
    """The collector waits for the robot, which waits for a key."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        device = Keyboard(7, Controls(str(tmp_path)))
        for key, name in ((b"\n", "ready"), (b" ", "stop")):
            os.write(ours, key)
            deadline = time.monotonic() + 20
            while not (tmp_path / name).exists():
                assert time.monotonic() < deadline
                time.sleep(0.005)
        device.close()
    os.close(ours)


def test_a_space_mouse_acts_when_it_is_touched(tmp_path):
    state = SimpleNamespace(x=0.0, y=0.01, z=0.0, roll=0.0, pitch=0.0, yaw=0.0, buttons=[0, 0])
    person = Person(SpaceMouse(7, Controls(str(tmp_path)), SimpleNamespace(read=lambda: state)))
    policy = np.full((1, 7), 0.3, np.float32)
    assert person.correct(None, policy)[1].tolist() == [POLICY]
    state.z = -0.5
    actions, acted_by = person.correct(None, policy)
    np.testing.assert_allclose(actions, [[0, 0.01, -0.5, 0, 0, 0, 1]], atol=1e-7)
    assert acted_by.tolist() == [HUMAN]
    state.z, state.buttons = 0.0, [1, 1]
    assert person.correct(None, policy)[0][0, -1] == -1 and (tmp_path / "stop").exists()
    assert person.correct(None, policy)[1].tolist() == [POLICY]  # a button that stays pressed is pressed once


def test_a_missing_package_of_a_device_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyspacemouse", None)
    with raises_code("missing-dependency") as caught:
        open_space_mouse()
    assert "embodrl[spacemouse]" in str(caught.value)


def test_a_keyboard_needs_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    with raises_code("keyboard-no-terminal"):
        Keyboard(7, Controls(str(tmp_path)))


@pytest.mark.parametrize(("horizon", "wanted"), [(1, [1, 2, 3, 5]), (2, [1, 2, 5]), (3, [1, 5])])
def test_corrections_are_whole_or_reach_the_end(horizon, wanted):
    acted_by = np.array([0, 1, 1, 2, 0, 2])  # of two episodes, the last frame
    columns = {"images": np.zeros((6, 1, 2, 2, 3)), "state": np.zeros((6, 0)), "actions": np.zeros((6, 1))}
    demos = Demos.of_episodes({**columns, ACTED_BY: acted_by}, [5, 1], ["a", "b"], ["t", "t"])
    assert corrected_frames(demos, horizon).tolist() == wanted
    both = Demos.concat([demos.select([1]), demos.select([0])])
    assert both.acted_by.tolist() == [2, 0, 1, 1, 2, 0]
    assert not len(corrected_frames(Demos.of_episodes(columns, [6], ["a"], ["t"]), horizon))


def test_a_function_that_makes_no_device_is_refused(tmp_path):
    assert open_device("scripted_device:Device", 3, str(tmp_path)).read().tolist() == [0.5] * 3
    with raises_code("device-result"):
        open_device("scripted_device:no_device", 3, str(tmp_path))


@pytest.mark.parametrize("action", [[np.nan, 0.0, 0.0], [1.0], [0.0, 0.0], ["a", "b", "c"]])
def test_what_a_device_returns_is_an_action(action):
    device = SimpleNamespace(read=lambda: action, close=lambda: None)
    with raises_code("device-result"):
        wanted_action(device, 3)
    assert wanted_action(SimpleNamespace(read=lambda: [1, 0, -1], close=None), 3).dtype == np.float32
