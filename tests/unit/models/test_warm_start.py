"""The warm starts that are shipped."""

from __future__ import annotations

import pytest
import torch

from embodrl.config import load_config
from embodrl.config.policy_card import shipped_policy
from embodrl.models.registry import build_policy
from embodrl.specs import MODELS

SHIPPED = [spec.name for spec in MODELS.all() if spec.builtin_warm_start]


@pytest.mark.parametrize("family", SHIPPED)
def test_the_preset_loads_every_tensor_from_the_shipped_warm_start(family: str) -> None:
    config = load_config([f"model={family}"]).config.model
    policy, report = build_policy(config, device="cpu", dtype=torch.float32, seed=0)
    assert report.source == str(shipped_policy(family)) and report.ok
    assert report.initialized == {}
    assert report.num_loaded == len(policy.state_dict())


@pytest.mark.parametrize("family", SHIPPED)
def test_a_shipped_warm_start_is_small(family: str) -> None:
    directory = shipped_policy(family)
    assert directory is not None
    assert sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) <= 10_000_000


def test_the_other_families_have_none() -> None:
    assert {spec.name for spec in MODELS.all() if shipped_policy(spec.name) is not None} == set(SHIPPED)
    assert shipped_policy("unknown") is None
