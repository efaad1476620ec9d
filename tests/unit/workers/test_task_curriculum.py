"""Tasks chosen by their success so far, on the toy environment in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expect import raises_code
from test_starts import AGAIN, Worker, check_resume, config_of, fresh, iterate

from embodrl.config.schema import TaskCurriculumConfig, TaskPartConfig
from embodrl.errors import CheckpointError
from embodrl.fields import Fields
from embodrl.workers.task_curriculum import TaskCurriculum

STAGES: dict[str, Any] = {"kind": "stages", "success_rate": 0.5}
BETWEEN: dict[str, Any] = {"kind": "between", "low": 0.25, "high": 0.75, "factor": 3.0}
PARTS = "env.train.task_curriculum.parts="
BOTH = f"{PARTS}[{{kind: stages, success_rate: 0.0}}, {{kind: between, low: 0.1, high: 0.9, factor: 3.0}}]"
WINDOW = "env.train.task_curriculum.window=4"


def curriculum(*parts: dict[str, Any], tasks: int = 3) -> TaskCurriculum:
    settings = TaskCurriculumConfig(parts=tuple(TaskPartConfig(**part) for part in parts), window=2)
    return TaskCurriculum([f"task-{number}" for number in range(tasks)], settings)


def test_tasks_join_one_after_the_other() -> None:
    tasks = curriculum(STAGES)
    assert tasks.probabilities().tolist() == [1, 0, 0]
    tasks.learn([(0, True)])
    assert tasks.probabilities().tolist() == [1, 0, 0], "the window of the first is not full"
    tasks.learn([(0, True)])
    assert tasks.probabilities().tolist() == [0.5, 0.5, 0], "1 of 0.5 needed"
    tasks.learn([(1, False), (1, False), (0, False)])
    assert tasks.probabilities().tolist() == [0.5, 0.5, 0], "the mean of 0.5 and 0"
    tasks.learn([(1, True)])
    assert tasks.probabilities().tolist() == [1 / 3] * 3, "the mean of 0.5 and 0.5"
    tasks.learn([(0, False), (1, False), (1, False)])
    assert tasks.probabilities().tolist() == [1 / 3] * 3, "what has joined stays"


def test_tasks_between_the_bounds_are_played_more_often() -> None:
    tasks = curriculum(BETWEEN)
    assert tasks.probabilities().tolist() == [1 / 3] * 3
    tasks.learn([(0, True), (0, False), (1, True), (1, True)])
    # 0.5 is within, 1 above, and of the third nothing is known.
    np.testing.assert_allclose(tasks.probabilities(), [3 / 7, 1 / 7, 3 / 7])


def test_parts_are_multiplied() -> None:
    tasks = curriculum(STAGES, BETWEEN)
    tasks.learn([(0, True), (0, True)])
    np.testing.assert_allclose(tasks.probabilities(), [1 / 4, 3 / 4, 0])
    assert tasks.metrics()["curriculum/task-1/probability"] == pytest.approx(3 / 4)
    drawn = tasks.draw(np.random.default_rng(0), 400)
    assert set(drawn.tolist()) == {0, 1} and drawn.dtype == np.int32
    assert np.mean(drawn) == pytest.approx(3 / 4, abs=0.07)


def test_a_state_of_other_parts_is_refused() -> None:
    tasks = curriculum(STAGES, BETWEEN)
    tasks.learn([(0, True), (0, True), (1, False)])
    saved = Fields(tasks.state(), "a state", CheckpointError)
    again = curriculum(STAGES, BETWEEN)
    again.load_state(saved)
    assert again.state() == tasks.state() and again.probabilities().tolist() == tasks.probabilities().tolist()
    for other in (curriculum(STAGES), curriculum(BETWEEN, STAGES), curriculum(STAGES, BETWEEN, tasks=2)):
        with raises_code("checkpoint-other-settings", CheckpointError):
            other.load_state(saved)
    with pytest.raises(CheckpointError, match="outcomes of 1 task"):
        again.load_state(Fields(tasks.state() | {"recent": [{"solved": []}]}, "a state", CheckpointError))


def test_rollouts_begin_with_the_drawn_tasks() -> None:
    worker = Worker(config_of(BOTH, WINDOW, "algorithm.group_size=2", "env.train.auto_reset=false"))
    batch, metrics = worker.gather(0)
    assert {task for _, task in worker.pairs(0)} == {0} and not batch.task_id.any()
    assert [seed for seed, _ in worker.pairs(0)] == [seed for seed, _ in fresh(worker, 0)]
    assert worker.starts.tasks is not None and worker.starts.tasks.recent[0] != []
    assert metrics["curriculum/reach-green/probability"] > 0, "any success rate lets the second join"  # pyright: ignore[reportOptionalOperand]
    worker.update_weights([], 1)
    batches = iterate(worker, range(1, 4))
    assert any(bool(each.task_id.any()) for each in batches)
    for rollout in range(4):
        assert worker.pairs(rollout)[::2] == worker.pairs(rollout)[1::2], "groups play one task"
        expected = [task for _, task in worker.pairs(rollout)]
        assert ([batch, *batches][rollout].task_id[0]).tolist() == expected


def test_tasks_resume_to_the_bit_beside_failed_seeds() -> None:
    check_resume(config_of(BOTH, WINDOW, AGAIN))


def test_an_undone_update_leaves_no_outcomes() -> None:
    worker = Worker(config_of(BOTH, WINDOW))
    iterate(worker, range(1))
    before = worker.starts.state()
    worker.gather(1)
    assert worker.starts.state() != before
    worker.undo()
    assert worker.starts.state() == before
    worker.gather(1)
    assert worker.pairs(-1) == worker.pairs(-2)
