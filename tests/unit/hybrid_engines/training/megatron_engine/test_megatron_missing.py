"""The backend megatron where its package is not installed."""

from __future__ import annotations

import sys

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.errors import MissingDependencyError
from embodrl.hybrid_engines.training.megatron import spec
from embodrl.hybrid_engines.training.megatron.core import megatron

ARGUMENTS = ("actor=megatron", "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}", "cluster.device=cpu")


def test_the_configuration_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "has_megatron", lambda: False)
    with raises_code("megatron-is-installed") as caught:
        load_config(list(ARGUMENTS))
    assert [problem.key for problem in caught.value.problems] == ["actor.training_backend"]
    monkeypatch.setattr(spec, "has_megatron", lambda: True)
    assert load_config(list(ARGUMENTS)).config.actor.tensor_parallel_size == 2


def test_whoever_calls_it_directly_is_notified_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    with raises_code("missing-dependency", MissingDependencyError, "embodrl[megatron]"):
        megatron("parallel_state")
