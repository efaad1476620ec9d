"""A checkpoint of one family, given to another: named, before anything else is found wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_families import POLICIES as FAMILIES
from tiny_families import build, tiny_config

from embodrl.errors import CheckpointError
from embodrl.models.registry import build_policy
from embodrl.specs import families_of

# OpenVLA-OFT is made from an OpenVLA by fine-tuning, so that pair is not a mistake.
PAIRS = [(a, b) for a in FAMILIES for b in FAMILIES if a != b and (a, b) != ("openvla", "openvla_oft")]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exports")
    for family in FAMILIES:
        build(family).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


@pytest.mark.parametrize("source", ["model_path", "warm_start"])
@pytest.mark.parametrize(("saved", "wanted"), PAIRS)
def test_the_export_of_another_family(exports: dict[str, Path], saved: str, wanted: str, source: str):
    config = tiny_config(wanted, **{source: str(exports[saved])})
    with pytest.raises(CheckpointError) as error:
        build_policy(config, device="cpu", dtype=torch.float32, seed=0)
    if (saved, wanted) == ("openvla_oft", "openvla"):
        assert "holds an OpenVLA-OFT policy" in error.value.message
    else:
        first = wanted.removesuffix("_oft")
        assert f"of a '{saved}'" in error.value.message and f"not '{first}'" in error.value.message
    assert error.value.hint.startswith(f"set model.model_type={saved}")


@pytest.mark.parametrize(
    ("raw", "families"),
    [
        ({"model_type": "openvla"}, ("openvla", "openvla_oft")),
        ({"model_type": "gr00t_n1_5", "action_dim": 32, "action_horizon": 16}, ("gr00t",)),
        ({"model_type": "Gr00tN1d7", "action_horizon": 40}, ("gr00t_n1_7",)),
        ({"type": "pi05"}, ("pi05",)),
        ({"type": "pi0_fast", "input_features": {}}, ("pi0_fast",)),
        ({"type": "smolvla"}, ("smolvla",)),
        ({"type": "pi05", "input_features": {}}, ("pi05",)),
        ({"type": "xvla", "input_features": {}, "paligemma_variant": "gemma_2b"}, ("lerobot",)),
        ({"type": "act", "input_features": {}}, ("lerobot",)),
        ({"action_dim": 32, "action_horizon": 50, "paligemma_variant": "gemma_2b"}, ("pi0", "pi05")),
        ({"model_type": "llama", "embodrl": "?"}, ("planner",)),
        ({"model_type": "bert", "embodrl": "?"}, ()),
        ({}, ()),
    ],
)
def test_public_files(raw: dict, families: tuple[str, ...]):
    assert families_of(raw) == families
