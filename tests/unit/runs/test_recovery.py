"""Runs that lose their training processes: what is tried again, from where, and how often."""

from collections.abc import Callable
from pathlib import Path

import pytest
from expect import raises_code

from embodrl.config.schema import Config
from embodrl.errors import OutputError, WorkerDied, WorkerRaised
from embodrl.runs.recovery import TrainersLostError, attempts, lost_trainers
from embodrl.runs.settings import write_settings
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager


class Engine:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def restarted(
    execute: Callable[[Checkpoint | None, bool], str | None],
    config: Config,
    run_dir: Path,
    check: Callable[[], None] = lambda: None,
) -> str | None:
    """Execute a new run, which writes its settings before anything can be lost."""
    write_settings(run_dir, "runner: {seed: 1}\n", [])
    for attempt in attempts(config, run_dir, None, None, check):
        with attempt:
            return execute(attempt.checkpoint, attempt.old_settings is not None)
    raise AssertionError("attempts ends by raising")


def config(max_restarts: int) -> Config:
    return Config.model_validate({"actor": {"max_restarts": max_restarts}})


def test_a_run_begins_again_at_its_newest_checkpoint(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def execute(checkpoint: Checkpoint | None, again: bool) -> str:
        seen.append(("none" if checkpoint is None else checkpoint.path.name, again))
        if len(seen) < 4:
            if len(seen) > 1:
                CheckpointManager(tmp_path, 2).save(len(seen), {}, {"iteration": len(seen)})
            raise TrainersLostError(WorkerDied("actor[0] was killed by SIGKILL"))
        return "done"

    assert restarted(execute, config(3), tmp_path) == "done"
    assert seen == [("none", False), ("none", True), ("step_2", True), ("step_3", True)]


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_after_the_last_restart_the_error_is_raised_with_what_can_be_done(tmp_path: Path, max_restarts: int) -> None:
    tries: list[bool] = []

    def execute(checkpoint: Checkpoint | None, again: bool) -> None:
        tries.append(again)
        raise TrainersLostError(WorkerDied("actor[0] was killed by SIGKILL"))

    with raises_code("worker-died", WorkerDied, "actor[0]") as caught:
        restarted(execute, config(max_restarts), tmp_path)
    assert len(tries) == max_restarts + 1
    assert ("stopped after 2 restarts" in caught.value.message) == (max_restarts > 0)
    assert "rerun the command" in caught.value.hint


@pytest.mark.parametrize(
    ("error", "lost"), [(None, False), (WorkerDied("actor[0] was killed"), True)], ids=["lives", "died"]
)
def test_the_engine_knows_whether_its_processes_are_lost(error: Exception | None, lost: bool) -> None:
    assert lost_trainers(Engine(error)) is lost  # type: ignore[arg-type]


def test_other_errors_are_not_tried_again(tmp_path: Path) -> None:
    tries: list[bool] = []

    def execute(checkpoint: Checkpoint | None, again: bool) -> None:
        tries.append(again)
        raise WorkerRaised("actor[0] raised ValueError in update: wrong")

    with pytest.raises(WorkerRaised):
        restarted(execute, config(3), tmp_path)
    assert tries == [False]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    def execute(checkpoint: Checkpoint | None, again: bool) -> None:
        assert not again
        saved = CheckpointManager(tmp_path, 1).save(4, {}, {"iteration": 4})
        (saved / "manifest.json").write_text("{")
        raise TrainersLostError(WorkerDied("actor[0] was killed by SIGKILL"))

    with raises_code("worker-died", WorkerDied):
        restarted(execute, config(3), tmp_path)


def test_a_run_without_its_directory_is_not_restarted(tmp_path: Path) -> None:
    def check() -> None:
        raise OutputError("the run has lost its directory")

    tries: list[bool] = []

    def execute(checkpoint: Checkpoint | None, again: bool) -> None:
        tries.append(again)
        raise TrainersLostError(WorkerDied("actor[0] was killed by SIGKILL"))

    with pytest.raises(OutputError):
        restarted(execute, config(3), tmp_path, check)
    assert tries == [False]
