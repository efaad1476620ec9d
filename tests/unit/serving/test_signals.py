"""Signals that stop a server, in the process of the command line and in one of the user's."""

import asyncio
import signal

import pytest

from embodrl.serving import server


@pytest.mark.parametrize("is_ours", [False, True])
def test_the_guard_keeps_the_time_of_the_command_line_alone(is_ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(server, "owns_process", lambda: is_ours)
    for name in ("watch_signals", "keep_time", "release_signals"):
        monkeypatch.setattr(server, name, lambda *_, name=name: said.append(name))

    async def serve() -> int:
        asked: asyncio.Queue[int] = asyncio.Queue()
        with server.stopped_by_signals(asked.put_nowait, 5.0):
            signal.raise_signal(signal.SIGTERM)
            return await asyncio.wait_for(asked.get(), 60.0)

    assert asyncio.run(serve()) == signal.SIGTERM
    assert said == (["watch_signals", "keep_time"] if is_ours else ["release_signals"])
