"""A dataset as what offline runs learn from: returns of its chunks, what critics look at, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from demo_files import episode, write
from expect import raises_code
from tiny_families import build

from embodrl.config.schema import Config
from embodrl.data.load import load_demos
from embodrl.errors import EmbodrlError
from embodrl.learners.offline.load import chunk_outcomes, load_offline
from embodrl.pipelines.load import load_config


def config(directory: Path, *arguments: str) -> Config:
    base = ["env=toy", "model=mlp", "algorithm=iql", "env.state=full", "env.cameras=[{height: 16, width: 16}]"]
    return load_config([*base, f"algorithm.off_policy.demos={directory}", *arguments]).config


def test_returns_of_chunks(tmp_path: Path) -> None:
    """Chunks of two; rewards 0, 1, 2, ... within an episode; the first is solved in its last frame, the second cut off.

    At 0.5 per chunk and n = 2: from frame 0 of five, 0+1 + 0.5 (2+3), then V of frame 4 at 0.25.
    """
    write(tmp_path / "data", "raw", episode(0, 5, True), episode(1, 4, False))
    demos = load_demos(tmp_path / "data")
    assert demos.outcomes is not None
    settings = config(tmp_path / "data", "algorithm.gamma=0.5", "algorithm.off_policy.n_step=2").algorithm
    led = chunk_outcomes(demos, demos.outcomes, 2, settings)
    assert led.known.tolist() == [True] * 5 + [True, True, False, False]
    assert led.returns[led.known].tolist() == [3.5, 3 + 0.5 * 7, 5 + 0.5 * 4, 7.0, 4.0, 1.0, 3.0]
    assert led.discount[led.known].tolist() == [0.25, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5]
    assert led.next[[0, 5, 6]].tolist() == [4, 7, 8]
    per_action = settings.model_copy(update={"reward_type": "action_level"})
    led = chunk_outcomes(demos, demos.outcomes, 2, per_action)
    assert led.returns[0] == 0 + 0.5 * 1 + 0.25 * 2 + 0.125 * 3 and led.discount[0] == 0.5**4


def test_what_a_run_learns_from(tmp_path: Path) -> None:
    write(tmp_path / "data", "lerobot", episode(0, 5, True), episode(1, 4, False))
    policy = build("gaussian", add_value_head=False)
    data, spec = load_offline(config(tmp_path / "data", "model.num_action_chunks=2"), policy)
    assert (spec.num_cameras, spec.state_dim, spec.num_tasks) == (0, 4, 1) if spec else False
    assert set(data.seen) == {"state", "task"} and data.outcomes is not None
    actions, inside = data.actions(torch.tensor([4]), 2)
    assert np.allclose(actions, 4 / 100) and inside.tolist() == [[True, False]]  # as executed, not as labelled
    data, spec = load_offline(config(tmp_path / "data", "model=cnn"), policy)
    assert data.seen["images"].shape == (9, 1, 16, 16, 3) and spec is not None and spec.num_cameras == 1
    assert data.observation(torch.tensor([4])).state.shape == (1, 4)
    blind = ("model=cnn", "env.include_state=false", "env.state=proprio")
    data, spec = load_offline(config(tmp_path / "data", *blind), policy)
    assert data.observation(torch.tensor([4])).state.shape == (1, 0) and spec is not None and spec.state_dim == 0


def test_data_without_rewards_or_whole_chunks_are_refused(tmp_path: Path) -> None:
    policy = build("gaussian", add_value_head=False)
    write(tmp_path / "unknown", "raw", episode(0, 5, True, known=False))
    with raises_code("demos-no-rewards", EmbodrlError):
        load_offline(config(tmp_path / "unknown"), policy)
    write(tmp_path / "short", "raw", episode(0, 2, False))
    with raises_code("offline-no-chunks", EmbodrlError):
        load_offline(config(tmp_path / "short"), policy)
