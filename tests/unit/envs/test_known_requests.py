"""A request that a signal interrupts: it counts as in progress unless nothing of it was sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from expect import raises_code

from embodrl.envs.pool.episodes import EnvEpisodes
from embodrl.envs.pool.process import SimulatorProcess
from embodrl.errors import EnvError, MessageError
from embodrl.processes.frames import Frame, Kind


@dataclass
class InterruptedChild:
    """A process that takes frames, and a signal that comes right after or before that."""

    error: BaseException
    after: bool
    pid: int = 1
    log_path: Path | None = None
    taken: list[Frame] = field(default_factory=list)
    is_killed: bool = False

    @property
    def connection(self) -> Any:
        return self

    def send(self, frame: Frame, deadline: float | None = None) -> None:
        if self.after:
            self.taken.append(frame)
        raise self.error

    def kill(self) -> None:
        self.is_killed = True


def process_of(child: InterruptedChild) -> SimulatorProcess:
    class Start:
        interpreter = "python"

        def __call__(self, memory_fd: int, heartbeat_s: float) -> Any:
            return child

    process = SimulatorProcess(Start(), EnvEpisodes("env/0", "toy", 0, True))
    process.start(1.0)
    process._pending = None  # as after START was answered
    return process


def test_a_signal_right_after_the_send_leaves_a_known_request() -> None:
    child = InterruptedChild(SystemExit(143), after=True)
    process = process_of(child)
    with pytest.raises(SystemExit):
        process.request(Kind.STEP, 1.0, count=2)
    assert process.pending == Kind.STEP and len(child.taken) == 1
    with raises_code("env-order", EnvError):
        process.request(Kind.GET_STATE, 1.0)
    process.close_async(1.0)  # behind that request, CLOSE would wait forever
    assert child.is_killed and process.pending is None


@pytest.mark.parametrize("error", [MessageError("a value of another type", ""), OSError(24, "Too many open files")])
def test_a_request_that_was_not_sent_is_not_in_progress(error: Exception) -> None:
    process = process_of(InterruptedChild(error, after=False))
    slot = process._slot
    with pytest.raises(type(error)):
        process.request(Kind.STEP, 1.0, count=2)
    assert process.pending is None and process._slot == slot
    process.drop()
