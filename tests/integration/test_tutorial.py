"""The tutorial works as printed: its files, its commands at the smallest size, and its Python script."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tutorial
from runs import embodrl

from embodrl.config.compose import concerning

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
ENV = [
    *("env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=20", "env.num_processes=1"),
    *("env.pin_cpus=false", "env.eval.total_num_envs=4", "env.eval.num_episodes=4", "cluster.num_threads=1"),
]
RUN = [
    *("algorithm.group_size=2", "actor.global_batch_size=4", "actor.micro_batch_size=4", "runner.max_iterations=1"),
    *("actor.optim.lr_warmup_iterations=0", "runner.logger.tensorboard=false"),
]
TINY = {
    "collect": [*ENV, *RUN, "collect.num_episodes=4"],
    "sft": [*ENV, *RUN, "sft.max_steps=2", "sft.lr_warmup_steps=0", "sft.batch_size=4"],
    "train": [*ENV, *RUN],
    "resume": ["runner.max_iterations=2"],
}
"""Verb -> what makes it small; other verbs have it from the run."""


def test_the_tutorial_works_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = tmp_path / "my_task"
    task.mkdir()
    tutorial.write_files(task)
    for name in ("new_model.py", "small_vla.py"):
        shutil.copy(ROOT / "examples" / "new_model" / name, task)
    commands = tutorial.commands()
    assert {arguments[0] for arguments in commands} >= {"collect", "sft", "eval", "train", "resume", "config"}
    for arguments in commands:
        tiny = TINY.get(arguments[0], [])
        if arguments[0] == "eval" and "--config" in arguments:
            tiny = [*ENV, *RUN]
        verb = "train" if arguments[0] == "resume" else arguments[0]
        outcome = embodrl(*arguments, *concerning(tiny, verb), search_path=task)
        assert outcome.code == 0, f"embodrl {' '.join(arguments)}: {outcome.stderr}"
        if arguments[:2] == ["config", "diff"]:
            assert "env.env_type" in outcome.stdout
    assert (tmp_path / "outputs" / "dock" / "report.html").is_file()

    overrides = "[" + ", ".join(map(repr, concerning(TINY["train"], "train"))) + ", "
    script = tutorial.script().replace("[", overrides, 1)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(task), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "eval.html" in done.stdout
