"""The benchmark of rollout backends at its smallest; the figures themselves mean nothing here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make test-vllm` makes an environment that has it", allow_module_level=True)

import rollout_backends

pytestmark = pytest.mark.timeout(1800)


def test_rollout_backends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rollout_backends, "NUM_ROUNDS", 2)
    path = tmp_path / "rollout.json"
    assert rollout_backends.main(path, (1, 3)) == 0
    result = json.loads(path.read_text())
    assert list(result["batches"]) == ["1", "3"]
    for batch, sides in result["batches"].items():
        assert list(sides) == ["native", "vllm", "generate"]
        for side in sides.values():
            actions = int(batch) * result["chunk"]
            assert side["actions_s"] == pytest.approx(1000 * actions / side["median_ms"], rel=0.02)
            assert side["samples"] == 2
    assert 0 < result["max_logprob_difference"] < 1e-4
