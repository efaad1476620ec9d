"""What a run saves when something in it fails, with a runner that only notes what it does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embodrl.config import load_config
from embodrl.runs.loop import Runner
from embodrl.runs.stop import StopSignal


class Noting(Runner):
    """One iteration is complete, and the next one raises."""

    def __init__(self, error: BaseException, late: bool = False, updating: bool = False) -> None:
        def run(*_: object, **__: object) -> None:
            self._updating = updating
            self.stop.late = late
            self.stop.number = 15 if late else 0
            raise error

        def fine(*_: object) -> None: ...

        self.did: list[str] = []
        self.stop, self.pending, self.iteration, self.saved, self._updating = StopSignal(), None, 1, False, False
        self.run_dir, self._last_saved = Path("run"), None
        self.config: Any = SimpleNamespace(
            rollout=SimpleNamespace(publish_weights=False),
            runner=load_config(["env=toy", "runner.max_iterations=3"]).config.runner,
        )
        self.rows = []
        self.lock: Any = SimpleNamespace(check=fine)
        self.phases: Any = SimpleNamespace(enter=fine)
        self.rewards: Any = SimpleNamespace(state=dict)
        self.engine: Any = SimpleNamespace(onload=fine)
        self.graph: Any = SimpleNamespace(run=run)
        self.shuffle: Any = SimpleNamespace(get_state=lambda: SimpleNamespace(numpy=lambda: b""))
        self.publisher, self.beside, self._regressed = None, None, None
        self.run_dir = Path("run")

    def _publish(self) -> None: ...

    def _context(self) -> Any: ...

    def _undo(self) -> None:
        self.did.append("undone")

    def _save(self) -> None:
        self.did.append("saved")
        self.saved = True


@pytest.fixture(autouse=True)
def no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("capture_rng", "generator_state"):
        monkeypatch.setattr(f"embodrl.runs.loop.{name}", lambda *_: None)
    monkeypatch.setattr("embodrl.runs.loop.lost_trainers", lambda _: False)


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt])
def test_whatever_is_raised_the_last_complete_iteration_is_saved(kind: type[BaseException]) -> None:
    runner = Noting(kind("gone"))
    with pytest.raises(kind):
        runner.run("")
    assert runner.did == ["undone", "saved"]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_hangs_is_undone_and_saved_when_a_signal_interrupts_it_late(kind: type[BaseException]) -> None:
    runner = Noting(kind(143), late=True)
    assert runner.run("") == 143 and runner.did == ["undone", "saved"]


def test_an_update_that_is_interrupted_late_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    runner = Noting(SystemExit(143), late=True, updating=True)
    with pytest.raises(SystemExit):
        runner.run("")
    assert runner.did == [] and "will start over" in caplog.text
