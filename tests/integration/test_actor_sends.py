"""Whole runs in which neither training nor playing is done by the main process: weights go past it."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Outcome, embodrl, metrics
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

APART = (
    "actor.training_backend=fsdp",
    "cluster.device=cpu",
    "cluster.component_placement={actor:'0:0-1',rollout:'0:0-1',env:0}",
)
FLOAT32 = ("actor.precision=fp32", "rollout.precision=fp32")
LOSSES = ("train/policy_loss", "train/value_loss", "train/entropy", "train/grad_norm")
NEW = "rollout/restarts"
long = pytest.mark.long


def train(config: Path, run_dir: Path, *arguments: str, stop_at: str = "") -> Outcome:
    order = (f"runner.output_dir={run_dir}", *FLOAT32, *arguments)
    return embodrl("train", "--config", config, *order, stop_at=stop_at, children=run_dir.with_name("children"))


@pytest.fixture(scope="module")
def native(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The run in one process with two threads."""
    run_dir = tmp_path_factory.mktemp("native") / "run"
    done = train(config, run_dir, "cluster.num_threads=2")
    assert done.code == 0, done.stderr
    return metrics(run_dir)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes that train, two that play, and nothing happens to them."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = train(config, run_dir, *APART, "rollout.weight_sync=collective")
    assert done.code == 0, done.stderr
    return run_dir


@pytest.mark.long
def test_two_processes_that_train_and_two_that_play_have_the_losses_of_one(whole: Path, native: list) -> None:
    rows = metrics(whole)
    for mine, theirs in list(zip(rows, native, strict=True))[1:3]:  # later ones may draw another action
        for name in LOSSES:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5)
    assert "2 rollout process(es), weights by collective from the training process of rank 0" in log_of(whole)


@pytest.mark.parametrize(
    ("sync", "stop_at"),
    [
        # In a sync, in a collective that the main process cancels, and in a rollout.
        pytest.param("collective", "take_weights:3:SIGKILL:rank_1_once", marks=long),
        pytest.param("collective", "join:1:SIGKILL:rank_1_once", marks=long),
        pytest.param("collective", "act:6:SIGKILL:rank_1_once", marks=long),
        pytest.param("memory", "", marks=long),
        pytest.param("memory", "act:6:SIGKILL:rank_1_once", marks=long),
        pytest.param("memory", "take_weights:3:SIGKILL:rank_1_once", marks=long),
        pytest.param("disk", "", marks=long),
        pytest.param("disk", "take_weights:3:SIGKILL:rank_1_once", marks=long),
    ],
)
def test_the_run_is_the_same_by_every_kind_whoever_dies(
    config: Path, whole: Path, tmp_path: Path, sync: str, stop_at: str
) -> None:
    run_dir = tmp_path / "run"
    done = train(config, run_dir, *APART, f"rollout.weight_sync={sync}", stop_at=stop_at)
    assert done.code == 0, done.stderr
    assert [without(row) for row in metrics(run_dir)] == [without(row) for row in metrics(whole)]
    assert metrics(run_dir)[-1][NEW] == (1 if stop_at else 0)
    assert log_of(run_dir).count("restart 1 of 3 of a rollout process") == (1 if stop_at else 0)
    assert not (run_dir / "weight_sync").exists()
    mine, theirs = (load_file(path / "policy" / "model.safetensors") for path in (run_dir, whole))
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


@long
@pytest.mark.parametrize("form", ["sharded", "full"])
def test_an_interrupted_run_is_resumed_bit_exactly(config: Path, whole: Path, tmp_path: Path, form: str) -> None:
    """The policy of the main process is fetched for checkpoints in one piece, and at the end."""
    run_dir = tmp_path / "run"
    order = (*APART, "rollout.weight_sync=memory", f"runner.checkpoint_format={form}")
    done = train(config, run_dir, *order, stop_at="act:11:SIGINT:parent_of_1")
    assert done.code == 130, done.stderr
    resumed = embodrl("resume", run_dir)
    assert resumed.code == 0, resumed.stderr
    assert metrics(run_dir) == metrics(whole)
    mine, theirs = (load_file(path / "policy" / "model.safetensors") for path in (run_dir, whole))
    assert all(mine[name].equal(theirs[name]) for name in mine | theirs)


@pytest.mark.long
def test_a_training_process_that_dies_while_it_sends_ends_the_run(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = train(config, run_dir, *APART, "rollout.weight_sync=collective", stop_at="gather_only:4:SIGKILL:rank_1")
    assert done.code == 1
    assert "actor[1] was killed by SIGKILL" in done.stderr and "embodrl resume" in done.stderr
    assert "restart 1 of" not in log_of(run_dir)


@long
def test_native_training_apart_publishes_what_it_sends(config: Path, tmp_path: Path) -> None:
    apart = ("actor.own_process=true", "rollout.own_process=true", "model.trainable=head")
    for name, more in (("one", ()), ("apart", apart[:2])):
        order = (*more, apart[2], "rollout.publish_weights=true", "runner.max_iterations=2")
        done = train(config, tmp_path / name, *order, "cluster.num_threads=2")
        assert done.code == 0, done.stderr
    assert metrics(tmp_path / "one") == metrics(tmp_path / "apart")
    last = sorted(path.name for path in (tmp_path / "one/weights").iterdir())
    assert last == sorted(path.name for path in (tmp_path / "apart/weights").iterdir())
    mine, theirs = (
        load_file(tmp_path / name / "weights" / last[-1] / "bucket_00000.safetensors") for name in ("one", "apart")
    )
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


def without(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name != NEW}


def log_of(run_dir: Path) -> str:
    return (run_dir / "logs" / "embodrl.log").read_text()
