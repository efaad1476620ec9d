"""What a run saves when something in it fails, with a learner that does what the test says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_learner import ScriptedLearner, scripted_trainer

from embodrl.trainer.loop import Trainer


def failing(
    directory: Path, error: BaseException, late: bool = False, updating: bool = False
) -> tuple[Trainer, list[str]]:
    """Return a trainer of which one iteration is complete, and the next one raises."""
    trainer, did = scripted_trainer(directory, [], "runner.eval_at_start=false")
    learner = trainer.learner
    assert isinstance(learner, ScriptedLearner)

    def fail() -> None:
        learner.is_updating = updating
        trainer.stop.late = 15 if late else 0
        trainer.stop.number = 15 if late else 0
        raise error

    trainer.iteration = 1
    learner.in_step = fail
    return trainer, did


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt])
def test_whatever_is_raised_the_last_complete_iteration_is_saved(kind: type[BaseException], tmp_path: Path) -> None:
    trainer, did = failing(tmp_path, kind("gone"))
    with pytest.raises(kind):
        trainer.run("")
    assert did[:2] == ["undone", "saved 1"]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_hangs_is_undone_and_saved_when_a_signal_interrupts_it_late(
    kind: type[BaseException], tmp_path: Path
) -> None:
    trainer, did = failing(tmp_path, kind(143), late=True)
    assert trainer.run("") == 143 and did[:2] == ["undone", "saved 1"]


def test_an_update_that_is_interrupted_late_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, did = failing(tmp_path, SystemExit(143), late=True, updating=True)
    with pytest.raises(SystemExit):
        trainer.run("")
    assert did == [] and "will start over" in caplog.text


def test_a_row_that_is_written_when_a_late_stop_comes_is_not_written_again(tmp_path: Path) -> None:
    trainer, did = scripted_trainer(tmp_path, [0.5])

    def hang(_: object) -> None:  # as of a terminal that takes no text
        trainer.stop.number = trainer.stop.late = 15
        raise SystemExit(143)

    trainer.journal.view.update = hang  # type: ignore[method-assign]
    assert trainer.run("") == 143
    assert trainer.pending is None and len(trainer.journal.rows) == 1 and did[-2] == "saved 0"


def test_a_row_that_a_tracker_holds_up_is_written_again(tmp_path: Path) -> None:
    trainer, _ = scripted_trainer(tmp_path, [0.5])

    def hang(*_: object) -> None:
        trainer.stop.number = trainer.stop.late = 15
        raise SystemExit(143)

    trainer.journal.metrics._trackers["slow"] = SimpleNamespace(log=hang)  # type: ignore[assignment]
    assert trainer.run("") == 143
    assert trainer.pending is not None and not trainer.journal.rows and not trainer.journal.metrics.content
