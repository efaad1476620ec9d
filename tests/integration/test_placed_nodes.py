"""Nodes of a pipeline in processes of their own compute what they compute in the main process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from expect import raises_code

import embodrl
from embodrl.errors import ConfigError, EmbodrlError
from embodrl.reporting.rows import is_measured

pytestmark = pytest.mark.slow
MODULE = '''
import os
from pathlib import Path

from embodrl import Pipeline

NODES = "embodrl.pipelines.nodes"


def halve(context, batch):
    """Half of every reward; says in which process."""
    share = f"{os.getpid()} {getattr(context, 'rank', None)} {len(batch)}"
    with Path(os.environ["SEEN"]).open("a") as file:
        file.write(share + "\\n")
    batch.rewards = batch.rewards / 2
    return batch, {"halved/rows": len(batch)}


def dies_once(context, batch):
    marker = Path(os.environ["SEEN"] + ".died")
    if context.rank == 1 and not marker.exists():
        marker.touch()
        os._exit(9)
    return batch


def wrong(context, batch):
    return len(batch)


def build(config):
    name = os.environ["NODE"]
    made = Pipeline("halved").add_node("rollout", f"{NODES}:rollout", role="rollout")
    retries = int(name == "dies_once")
    made.add_node("mine", f"my_placed_nodes:{name}", ("rollout",), "compute", retries)
    made.add_node("advantage", f"{NODES}:advantage", ("mine",), "advantage")
    made.add_node("train", f"{NODES}:train", ("mine", "advantage"), "train")
    return made.add_node("sync", f"{NODES}:sync", ("train",), "sync")
'''
TOY = ["env=toy", "model=mlp", "env.state=full", "env.num_processes=1", "env.train.total_num_envs=5"]
TOY += ["env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=10", "actor.micro_batch_size=10"]
TOY += ["runner.max_iterations=2", "runner.eval_interval=0", "runner.eval_at_start=false", "env.eval.num_episodes=4"]
TOY += ["actor.optim.lr_warmup_iterations=0", "actor.optim.critic_warmup_iterations=0", "runner.logger.console=off"]
TOY += ["cluster.device=cpu", "pipeline.fn=my_placed_nodes:build"]
PLACED = "pipeline.placement={mine: '0:0-1'}"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_placed_nodes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("NODE", "halve")
    monkeypatch.delitem(sys.modules, "my_placed_nodes", raising=False)
    return tmp_path


def rows(directory: Path, *settings: str) -> list[dict[str, Any]]:
    found = embodrl.train([*TOY, *settings, f"runner.output_dir={directory}"]).metrics
    return [{k: v for k, v in row.items() if not (is_measured(k) or k.startswith("halved/"))} for row in found]


def test_two_processes_compute_what_one_does(module: Path) -> None:
    whole = rows(module / "whole")
    seen = module / "seen"
    seen.unlink()
    assert rows(module / "placed", PLACED) == whole
    lines = [line.split() for line in seen.read_text().splitlines()]
    assert len(lines) == 4 and len({pid for pid, *_ in lines}) == 2
    assert {(rank, size) for _, rank, size in lines} == {("0", "2"), ("1", "3")}, "five environments"


def test_a_lost_process_is_another_attempt(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE", "dies_once")
    found = embodrl.train([*TOY, PLACED, f"runner.output_dir={module / 'run'}"]).metrics
    assert [row["pipeline/retries"] for row in found] == [1, 0]


def test_values_that_can_not_be_joined_end_the_run(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE", "wrong")
    with raises_code("pipeline-node-result", EmbodrlError, "mine"):
        embodrl.train([*TOY, PLACED, f"runner.output_dir={module / 'run'}"])


@pytest.mark.parametrize(
    ("placement", "code"),
    [("{other: '0'}", "pipeline-placed-unknown"), ("{train: '0'}", "pipeline-placed-role")],
)
def test_what_can_not_be_placed_is_refused(module: Path, placement: str, code: str) -> None:
    with raises_code(code, ConfigError):
        embodrl.load_config([*TOY, f"pipeline.placement={placement}"])


def test_devices_that_are_not_there_are_refused(module: Path) -> None:
    with raises_code("placed-nodes-have-devices", ConfigError):
        embodrl.load_config([*TOY, "pipeline.placement={mine: '7'}"])
