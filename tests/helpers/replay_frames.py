"""Replay buffers of random frames, as the tiny Gaussian policy sees them, and updates that learn from them."""

from __future__ import annotations

from typing import Any

import torch
from tiny_families import build
from tiny_training import training_config

from embodrl.config.schema import Config
from embodrl.data.replay import ReplayBuffer, ReplayStores
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.learners.off_policy import OffPolicyUpdater

SETTINGS = {"num_q": 3, "subset": 2, "critic_hidden_sizes": (8,), "warm_up": 20, "utd": 0.5, "policy_delay": 2}


def config_of(value_lr: float = 1e-3, **changes: object) -> Config:
    algorithm = {"adv_type": "none", "loss_type": "sac", "off_policy": {**SETTINGS, **changes}}
    optim = {"critic_warmup_iterations": 0, "lr_warmup_iterations": 0, "lr_scheduler": "constant", "lr": 1e-3}
    optim["value_lr"] = value_lr
    return training_config("gaussian", algorithm=algorithm, actor={"optim": optim})


def updater_of(config: Config, stores: ReplayStores | None = None, **arguments: Any) -> OffPolicyUpdater:
    policy = build("gaussian", add_value_head=False)
    engine = NativeTrainEngine(policy, EngineOptions.of(config), "cpu")
    return OffPolicyUpdater(config, engine, stores or ReplayStores(buffer_of(60)), **arguments)


def buffer_of(count: int, seed: int = 0) -> ReplayBuffer:
    """Episodes of five chunks, with a last observation for which there is no action."""
    random = torch.Generator().manual_seed(seed)
    acted = torch.arange(count) % 6 < 5
    buffer = ReplayBuffer(10_000, 10**9)
    buffer.add_frames(
        {
            "inputs.state": torch.randn(count, 8, generator=random),
            "inputs.images": torch.randint(0, 256, (count, 1, 8, 8, 3), generator=random, dtype=torch.uint8),
            "actions": torch.rand(count, 2, 7, generator=random) * 2 - 1,
            "labels": torch.rand(count, 2, 7, generator=random) * 2 - 1,
            "rewards": torch.randn(count, 2, generator=random) * acted[:, None],
            "valid": acted[:, None].expand(count, 2),
            "terminated": torch.zeros(count, dtype=torch.bool),
            "acted": acted,
            "source": torch.zeros(count, dtype=torch.int8),
        }
    )
    return buffer
