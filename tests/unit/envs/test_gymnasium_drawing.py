"""An environment of Gymnasium whose drawing wants a package that is not there."""

from __future__ import annotations

import sys

import pytest
from expect import raises_code


def test_the_package_that_the_first_picture_wants_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    from embodrl.envs.gymnasium.env import GymnasiumSimulator

    monkeypatch.setitem(sys.modules, "pygame", None)
    with raises_code("gymnasium-drawing") as caught:
        GymnasiumSimulator("Pendulum-v1", (64, 64), (64, 64), "swing up", "return", -1e9, 10, "auto")
    assert "pygame" in caught.value.hint
