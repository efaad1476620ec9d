"""Imitation of stored labels: how many updates, what they teach, and what a checkpoint restores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_families import build
from tiny_training import training_config

from embodrl.config.schema import Config
from embodrl.data.replay import ReplayBuffer, encode_words
from embodrl.errors import CheckpointError
from embodrl.fields import Fields
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.learners.dagger import DaggerUpdater
from embodrl.models.base import VLAPolicy
from embodrl.storage.checkpoint import Checkpoint


def config_of(family: str, **off_policy: object) -> Config:
    optim = {"critic_warmup_iterations": 0, "lr_warmup_iterations": 0, "lr_scheduler": "constant", "lr": 3e-3}
    algorithm = {"adv_type": "none", "loss_type": "dagger", "off_policy": {"utd": 0.5, "warm_up": 0, **off_policy}}
    sft = {"label_smoothing_bins": 0}
    return training_config(family, algorithm=algorithm, actor={"optim": optim}, sft=sft)


def learner_of(family: str, config: Config, count: int) -> DaggerUpdater:
    policy = build(family, add_value_head=False)
    engine = NativeTrainEngine(policy, EngineOptions.of(config), "cpu")
    return DaggerUpdater(config, policy, engine, store_of(policy, count))


def store_of(policy: VLAPolicy, count: int) -> ReplayBuffer:
    random = torch.Generator().manual_seed(0)
    chunk, dims = policy.num_action_chunks, policy.action_dim
    store = ReplayBuffer(1000, 10**9)
    store.add_frames(
        {
            "inputs.images": torch.randint(0, 256, (count, 1, 16, 16, 3), generator=random, dtype=torch.uint8),
            "inputs.state": torch.randn(count, 8, generator=random),
            "inputs.words": torch.from_numpy(encode_words(["push the cube"] * count)),
            "labels": torch.full((count, chunk, dims), 0.5),
            "source": torch.ones(count, dtype=torch.int8),
            "acted": torch.ones(count, dtype=torch.bool),
        }
    )
    return store


@pytest.mark.parametrize("family", ["gaussian", pytest.param("openvla", marks=pytest.mark.long)])
def test_the_policy_comes_to_act_as_it_is_told(family: str) -> None:
    learner = learner_of(family, config_of(family), 40)
    first = learner.learn(torch.Generator().manual_seed(1))
    learner.store.stored += 40
    last = learner.learn(torch.Generator().manual_seed(2))
    assert first["train/num_updates"] == last["train/num_updates"] == 20 and learner.engine.version == 2
    assert last["train/loss"] < 0.7 * first["train/loss"]
    assert learner.learn(torch.Generator())["train/num_updates"] == 0


@pytest.mark.parametrize("kept_by", ["learner", "engine"])
def test_a_restored_learner_continues_bit_exactly(kept_by: str, tmp_path: Path) -> None:
    """Checkpoints from before there were learners have the number of updates among the engine's counters."""
    config = config_of("gaussian")
    left, right = learner_of("gaussian", config, 20), learner_of("gaussian", config, 20)
    left.learn(torch.Generator().manual_seed(1))
    saved = left.engine.state_dict()
    copies = {section: {n: t.clone() for n, t in part.items()} for section, part in saved.tensors.items()}
    right.engine.load_state_dict(EngineState(copies, dict(saved.state)))
    counters, content = dict(saved.state), dict(left.state().content)
    if kept_by == "engine":
        content = {"engine": {**counters, **content}}
    right.load_state(Checkpoint(1, tmp_path, Fields(content, "state.json", CheckpointError)))
    assert right.num_updates == left.num_updates == 10
    for learner in (left, right):
        learner.store.stored += 10
        learner.learn(torch.Generator().manual_seed(3))
    weights = dict(right.engine.weights())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in left.engine.weights())
    assert np.isfinite(left.learn(torch.Generator())["train/lr"])
