"""Groups of workers in this process: how calls are shared out, copied, and blamed; other launchers in integration/."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from expect import raises_code
from worker_classes import Adder

from embodrl.errors import MessageError, WorkerError
from embodrl.scheduler.group import WorkerGroup


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    with WorkerGroup(Adder, "adder", offset=10).launch(3, "inline") as made:
        yield made


def test_every_rank_knows_its_place(group: WorkerGroup) -> None:
    found = group.where().result()
    assert [(each["rank"], each["size"], each["node"]) for each in found] == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]


def test_arguments_are_copied_as_if_they_were_sent(group: WorkerGroup) -> None:
    values = torch.ones(2)
    group.spoil(values).result()
    assert torch.equal(values, torch.ones(2))
    with pytest.raises(MessageError):
        group.first(object())


def test_the_rank_that_fails_is_named(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as raised:
        group.fail(1).result()
    assert "adder[1]" in str(raised.value)


def test_a_constructor_that_fails_ends_the_start() -> None:
    with raises_code("rank-refused", WorkerError, 2):
        WorkerGroup(Adder, "adder", fail_on=2).launch(3, "inline")
