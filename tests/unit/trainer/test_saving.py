"""Checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_learner import ScriptedLearner

from embodrl.config import load_config
from embodrl.errors import OutputError
from embodrl.trainer.saving import Saver
from embodrl.trainer.session import RunSession
from embodrl.trainer.stop import StopSignal


def test_a_run_that_has_lost_its_directory_saves_nothing(tmp_path: Path) -> None:
    def check() -> None:
        raise OutputError("the run has lost its directory")

    lock: Any = SimpleNamespace(check=check)
    session = RunSession(load_config(["env=toy"]), tmp_path, lock, StopSignal(), None, None)
    with pytest.raises(OutputError):
        Saver(session, ScriptedLearner([], [])).save(1, {}, bytearray())
    assert not list(tmp_path.iterdir())
