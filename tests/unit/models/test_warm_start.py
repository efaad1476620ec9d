"""The warm start that is shipped."""

from __future__ import annotations

import torch

from embodrl.config import load_config
from embodrl.models.openvla.build import BUILTIN_WARM_START
from embodrl.models.registry import build_policy


def test_the_default_model_loads_every_tensor_from_the_shipped_warm_start() -> None:
    config = load_config(["model=openvla"]).config.model
    policy, report = build_policy(config, device="cpu", dtype=torch.float32, seed=0)
    assert report.source == str(BUILTIN_WARM_START) and report.ok
    assert report.initialized == {}
    assert report.num_loaded == len(policy.state_dict())


def test_the_shipped_warm_start_is_small() -> None:
    assert sum(path.stat().st_size for path in BUILTIN_WARM_START.rglob("*") if path.is_file()) <= 10_000_000
