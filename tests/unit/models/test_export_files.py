"""Files of exported policies: what other programs look for, and may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from embodrl.config import load_config
from embodrl.models.common import checkpoint
from embodrl.models.registry import build_policy


@pytest.mark.parametrize(
    ("family", "one_file"),
    [
        ("pi0", True),
        ("pi05", True),
        ("smolvla", True),
        ("openvla", False),
        ("gr00t", False),
        ("gr00t_n1_7", False),
    ],
)
def test_pi_exports_are_one_file_that_everybody_may_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, one_file: bool
):
    """openpi and lerobot look for model.safetensors alone; at full size pi0 has 7.0 GB, pi0.5 7.2 GB."""
    monkeypatch.setattr(checkpoint.save_weights, "__defaults__", (500_000, False))
    config = load_config(["env=toy", f"model={family}", "model.warm_start=null"]).config.model
    policy, _ = build_policy(config, device="cpu", dtype=torch.float32, seed=0)
    mask = os.umask(0o022)
    try:
        policy.save_pretrained(tmp_path / "export")
    finally:
        os.umask(mask)
    weights = {path.name for path in (tmp_path / "export").glob("model*.safetensors")}
    assert weights == {checkpoint.SINGLE_FILE} if one_file else len(weights) > 1
    files = [path for path in (tmp_path / "export").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o644}
    assert stat.S_IMODE((tmp_path / "export").stat().st_mode) == 0o755
    again, _ = build_policy(
        config.model_copy(update={"model_path": str(tmp_path / "export")}), device="cpu", dtype=torch.float32, seed=1
    )
    for name, tensor in policy.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], tensor, rtol=0, atol=0)
