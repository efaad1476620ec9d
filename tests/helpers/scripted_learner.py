"""A trainer whose learner does what a test says, and whose checkpoints are lines of a list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from embodrl.config import load_config
from embodrl.learners.base import Learner, LearnerState
from embodrl.reporting.metrics_file import Row
from embodrl.reporting.sinks import MetricsLogger
from embodrl.storage.checkpoint import Checkpoint
from embodrl.trainer.evaluations import Evaluations
from embodrl.trainer.journal import Journal
from embodrl.trainer.loop import Trainer
from embodrl.trainer.saving import Saver
from embodrl.trainer.schedule import Schedule
from embodrl.trainer.session import RunSession
from embodrl.trainer.stop import StopSignal


class ScriptedLearner(Learner):
    """Counts iterations; evaluations find the given success rates."""

    def __init__(self, did: list[str], rates: list[float]) -> None:
        engine: Any = SimpleNamespace(
            version=0, weights=list, onload=lambda: None, fetch=lambda: None, check=lambda: None
        )
        super().__init__(SimpleNamespace(), engine)  # type: ignore[arg-type]
        self.did = did
        self.rates = rates
        self.every_decoding: list[bool] = []
        self.in_step: Callable[[], None] = lambda: None

    def step(self, iteration: int) -> Row:
        self.in_step()
        return {"iteration": iteration + 1}

    def evaluate(self, video_dir: Path | None, every_decoding: bool) -> Row:
        self.every_decoding.append(every_decoding)
        return {"eval/success_rate": self.rates.pop(0)}

    def undo(self) -> None:
        self.did.append("undone")

    def state(self) -> LearnerState:
        return LearnerState({})

    def load_state(self, checkpoint: Checkpoint) -> None: ...


class NotedSaver(Saver):
    """Writes no file."""

    did: list[str]

    def save(self, iteration: int, content: dict[str, object], metrics: bytearray) -> bool:
        self.did.append(f"saved {iteration}")
        self.newest = Path(f"step_{iteration}")
        return True


def scripted_trainer(
    directory: Path, rates: list[float], *settings: str, beside: Any = None
) -> tuple[Trainer, list[str]]:
    """Return a trainer of six iterations, with an evaluation after every second one, and what it does."""
    loaded = load_config(
        ["env=toy", "runner.max_iterations=6", "runner.eval_interval=2", "runner.save_interval=100", *settings]
    )
    config, did = loaded.config, list[str]()
    lock: Any = SimpleNamespace(check=lambda: None)
    session = RunSession(loaded, directory, lock, StopSignal(), None, None)
    learner = ScriptedLearner(did, rates)
    view: Any = SimpleNamespace(
        phase=lambda *_: None, update=lambda _: None, late=lambda _: None, message=lambda text: did.append(text)
    )
    journal = Journal(MetricsLogger(directory, config.runner.logger, trackers={}), view, is_warm=False)
    saver = NotedSaver(session, learner)
    saver.did = did
    checkpoints: Any = SimpleNamespace(keep_best=lambda iteration: did.append(f"best {iteration}"))
    evaluations = Evaluations(session, learner, journal, checkpoints, beside)
    return Trainer(session, learner, Schedule.of_training(config), journal, evaluations, saver), did
