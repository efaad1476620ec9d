"""How a simulation that has diverged is noticed, with a stand-in for MuJoCo, which resets itself as that does."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from embodrl.envs.mujoco.divergence import Divergence

KINDS = {"mjWARN_CONTACTFULL": 1, "mjWARN_BADQPOS": 4, "mjWARN_BADQVEL": 5, "mjWARN_BADQACC": 6}
BAD = [name for name in KINDS if "BAD" in name]


class FakeData:
    """What there is of an ``MjData``: counts of warnings, which a breakdown sets to one, whatever they were."""

    def __init__(self) -> None:
        self.warning = [SimpleNamespace(number=0) for _ in range(8)]

    def reset(self) -> None:
        for warning in self.warning:
            warning.number = 0

    def break_down(self, kind: str) -> None:
        self.reset()
        self.warning[KINDS[kind]].number += 1


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> FakeData:
    monkeypatch.setitem(sys.modules, "mujoco", SimpleNamespace(MjData=FakeData, mjtWarning=SimpleNamespace(**KINDS)))
    return FakeData()


@pytest.mark.parametrize("kind", BAD)
def test_every_breakdown_is_reported_once(data: FakeData, kind: str) -> None:
    watch = Divergence()
    assert not watch.struck(data)
    for _ in range(3):
        data.break_down(kind)
        assert watch.struck(data)
        assert not watch.struck(data)


def test_a_reset_forgets_and_other_warnings_do_not_count(data: FakeData) -> None:
    watch = Divergence()
    data.break_down("mjWARN_BADQVEL")
    data.reset()
    assert not watch.struck(data)
    data.warning[KINDS["mjWARN_CONTACTFULL"]].number = 9
    assert not watch.struck(data)
    assert data.warning[KINDS["mjWARN_CONTACTFULL"]].number == 9


def test_data_that_are_made_again_are_watched(data: FakeData) -> None:
    watch = Divergence()
    assert not watch.struck(data)
    other = FakeData()
    other.break_down("mjWARN_BADQPOS")
    assert watch.struck(other) and not watch.struck(data)


def test_without_mujoco_nothing_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Divergence().struck(None)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    assert not Divergence().struck(FakeData())
