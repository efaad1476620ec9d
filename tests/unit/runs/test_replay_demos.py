"""Demonstrations as transitions: what `embodrl collect` writes, how chunks are cut from it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from demo_files import A, config, episode, outcomes, write
from expect import raises_code
from tiny_families import build

from embodrl.data.demos import Demos, Outcomes
from embodrl.data.imitation import observed
from embodrl.data.load import load_demos
from embodrl.data.replay import ReplayBuffer
from embodrl.learners.replay import demo_frames, make_stores


@pytest.mark.parametrize("style", ["raw", "lerobot"])
def test_what_actions_led_to_is_written_and_read(style: str, tmp_path: Path) -> None:
    write(tmp_path / "data", style, episode(0, 3, True), episode(1, 2, False))
    found = load_demos(tmp_path / "data").outcomes
    assert found is not None
    np.testing.assert_array_equal(found.rewards, [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(found.terminated, [False, False, True, False, False])
    np.testing.assert_allclose(found.executed[:, 0], [0, 0.01, 0.02, 0, 0.01])
    write(tmp_path / "old", style, episode(0, 3, True, known=False))
    assert load_demos(tmp_path / "old").outcomes is None


def test_chunks_begin_at_every_frame() -> None:
    """Chunks of two: an episode of three frames that was solved, and one of four that ran out of time."""
    one, two = outcomes(3, True), outcomes(4, False)
    joined = Outcomes.of({name: np.concatenate([part, two.columns()[name]]) for name, part in one.columns().items()})
    assert joined is not None
    number = np.array([0, 1, 2, 10, 11, 12, 13], np.float32)
    columns = {
        "images": np.zeros((7, 1, 8, 8, 3), np.uint8),
        "state": number[:, None],
        "actions": np.zeros((7, A), np.float32),
    }
    demos = Demos.of_episodes(columns, [3, 4], ["a", "b"], ["t", "t"])
    sizes = {"use_images": False, "max_state_dim": 1, "hidden_sizes": (4,)}
    frames = demo_frames(demos, joined, build("gaussian", gaussian=sizes))
    table = [
        (int(state), rewards, valid, terminated, acted)
        for state, rewards, valid, terminated, acted in zip(
            frames["inputs.state"][:, 0],
            frames["rewards"].tolist(),
            frames["valid"].tolist(),
            frames["terminated"].tolist(),
            frames["acted"].tolist(),
            strict=True,
        )
    ]
    both = [True, True]
    assert table == [
        (0, [0, 1], both, False, True),
        (2, [2, 0], [True, False], True, True),  # solved in its first action
        (1, [1, 2], both, True, True),
        (10, [0, 1], both, False, True),
        (12, [0, 0], [False, False], False, False),  # what came after 13 is not recorded
        (11, [1, 2], both, False, True),
        (13, [0, 0], [False, False], False, False),
    ]
    assert (frames["source"] == 1).all()
    assert torch.allclose(frames["actions"][2, :, 0], torch.tensor([0.01, 0.02]))
    assert not frames["labels"].any()  # what the expert would have done, without its perturbations
    buffer = ReplayBuffer(100, 10**9)
    buffer.add_frames(frames)
    assert len(buffer) == 5


def test_demonstrations_of_the_run_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data", "raw", episode(0, 3, True), episode(1, 2, True))
    arguments = (f"algorithm.off_policy.demos={tmp_path / 'data'}", "algorithm.off_policy.demo_fraction=0.5")
    run = config(*arguments)
    stores = make_stores(run, build("gaussian", gaussian={"use_images": False}, num_action_chunks=1), 4)
    assert stores.demos is not None and len(stores.demos) == 5
    with raises_code("demos-other-state"):
        make_stores(run, build("gaussian"), 2)
    blind = config(*arguments, "model=cnn", "env.include_state=false", "env.state=proprio")
    assert not observed(load_demos(tmp_path / "data"), blind).state.size
    taken: list[int] = []
    policy = build("gaussian", num_action_chunks=1)
    monkeypatch.setattr(policy, "preprocess", lambda seen: taken.append(seen.state.shape[1]) or {"x": torch.zeros(5)})
    make_stores(blind, policy, 0)
    assert taken == [0]


@pytest.mark.parametrize("style", ["raw", "lerobot"])
def test_demonstrations_without_rewards_or_with_others_are_refused(style: str, tmp_path: Path) -> None:
    policy = build("gaussian")

    def take(name: str, *arguments: str) -> None:
        path = f"algorithm.off_policy.demos={tmp_path / name}"
        make_stores(config(path, "algorithm.off_policy.demo_fraction=0.5", *arguments), policy, 4)

    write(tmp_path / "unknown", style, episode(0, 3, True), rewards={})
    with raises_code("demos-no-rewards"):
        take("unknown")
    write(tmp_path / "imitation", style, episode(0, 3, True, known=False))
    with raises_code("demos-no-rewards"):
        take("imitation")
    write(tmp_path / "other", style, episode(0, 3, True), rewards={"reward_mode": "dense", "success_bonus": 1.0})
    with raises_code("demos-other-rewards"):
        take("other")
    dense: dict[str, object] = {"reward_mode": "dense", "success_bonus": 0.0}
    on = ["env.reward_mode=dense", "env.success_bonus=0", "env.train.ignore_terminations=true"]
    write(tmp_path / "ended", style, episode(0, 3, True), rewards=dense | {"ignore_terminations": False})
    with raises_code("demos-other-rewards"):
        take("ended", *on)
    write(tmp_path / "older", style, episode(0, 3, True), rewards=dense)
    take("older", *on)
