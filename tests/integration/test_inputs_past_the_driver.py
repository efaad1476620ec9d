"""Whole runs whose training processes read the policy inputs in memory files of the rollout processes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest
from runs import GONE_S, embodrl, metrics
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
APART = (
    *("actor.training_backend=fsdp", "actor.precision=fp32", "rollout.precision=fp32", "cluster.device=cpu"),
    "cluster.component_placement={actor:'0:0-1',rollout:'0:0-1',env:0}",
)
# The same pipeline, of whose nodes a user could be the author: they may read every column.
PAST_NOTHING = "pipeline.fn=embodrl.pipelines.builtin:on_policy"


def train(config: Path, run_dir: Path, *settings: str, stop_at: str = "") -> Path:
    order = (f"runner.output_dir={run_dir}", *settings)
    done = embodrl("train", "--config", config, *APART, *order, stop_at=stop_at, children=run_dir.with_name("children"))
    assert done.code == (-9 if stop_at else 0), done.stderr
    return run_dir


def usage(run_dir: Path, name: str) -> float:
    """Return the usage of the last iteration."""
    return float(json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1]).get(f"usage/{name}", 0.0))


def wait_gone(children: Path) -> None:
    """Wait until no process of the run with this file is left."""
    deadline = time.monotonic() + GONE_S
    while any(str(children) in of_run(process) for process in psutil.process_iter()):
        assert time.monotonic() < deadline, "processes outlived the run"
        time.sleep(0.05)


def of_run(process: psutil.Process) -> str:
    try:
        return process.environ().get("STOP_AT_CHILDREN", "")
    except psutil.Error:  # ended, or not ours
        return ""


@pytest.mark.parametrize(
    "settings",
    [
        (),
        pytest.param(("algorithm.rollout_epoch=2", "algorithm.kl.coef=0.1"), marks=pytest.mark.long),
        pytest.param(("algorithm.pf_ppo.method=pow", "runner.save_rollouts=true"), marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_the_run_is_the_one_whose_inputs_pass_the_main_process(
    config: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    mine = train(config, tmp_path / "past", *settings)
    theirs = train(config, tmp_path / "through", *settings, PAST_NOTHING)
    assert metrics(mine) == metrics(theirs)
    left, right = (load_file(path / "policy" / "model.safetensors") for path in (mine, theirs))
    assert all(left[name].equal(right[name]) for name in left | right)
    shared = usage(mine, "shared_mib")
    assert shared > 0 and not usage(theirs, "shared_mib")
    for link in ("received_rollout_mib", "sent_actor_mib"):
        assert usage(mine, link) < usage(theirs, link) - 0.9 * shared


@pytest.mark.long
def test_larger_pictures_are_no_more_bytes_for_the_main_process_and_nothing_is_left(
    config: Path, tmp_path: Path
) -> None:
    small, large = (train(config, tmp_path / f"{size}", f"model.architecture.image_size={size}") for size in (16, 64))
    assert usage(large, "shared_mib") > 4 * usage(small, "shared_mib")
    for link in ("received_rollout_mib", "sent_actor_mib"):
        assert usage(large, link) == pytest.approx(usage(small, link), rel=0.05)
    settings = ("model.architecture.image_size=16",)
    killed = train(config, tmp_path / "killed", *settings, stop_at="fsdp_step:10:SIGKILL:parent_of_1")
    wait_gone(tmp_path / "children")  # and with them the files that they had open
    assert not [path for path in Path("/dev/shm").iterdir() if "embodrl" in path.name]
    done = embodrl("resume", killed)
    assert done.code == 0, done.stderr
    assert metrics(killed) == metrics(small)
