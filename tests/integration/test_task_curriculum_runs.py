"""A run whose second task joins later, resumed to the bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from runs import embodrl, metrics
from test_by_task_runs import SETTINGS

PARTS = "[{kind: stages, success_rate: 0.0}, {kind: between, low: 0.9, high: 1.0, factor: 3.0}]"
CURRICULUM = [
    *SETTINGS,
    f"env.train.task_curriculum.parts={PARTS}",
    "env.train.task_curriculum.window=8",
    "runner.max_iterations=3",
    "algorithm.rollout_epoch=1",
    "extensions=[stop_at]",
]


@pytest.mark.slow
def test_a_task_joins_and_the_run_resumes(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert embodrl("train", *CURRICULUM, f"runner.output_dir={whole}").code == 0
    rows: list[dict[str, Any]] = metrics(whole)
    first = next(row for row in rows if row["iteration"] == 1)
    assert first["rollout/reach-green/episodes"] == 0, "the first task alone"
    assert first["curriculum/reach-green/probability"] in (0.5, 0.75)  # by the success of the first
    assert rows[-1]["rollout/reach-green/episodes"] > 0
    outcome = embodrl("train", *CURRICULUM, f"runner.output_dir={stopped}", stop_at="log:3:SIGKILL")
    assert outcome.code == -signal.SIGKILL
    assert embodrl("resume", stopped).code == 0
    assert metrics(stopped) == rows
