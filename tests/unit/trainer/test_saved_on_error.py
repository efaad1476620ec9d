"""What a run saves when something in it fails, with a learner that does what the test says."""

from __future__ import annotations

import asyncio
from pathlib import Path

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
