"""Imitation of stored labels: how many updates, what they teach, and what a checkpoint restores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_families import build
from tiny_training import training_config

from embodrl.config.schema import Config
from embodrl.data.replay import ReplayBuffer, ReplayStores, encode_words
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training.imitation import ImitationEngine
from embodrl.hybrid_engines.training.policy_engine import EngineOptions


def config_of(family: str, **off_policy: object) -> Config:
    optim = {"critic_warmup_iterations": 0, "lr_warmup_iterations": 0, "lr_scheduler": "constant", "lr": 3e-3}
    algorithm = {"adv_type": "none", "loss_type": "dagger", "off_policy": {"utd": 0.5, "warm_up": 0, **off_policy}}
    return training_config(family, algorithm=algorithm, actor={"optim": optim})


def stores_of(policy: torch.nn.Module, count: int) -> ReplayStores:
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
    return ReplayStores(store)


def engine_of(family: str, config: Config) -> ImitationEngine:
    return ImitationEngine(build(family, add_value_head=False), EngineOptions.of(config), "cpu")


@pytest.mark.parametrize("family", ["gaussian", "openvla"])
def test_the_policy_comes_to_act_as_it_is_told(family: str) -> None:
    config = config_of(family)
    engine = engine_of(family, config)
    stores = stores_of(engine.policy, 40)
    first = engine.learn(stores, config.algorithm, torch.Generator().manual_seed(1))
    stores.online.stored += 40
    last = engine.learn(stores, config.algorithm, torch.Generator().manual_seed(2))
    assert first["train/num_updates"] == last["train/num_updates"] == 20 and engine.version == 2
    assert last["train/loss"] < 0.7 * first["train/loss"]
    assert engine.learn(stores, config.algorithm, torch.Generator())["train/num_updates"] == 0


def test_a_restored_engine_continues_bit_exactly() -> None:
    config = config_of("gaussian")
    left, right = engine_of("gaussian", config), engine_of("gaussian", config)
    stores = stores_of(left.policy, 20)
    left.learn(stores, config.algorithm, torch.Generator().manual_seed(1))
    saved = left.state_dict()
    copies = {section: {n: t.clone() for n, t in part.items()} for section, part in saved.tensors.items()}
    right.load_state_dict(EngineState(copies, dict(saved.state)))
    assert right.num_updates == left.num_updates == 10
    stores.online.stored += 10
    for engine in (left, right):
        engine.learn(stores, config.algorithm, torch.Generator().manual_seed(3))
    weights = dict(right.weights())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in left.weights())
    assert np.isfinite(left.learn(stores, config.algorithm, torch.Generator())["train/lr"])
