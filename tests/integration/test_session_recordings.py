"""Episodes recorded and replayed by a session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from runs import tiny

import embodrl
from embodrl.data.load import load_demos
from embodrl.errors import EmbodrlError

pytestmark = pytest.mark.slow


def test_a_session_records_and_replays_episodes(tmp_path: Path) -> None:
    with embodrl.Session(tiny(), [f"runner.output_dir={tmp_path / 'run'}"]) as session:
        with raises_code("replay-impossible", EmbodrlError, "99"):
            session.replay(load_demos(_collected(tmp_path)), [99])
        before = {name: value.clone() for name, value in session.policy.state_dict().items()}
        drawn = torch.random.get_rng_state()
        raw = ["collect.format=raw", "collect.keep_failures=true", "collect.sample=true"]
        kept = session.record(tmp_path / "own", 4, raw)
        assert (kept.num_episodes, kept.output_dir) == (4, tmp_path / "own")
        assert torch.equal(torch.random.get_rng_state(), drawn)
        assert all(torch.equal(value, before[name]) for name, value in session.policy.state_dict().items())
        demos = load_demos(tmp_path / "own")
        found = session.replay(tmp_path / "own")
        assert [each.number for each in found] == [0, 1, 2, 3] and all(each.agrees for each in found)
        assert [(each.task, each.seed, each.success) for each in found] == list(
            zip(demos.tasks, demos.seeds, demos.success, strict=True)
        )
        assert all(each.state_difference == 0 for each in found) == bool(demos.state.shape[1])

        assert demos.outcomes is not None
        other = replace(demos, outcomes=replace(demos.outcomes, executed=-demos.outcomes.executed))
        moved = session.replay(other, [2])[0]
        assert moved.number == 2 and moved.agrees == (not demos.state.shape[1] and moved.success == demos.success[2])
        claimed = replace(demos, success=[not each for each in demos.success])
        assert not any(each.agrees for each in session.replay(claimed, [0, 3]))

        batch = session.rollout()
        session.train(batch, session.advantages(batch))
        assert session.sync()["env_steps"] > 0, "the iteration goes on"
    with raises_code("session-closed", EmbodrlError):
        session.replay(demos)


def _collected(tmp_path: Path) -> Path:
    embodrl.collect(tiny(), [f"collect.output_dir={tmp_path / 'demos'}", "collect.num_episodes=2"])
    return tmp_path / "demos"


APART = ("actor.own_process=true", "rollout.own_process=true", "rollout.weight_sync=disk")


@pytest.mark.parametrize("places", [(), pytest.param(APART, marks=pytest.mark.long)])
def test_recording_does_not_change_training(tmp_path: Path, places: tuple[str, ...]) -> None:
    weights = []
    for name in ("with", "without"):
        with embodrl.Session(tiny(), [f"runner.output_dir={tmp_path / name}", *places]) as session:
            batch = session.rollout()
            if name == "with":
                kept = session.record(tmp_path / "own", 2, ["collect.format=raw", "collect.keep_failures=true"])
                assert kept.num_episodes == 2 and all(each.agrees for each in session.replay(tmp_path / "own"))
            session.train(batch, session.advantages(batch))
            session.sync()
            weights.append({key: value.numpy().copy() for key, value in session.policy.state_dict().items()})
    for key, value in weights[0].items():
        np.testing.assert_array_equal(value, weights[1][key])
