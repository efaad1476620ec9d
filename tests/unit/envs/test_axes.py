"""Perturbed episodes: what an axis changes, and that it follows from the seed alone."""

from __future__ import annotations

import numpy as np
import pytest
from expect import raises_code

from embodrl.envs.axes import NOISE_STD, colour_shift, noisy, recoloured, reworded
from embodrl.envs.simulator import Replayed, SimStep, Simulator, SimulatorVectorEnv
from embodrl.envs.stepping import EpisodeRules
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.envs.toy.tasks import AXES
from embodrl.specs import ENVS, Axis, SimulatorSpec
from embodrl.types import EnvStep, Observation

SEEDS, TASKS, ROWS = np.array([3, 8]), np.array([0, 1], np.int32), np.arange(2)
TEXTS = ["move the white dot to the red square", "move the white dot to the green square"]


def play(axis: str | None, reset_twice: bool = False) -> tuple[Observation, EnvStep, ToyVectorEnv]:
    env = ToyVectorEnv(2, image_size=16, include_state=True)
    if axis is not None:
        env.set_axis(axis)
    for _ in range(1 + reset_twice):
        first = env.reset(SEEDS, TASKS, ROWS)
        step = env.chunk_step(np.full((2, 3, 7), 0.1, np.float32), np.ones(2, bool))
    return first, step, env


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_changes_what_its_group_says_and_repeats_with_the_seed(axis: str) -> None:
    (plain, _, _), (first, step, _), (again, later, _) = play(None), play(axis), play(axis, reset_twice=True)
    np.testing.assert_array_equal(first.images, again.images)
    np.testing.assert_array_equal(step.observation.images, later.observation.images)
    assert first.instruction == again.instruction
    seen = np.array_equal(first.images, plain.images)
    assert seen == (axis in ("instruction", "goal"))  # a goal has not moved yet
    assert (first.instruction == TEXTS) == (axis not in ("instruction", "colours"))
    assert np.array_equal(first.state, plain.state) == (axis != "objects")


def test_goals_move_while_the_episode_runs() -> None:
    (_, _, still), (_, _, moving) = play(None), play("goal")
    moved = np.abs(moving.goals - still.goals)
    assert (moved > 0).all() and moved.max() <= 3 * 0.02 + 1e-6


def test_colours_of_things_and_instructions_change_together() -> None:
    first, _, env = play("colours")
    colour = {"red": 0, "green": 1, "blue": 2}[first.instruction[0].split()[-2]]
    x, y = (np.abs(np.linspace(-1, 1, 16) - place).argmin() for place in env.goals[0, 0])
    assert first.images[0, 0, y, x].tolist() == [255 * (channel == colour) for channel in range(3)]


def test_words() -> None:
    for seed in range(20):
        assert reworded("stack", seed) != "stack" and reworded("go", seed).endswith("go")
        shift = colour_shift(seed)
        assert recoloured("red bed on blue", seed) == ("green bed on red" if shift == 1 else "blue bed on green")
    assert {colour_shift(seed) for seed in range(20)} == {1, 2}
    assert any("shove" in reworded("push the cube", seed) for seed in range(20))


def test_noise_has_its_strength_and_differs_from_step_to_step() -> None:
    grey = np.full((1, 64, 64, 3), 128, np.uint8)
    noise = noisy(grey, 5, 0).astype(float) - 128
    assert abs(noise.mean()) < 1 and noise.std() == pytest.approx(NOISE_STD, rel=0.05)
    assert not np.array_equal(noisy(grey, 5, 0), noisy(grey, 5, 1))


class Dim(Simulator):
    """Knows one axis of its own."""

    action_low, action_high, instruction, is_seeded, level = (-1.0,), (1.0,), "look", True, 100

    def reset(self, seed: int) -> None: ...
    def step(self, action: np.ndarray) -> SimStep:
        return SimStep(0.0, False)

    def images(self) -> np.ndarray:
        return np.full((1, 2, 2, 3), self.level, np.uint8)

    def perturb(self, axis: str) -> None:
        if axis != "fog":
            super().perturb(axis)
        self.level = 50


class Dims(SimulatorVectorEnv):
    def __init__(self) -> None:
        super().__init__(2, ("a", "b"), [{"name": "top", "height": 2, "width": 2}], EpisodeRules())

    def make_simulator(self, task: str) -> Simulator:
        return Replayed(Dim())


def test_a_simulator_has_axes_of_its_own_also_where_it_is_built_later() -> None:
    env = Dims()
    env.set_axis("fog")
    assert env.reset(SEEDS, TASKS, ROWS).images.max() == 50  # row 1 gets a simulator of task b here
    with raises_code("axis-unknown"):
        env.set_axis("rain")
    with raises_code("axis-unknown"):
        ToyVectorEnv(1).set_axis("fog")


def test_axes_of_tasks() -> None:
    spec = SimulatorSpec.make("x", "m:C", "", {"axes": {"a": Axis("vision", ""), "b": Axis("vision", "", ("t",))}})
    assert list(spec.axes_of(["t"])) == ["a", "b"] and list(spec.axes_of(["t", "u"])) == ["a"]


def test_what_specs_declare() -> None:
    for spec in ENVS.all():
        for axis in spec.axes.values():
            assert axis.group in ("vision", "semantics", "execution") and axis.description
            assert axis.tasks is None or set(axis.tasks) <= set(spec.instructions())
