"""`embodrl data check`: each finding on demonstrations made to have it, and none on sound ones."""

from collections.abc import Callable

import numpy as np
import pytest

from embodrl.data.demos import Demos
from embodrl.data.facts import DatasetFacts
from embodrl.tools.data_check.checks import inspect

EPISODES, LENGTH = 6, 40
FACTS = DatasetFacts({"top": (8, 8), "wrist": (8, 8)}, 4, 3, 20.0, "arm")


def sound(positions: bool = False) -> Demos:
    """Three dimensions move a state by deltas (or to positions), the last is a gripper that closes half way."""
    rng = np.random.default_rng(0)
    actions, states = [], []
    for _ in range(EPISODES):
        delta = np.clip(rng.normal(0, 0.4, (LENGTH, 3)), -1, 1)
        state = 0.1 * np.cumsum(np.concatenate([np.zeros((1, 3)), delta]), axis=0)[:-1] + rng.normal(size=3) * 0.1
        gripper = np.where(np.arange(LENGTH) < LENGTH // 2, 1.0, -1.0)[:, None]
        moves = state + 0.1 * delta if positions else delta
        actions.append(np.concatenate([moves, gripper], axis=1))
        states.append(state)
    images = rng.integers(20, 256, (EPISODES * LENGTH, 2, 8, 8, 3))
    columns = {"images": images, "state": np.concatenate(states), "actions": np.concatenate(actions)}
    return Demos.of_episodes(columns, [LENGTH] * EPISODES, ["pick it up"] * EPISODES, ["pick"] * EPISODES)


def found(demos: Demos, facts: DatasetFacts = FACTS) -> dict[str, str]:
    return {finding.code: finding.level for finding in inspect(demos, facts)}


@pytest.mark.parametrize("positions", [False, True])
def test_sound_data_have_no_findings(positions: bool):
    assert inspect(sound(positions), FACTS) == []


def of_episode(number: int) -> slice:
    return slice(number * LENGTH, (number + 1) * LENGTH)


def degrees(demos: Demos):
    demos.actions[:, :2] *= 40


def tiny(demos: Demos):
    demos.actions[:, 1] *= 1e-3


def still(demos: Demos):
    demos.actions[:, 1] = 0.5


def still_state(demos: Demos):
    demos.state[:, 2] = 0


def noise_around_0(demos: Demos):
    demos.state[:, 1] = np.random.default_rng(0).normal(size=len(demos.state)) * 1e-8


def outlier(demos: Demos):
    demos.actions[77, 0] = 60


def zero_one(demos: Demos):
    demos.actions[:, 3] = (demos.actions[:, 3] + 1) / 2


def mixed_gripper(demos: Demos):
    half = slice(0, 3 * LENGTH)
    demos.actions[half, 3] = (demos.actions[half, 3] + 1) / 2


def inverted_in_some(demos: Demos):
    demos.actions[: 3 * LENGTH, 3] *= -1


def shifted(frames: int) -> Callable[[Demos], None]:
    def shift(demos: Demos) -> None:
        for number in range(EPISODES):
            demos.actions[of_episode(number)] = np.roll(demos.actions[of_episode(number)], frames, axis=0)

    return shift


def state_as_action(demos: Demos):
    demos.actions[:, :3] = demos.state


def copied_episode(demos: Demos):
    for column in (demos.actions, demos.state):
        column[of_episode(4)] = column[of_episode(1)]


def black(demos: Demos):
    demos.images[of_episode(2), 1] = 3


def frozen(demos: Demos):
    demos.images[of_episode(3), 0] = demos.images[0, 0]


def same_cameras(demos: Demos):
    demos.images[:, 1] = demos.images[:, 0]


def no_words(demos: Demos):
    demos.instruction_table.append(" ")
    demos.instruction[demos.episode == 2] = 1


def idle(demos: Demos):
    demos.actions[of_episode(0), :3] = 0
    demos.actions[of_episode(1), :3] = 0


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (degrees, {"action-scale-large": "warning"}),
        (tiny, {"action-scale-small": "warning"}),
        (still, {"action-constant": "warning"}),
        (still_state, {"state-constant": "warning"}),
        (noise_around_0, {"state-constant": "warning"}),
        (outlier, {"action-outlier": "warning"}),
        (zero_one, {"gripper-zero-one": "warning"}),
        (mixed_gripper, {"gripper-mixed": "error"}),
        (inverted_in_some, {"gripper-starts-differ": "warning"}),
        (shifted(3), {"action-after-state": "error"}),
        (shifted(-3), {"action-lag": "warning"}),
        (state_as_action, {"action-is-state": "error"}),
        (copied_episode, {"episode-duplicate": "warning"}),
        (black, {"frames-black": "error"}),
        (frozen, {"frames-frozen": "error"}),
        (same_cameras, {"camera-duplicate": "error"}),
        (no_words, {"instruction-empty": "warning"}),
        (idle, {"frames-idle": "warning"}),
    ],
)
def test_each_finding(make: Callable[[Demos], None], expected: dict[str, str]):
    demos = sound()
    make(demos)
    assert found(demos) == expected


@pytest.mark.parametrize("frames", [-2, -1, 1, 2, 5])
def test_positions_that_are_recorded_late_are_found(frames: int):
    demos = sound(positions=True)
    shifted(frames)(demos)
    assert found(demos) == ({"action-after-state": "error"} if frames > 1 else {})


def test_one_dimension_alone_shows_no_lag():
    demos = sound()
    shifted(3)(late := sound())
    demos.actions[:, 1] = late.actions[:, 1]
    assert found(demos) == {}


def test_lags_are_counted_in_frames():
    demos = sound()
    shifted(3)(demos)
    (finding,) = inspect(demos, FACTS)
    assert "3 frames before" in finding.message and "dimensions 0, 1, 2" in finding.message


def test_lengths_rate_and_order_of_cameras():
    demos = sound()
    lengths = [2, 38, 40, 30, 10, 120]
    columns = {"images": demos.images, "state": demos.state, "actions": demos.actions}
    uneven = Demos.of_episodes(columns, lengths, ["pick"] * 6, ["pick"] * 6)
    assert "episode-short" in found(uneven)
    uneven = Demos.of_episodes(columns, [10, 10, 10, 10, 10, 190], ["pick"] * 6, ["pick"] * 6)
    assert "episode-long" in found(uneven)
    facts = DatasetFacts({"wrist": (8, 8), "top": (8, 8)}, 4, 3, 1000.0, "arm")
    assert found(demos, facts) == {"camera-order": "warning", "frame-rate": "warning"}
