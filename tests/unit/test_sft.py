import math

import numpy as np
import pytest
from toy_policy import ToyPolicy

from embodrl.config.schema import CameraConfig, Config, EnvConfig, ModelConfig, SftConfig
from embodrl.data.demos import Demos
from embodrl.errors import EmbodrlError
from embodrl.runs.sft import batches, check_demos, learning_rate, make_optimizer, shift_images


def demos(num_frames: int) -> Demos:
    images = np.zeros((num_frames, 1, 4, 4, 3), np.uint8)
    images[:, 0, 0, 0, 0] = np.arange(num_frames)
    half = num_frames // 2
    episode = (np.arange(num_frames) >= half).astype(np.int64)
    last = np.where(episode == 0, half - 1, num_frames - 1)
    actions = np.arange(num_frames, dtype=np.float32)[:, None]
    return Demos(images, 10 * actions, actions, episode, last, ["first", "second"], ["a", "b"])


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine():
    settings = SftConfig(lr=0.8, lr_warmup_steps=4, max_steps=12)
    assert [learning_rate(settings, step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert learning_rate(settings, 6) == pytest.approx(0.4 * (1 + math.sqrt(0.5)))  # a quarter of the way: 45 degrees
    assert learning_rate(settings, 8) == pytest.approx(0.4)
    assert learning_rate(settings, 12) == pytest.approx(0.0)
    assert learning_rate(SftConfig(lr=0.8, lr_warmup_steps=0, max_steps=2), 0) == pytest.approx(0.8)


def test_shifted_pictures_repeat_their_edges():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 2, 5, 6, 3)).astype(np.uint8)
    shifted = shift_images(images, 1, np.random.default_rng(1))
    assert shifted.shape == images.shape and shifted.dtype == np.uint8
    seen = set()
    for before, after in zip(images, shifted, strict=True):
        found = [
            (dy, dx)
            for dy in (-1, 0, 1)
            for dx in (-1, 0, 1)
            if (after == before[:, np.clip(np.arange(5) + dy, 0, 4)][:, :, np.clip(np.arange(6) + dx, 0, 5)]).all()
        ]
        assert len(found) == 1  # both cameras by the same way
        seen.add(found[0])
    assert len(seen) == 9
    assert shift_images(images, 0, rng) is images


def test_every_frame_is_seen_once_an_epoch():
    stream = batches(demos(12), SftConfig(batch_size=4), 2, seed=0)
    epochs = []
    for _ in range(2):
        frames = []
        for _ in range(3):
            observation, actions, inside = next(stream)
            which = observation.images[:, 0, 0, 0, 0]
            assert actions.shape == (4, 2, 1) and inside.shape == (4, 2)
            np.testing.assert_array_equal(actions[:, 0, 0].numpy(), which)
            assert observation.instruction == ["first" if frame < 6 else "second" for frame in which]
            np.testing.assert_array_equal(inside[:, 1].numpy(), ~np.isin(which, [5, 11]))
            frames += which.tolist()
        assert sorted(frames) == list(range(12))
        epochs.append(frames)
    assert epochs[0] != epochs[1]


def test_a_batch_may_be_larger_than_the_data_and_the_seed_decides():
    settings = SftConfig(batch_size=10)
    first = next(batches(demos(4), settings, 1, seed=3))[1].numpy()
    np.testing.assert_array_equal(first, next(batches(demos(4), settings, 1, seed=3))[1].numpy())
    assert not np.array_equal(first, next(batches(demos(4), settings, 1, seed=4))[1].numpy())
    assert np.bincount(first[:, 0, 0].astype(int)).tolist().count(0) == 0


@pytest.mark.parametrize("include_state", [False, True])
def test_the_state_is_that_of_the_frame_and_only_given_if_wanted(include_state):
    stream = batches(demos(12), SftConfig(batch_size=12), 1, seed=0, include_state=include_state)
    observation, actions, _ = next(stream)
    assert observation.state.dtype == np.float32
    np.testing.assert_array_equal(observation.state, 10 * actions[:, 0].numpy() if include_state else np.zeros((12, 0)))


def config(action_dim: int = 1, include_state: bool = False, cameras: int = 1) -> Config:
    views = tuple(CameraConfig(name=f"camera {i}") for i in range(cameras))
    env = EnvConfig(include_state=include_state, cameras=views)
    return Config(env=env, model=ModelConfig(action_dim=action_dim))


def test_demonstrations_of_this_robot_pass():
    check_demos(demos(4), config())
    check_demos(demos(4), config(include_state=True))


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"action_dim": 7}, "have 1 dimensions, model.action_dim is 7", "model.action_dim=1"),
        ({"cameras": 2}, "pictures of 1 cameras, env.cameras has 2", "cameras that the demonstrations"),
        ({"include_state": True}, "holds no robot states", "collect the demonstrations anew"),
    ],
)
def test_demonstrations_of_another_robot_are_refused(changes, message, hint):
    found = demos(4)
    found.state = found.state[:, :0]
    with pytest.raises(EmbodrlError, match=message) as refused:
        check_demos(found, config(**changes))
    assert hint in refused.value.hint


def test_imitation_leaves_the_value_head_alone():
    policy = ToyPolicy()
    trained = {id(p) for group in make_optimizer(policy, SftConfig()).param_groups for p in group["params"]}
    assert trained == {
        id(p) for name, part in policy.parts().items() if name != "value_head" for p in part.parameters()
    }
    assert not trained & {id(p) for p in policy.value.parameters()}
