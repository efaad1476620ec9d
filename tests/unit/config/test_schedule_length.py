"""The learning-rate schedule of a run that is resumed for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodrl.config import load_config
from embodrl.config.load import load_run
from embodrl.config.schema import Config
from embodrl.hybrid_engines.training.schedule import learning_rates


@pytest.fixture
def run(tmp_path: Path) -> Path:
    loaded = load_config(["env=toy", "model.warm_start=null", "runner.max_iterations=40"])
    path = tmp_path / "config.yaml"
    path.write_text(loaded.to_yaml())
    return path


def schedule_iterations(config: Config) -> int:
    """As ``learning_rates``."""
    return config.actor.optim.schedule_iterations or config.runner.max_iterations


def rate(path: Path, iteration: int, *overrides: str) -> float:
    config = load_run(path, list(overrides), resuming=True).config
    optim = config.actor.optim
    return learning_rates(optim, iteration, config.runner.max_iterations, optim.critic_warmup_iterations).policy


def test_the_learning_rate_does_not_jump_back_up(run: Path) -> None:
    before = rate(run, 39)
    after = [rate(run, iteration, "runner.max_iterations=120") for iteration in (39, 40, 80, 119)]
    assert after[0] == before
    assert all(value <= before for value in after)


def test_it_is_said_and_can_be_chosen(run: Path) -> None:
    loaded = load_run(run, ["runner.max_iterations=120"], resuming=True)
    assert "schedule-kept" in [note.code for note in loaded.notes]
    assert loaded.config.actor.optim.schedule_iterations == 40
    stretched = ["runner.max_iterations=120", "actor.optim.schedule_iterations=120"]
    loaded = load_run(run, stretched, resuming=True)
    assert "schedule-kept" not in [note.code for note in loaded.notes]
    assert schedule_iterations(loaded.config) == 120


def test_a_second_resume_keeps_the_first_length(run: Path) -> None:
    loaded = load_run(run, ["runner.max_iterations=120"], resuming=True)
    run.write_text(loaded.to_yaml())
    again = load_run(run, ["runner.max_iterations=200"], resuming=True)
    assert schedule_iterations(again.config) == 40


def test_without_a_change_nothing_is_noted(run: Path) -> None:
    loaded = load_run(run, [], resuming=True)
    assert loaded.config.actor.optim.schedule_iterations is None and not loaded.notes
