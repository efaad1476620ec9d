"""Requests answered in batches: an error in the pump itself is raised in every waiting caller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from embodrl.processes.batching import BatchPump, Request


class Doubling(BatchPump[int, int]):
    """Doubles, and fails where a test wants it to."""

    fails = ""

    def choose(self, waiting: list[Request[int, int]]) -> list[Request[int, int]]:
        if self.fails == "choose":
            raise RuntimeError("choose")
        return waiting[:2]

    def compute(self, batch: list[int]) -> Sequence[int]:
        if self.fails == "compute":
            raise RuntimeError("compute")
        return [2 * number for number in batch][: 1 if self.fails == "too few answers" else None]


def answers(fails: str) -> list[object]:
    async def ask() -> list[object]:
        pump.fails = fails
        failed = await asyncio.gather(*(pump.submit(Request(n)) for n in range(3)), return_exceptions=True)
        pump.fails = ""
        assert await asyncio.gather(*(pump.submit(Request(n)) for n in range(3))) == [0, 2, 4], "it continues"
        return list(failed)

    pump = Doubling("pump")
    try:
        return asyncio.run(asyncio.wait_for(ask(), 60.0))
    finally:
        pump.close()


def test_all_are_answered_in_batches() -> None:
    assert answers("") == [0, 2, 4]


@pytest.mark.parametrize("fails", ["choose", "compute", "too few answers"])
def test_no_request_waits_for_a_pump_that_failed(fails: str) -> None:
    found = answers(fails)
    assert [isinstance(each, Exception) for each in found[1:]] == [True, True]
