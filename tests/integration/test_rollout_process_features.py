"""What a run can do in one process it also does with rollout processes, with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import embodrl, metrics
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

TWO = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"
IN_GROUPS = (
    "env.tasks=[reach-red]",
    "env.train.total_num_envs=8",
    "env.train.auto_reset=false",
    "env.train.max_steps_per_rollout_epoch=6",
    "algorithm.group_size=4",
    "actor.optim.critic_warmup_iterations=0",
)
FEATURES = {
    "lora": ("model.trainable=lora",),
    "offload": ("actor.enable_offload=true", "rollout.enable_offload=true", "env.enable_offload=true"),
    "offload of processes apart": (
        "actor.own_process=true",
        "actor.enable_offload=true",
        "rollout.enable_offload=true",
    ),
    "groups": ("algorithm=grpo", *IN_GROUPS),
    "further rollouts for the groups": ("algorithm=dapo", *IN_GROUPS),
    "judged by what they see": ("algorithm=srpo", *IN_GROUPS),
    "several rollouts": ("algorithm.rollout_epoch=2",),
    "stages": ("rollout.pipeline_stages=2", "env.num_processes=4"),
    "videos": ("env.video.enabled=true",),
    "published weights": ("rollout.publish_weights=true", "model.trainable=head"),
    "shards": ("runner.checkpoint_format=sharded", "actor.own_process=true"),
}
IN_SHORT = ("offload",)
ALL = [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.long) for name in FEATURES]


def facts(run_dir: Path) -> list[dict[str, object]]:
    """Return the metrics that do not tell of this machine, nor of processes."""
    rows = metrics(run_dir)
    return [{n: v for n, v in row.items() if not n.startswith("memory/") and n != "rollout/restarts"} for row in rows]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.long
def test_a_feature_gives_the_same_run(config: Path, tmp_path: Path, name: str) -> None:
    runs = tmp_path / "one", tmp_path / "two"
    # Threads of a stage draw in another order than processes that have stages; such a run is the same again.
    first = TWO if name == "stages" else "cluster.num_threads=2"
    for run_dir, where in zip(runs, (first, TWO), strict=True):
        order = ("runner.max_iterations=2", f"runner.output_dir={run_dir}", *FEATURES[name], where)
        done = embodrl("train", "--config", config, *order)
        assert done.code == 0, done.stderr
    one, two = runs
    assert facts(one) == facts(two)
    mine, theirs = (load_file(run_dir / "policy" / "model.safetensors") for run_dir in runs)
    assert mine.keys() == theirs.keys() and all(mine[tensor].equal(theirs[tensor]) for tensor in mine)
    files = [sorted(str(p.relative_to(d)) for p in d.rglob("*") if p.suffix in (".mp4", ".png")) for d in runs]
    assert files[0] == files[1] and bool([p for p in files[0] if p.endswith("mp4")]) == (name == "videos")
    if name.startswith("offload"):
        last = json.loads((two / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["memory/rollout_before_mib"] > 0 == last["memory/rollout_after_mib"]
        assert last["memory/actor_before_mib"] > 0 == last["memory/actor_after_mib"]
    if name == "published weights":
        assert sorted(path.name for path in (two / "weights").iterdir()) == sorted(
            path.name for path in (one / "weights").iterdir()
        )


@pytest.mark.long
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_process_that_dies_in_a_further_rollout_continues_with_the_update(
    config: Path, tmp_path: Path, interrupted: bool
) -> None:
    """What it had counted, and the random numbers before the update, are those of the one that has gone."""
    settings = ("runner.max_iterations=2", TWO, *FEATURES["further rollouts for the groups"])
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    done = embodrl("train", "--config", config, f"runner.output_dir={whole}", *settings)
    assert done.code == 0, done.stderr
    # A rollout asks twice, so that this is the third of the first update.
    stop_at = "act:5:SIGKILL:rank_1_once" + (",act:5:SIGINT:parent_of_0" if interrupted else "")
    order = ("train", "--config", config, f"runner.output_dir={run_dir}", *settings)
    done = embodrl(*order, stop_at=stop_at, children=tmp_path / "children")
    assert done.code == (130 if interrupted else 0), done.stderr
    if interrupted:
        done = embodrl("resume", run_dir)
        assert done.code == 0, done.stderr
    assert facts(run_dir) == facts(whole)
    log = (run_dir / "logs" / "embodrl.log").read_text()
    # An interrupted run may stop before it needs the process again.
    assert interrupted or "restart 1 of 3 of a rollout process" in log
    assert "can't follow version" not in log
