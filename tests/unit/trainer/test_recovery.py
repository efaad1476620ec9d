"""Runs that lose their training processes: what is tried again, from where, and how often."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from expect import raises_code

from embodrl.config import LoadedConfig, load_config
from embodrl.errors import OutputError, WorkerDied, WorkerRaised
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager
from embodrl.trainer.session import (
    PlacementChangedError,
    RunSession,
    TrainersLostError,
    lost_trainers,
    run_with_restarts,
)
from embodrl.trainer.settings import write_settings


class Engine:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def restarted(
    execute: Callable[[Checkpoint | None, bool], str | None],
    loaded: LoadedConfig,
    run_dir: Path,
    check: Callable[[], None] = lambda: None,
) -> str | None:
    """Execute a new run, which writes its settings before anything can be lost."""
    write_settings(run_dir, "runner: {seed: 1}\n", [])

    def work(session: RunSession) -> str | None:
        return execute(session.checkpoint, session.old_settings is not None)

    lock: Any = SimpleNamespace(check=check)
    return run_with_restarts(loaded, run_dir, lock, work)


def config(max_restarts: int) -> LoadedConfig:
    return load_config(["env=toy", f"actor.max_restarts={max_restarts}"])


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


def moved(tmp_path: Path, second: Callable[[RunSession], str]) -> tuple[list[tuple[float, int, str]], str]:
    """Let a run move after iteration 2; return share, rebalance and checkpoint of each attempt, and the end."""
    here = load_config(["env=toy"]).with_training_share(0.4)
    cluster = here.config.cluster.model_copy(update={"rebalance": 2})
    here.config = here.config.model_copy(update={"cluster": cluster})
    attempts: list[tuple[float, int, str]] = []

    def work(session: RunSession) -> str:
        cluster = session.config.cluster
        where = "none" if session.checkpoint is None else session.checkpoint.path.name
        attempts.append((cluster.training_share, cluster.rebalance, where))
        if len(attempts) == 1:
            CheckpointManager(tmp_path, 2).save(2, {}, {"iteration": 2})
            raise PlacementChangedError(session.loaded.with_training_share(0.7), "measured")
        return second(session) if len(attempts) == 2 else "stayed"

    write_settings(tmp_path, "runner: {seed: 1}\n", [])
    lock: Any = SimpleNamespace(check=lambda: None)
    return attempts, run_with_restarts(here, tmp_path, lock, work)


def test_a_run_that_moves_continues_from_its_checkpoint(tmp_path: Path) -> None:
    attempts, end = moved(tmp_path, lambda session: "moved")
    assert (attempts, end) == ([(0.4, 2, "none"), (0.7, 2, "step_2")], "moved")


def test_a_run_stays_where_it_was_if_it_can_not_be_started_elsewhere(tmp_path: Path) -> None:
    def second(session: RunSession) -> str:
        raise WorkerDied("actor[1] did not come up")

    attempts, end = moved(tmp_path, second)
    assert (attempts, end) == ([(0.4, 2, "none"), (0.7, 2, "step_2"), (0.4, 0, "step_2")], "stayed")


def test_an_error_after_the_start_elsewhere_ends_the_run(tmp_path: Path) -> None:
    def second(session: RunSession) -> str:
        session.engine = Engine()  # type: ignore[assignment]
        raise WorkerRaised("actor[0] raised ValueError in update: wrong")

    with pytest.raises(WorkerRaised):
        moved(tmp_path, second)


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
