"""The policy of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from expect import raises_code
from torch import nn

from embodrl.config.schema import Config
from embodrl.errors import CheckpointError
from embodrl.runs import policies
from embodrl.storage.checkpoint import CheckpointManager, open_checkpoint
from embodrl.trainer.settings import STATE_DIM


class Policy(nn.Linear):
    seen_state_dim: int | None = None


def source(run: Path, policy: nn.Module, state: dict[str, object]) -> policies.PolicySource:
    saved = CheckpointManager(run, 1).save(1, {"policy": dict(policy.state_dict())}, state)
    return policies.PolicySource(None, open_checkpoint(saved), run)


@pytest.mark.parametrize("dim", [None, 0, 4])
def test_the_trained_state_comes_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int | None):
    monkeypatch.setattr(policies, "build_policy", lambda *_: Policy(2, 2))
    of_this_version: dict[str, object] = {STATE_DIM: dim}
    assert source(tmp_path / "a", Policy(2, 2), of_this_version).make_policy(Config()).seen_state_dim == dim
    assert source(tmp_path / "b", Policy(2, 2), {}).make_policy(Config()).seen_state_dim is None


def test_weights_of_another_policy_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "build_policy", lambda *_: Policy(2, 2))
    with raises_code("checkpoint-mismatch", CheckpointError):
        source(tmp_path, Policy(3, 2), {}).make_policy(Config())
