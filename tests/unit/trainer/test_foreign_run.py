"""Runs that somebody else has made: pipes in place of their files, and checkpoints whose checksums are right."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch
from expect import raises_code

from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.training.state_shapes import HAS_MOMENTS, StateShapes, check_fit
from embodrl.storage.checkpoint import CheckpointManager, open_checkpoint
from embodrl.trainer import files
from embodrl.trainer.settings import last_settings, write_settings


def test_a_pipe_in_place_of_the_settings_is_replaced(tmp_path: Path) -> None:
    assert last_settings(tmp_path) is None
    os.mkfifo(tmp_path / "config.yaml")
    assert last_settings(tmp_path) == ""
    text = write_settings(tmp_path, "runner: {seed: 1}\n", [])
    assert last_settings(tmp_path) == text


def test_metrics_that_unpack_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_METRICS_BYTES", 1000)
    manager = CheckpointManager(tmp_path, 3)
    for step, packed in enumerate((zlib.compress(b"{}\n"), zlib.compress(bytes(2000)), b"junk"), start=1):
        saved = open_checkpoint(manager.save(step, {}, {"iteration": step}, {files.METRICS_BLOB: packed}))
        if step == 1:
            assert files.saved_metrics(saved) == b"{}\n"
            continue
        with raises_code("checkpoint-damaged", CheckpointError):
            files.saved_metrics(saved)


def test_moments_that_are_lost_are_refused() -> None:
    shape = {"weight": (2,)}
    shapes = StateShapes(shape, shape, {}, 0)
    moments = {f"{key}.weight": torch.zeros(2) for key in ("exp_avg", "exp_avg_sq")} | {
        "step.weight": torch.tensor(1.0)
    }
    policy = {"weight": torch.zeros(2)}
    check_fit({"policy": policy, "optimizer": moments}, shapes, {HAS_MOMENTS: 1})
    check_fit({"policy": policy, "optimizer": {}}, shapes, {HAS_MOMENTS: 0})
    with raises_code("checkpoint-damaged", CheckpointError):
        check_fit({"policy": policy, "optimizer": {}}, shapes, {HAS_MOMENTS: 1})
