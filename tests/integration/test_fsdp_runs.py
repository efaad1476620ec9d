"""Whole runs of the command line with training in two processes: the losses of one, death, and resuming."""

from pathlib import Path

import psutil
import pytest
from runs import Outcome, embodrl, is_running, metrics
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

TWO = (
    "actor.training_backend=fsdp",
    "cluster.device=cpu",
    "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}",
)
FLOAT32 = ("actor.precision=fp32", "rollout.precision=fp32")


def train(config: Path, run_dir: Path, *arguments: str, stop_at: str = "", children: Path | None = None) -> Outcome:
    command = ("train", "--config", config, f"runner.output_dir={run_dir}", *FLOAT32, *arguments)
    return embodrl(*command, stop_at=stop_at, children=children)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    outcome = train(config, run_dir, *TWO)
    assert outcome.code == 0, outcome.stderr
    assert not list(run_dir.glob("checkpoints/step_4/optimizer.safetensors"))
    assert len(list(run_dir.glob("checkpoints/step_4/optimizer/shard-*.safetensors"))) == 2
    return run_dir


@pytest.mark.long
def test_the_first_iterations_have_the_losses_of_one_process(config: Path, whole: Path, tmp_path: Path) -> None:
    outcome = train(config, tmp_path / "native", "actor.training_backend=native")
    assert outcome.code == 0, outcome.stderr
    pairs = list(zip(metrics(whole), metrics(tmp_path / "native"), strict=True))
    assert len(pairs) == 5
    for mine, theirs in pairs[1:3]:  # later ones may draw another action
        for name in ("train/policy_loss", "train/value_loss", "train/entropy", "train/grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_native_in_its_own_process_is_the_same_run(config: Path, tmp_path: Path) -> None:
    for name, own in (("inside", "false"), ("apart", "true")):
        outcome = train(config, tmp_path / name, f"actor.own_process={own}")
        assert outcome.code == 0, outcome.stderr
    assert metrics(tmp_path / "inside") == metrics(tmp_path / "apart")
    left, right = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("inside", "apart"))
    assert all(left[name].equal(right[name]) for name in left | right)


@pytest.mark.long
def test_a_run_whose_training_process_was_killed_continues_from_its_checkpoint_to_the_same_numbers(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    before = set(psutil.pids())
    stop_at = "fsdp_step:10:SIGKILL:rank_1_once"  # in iteration 3
    outcome = train(config, tmp_path / "run", *TWO, stop_at=stop_at, children=tmp_path / "children")
    assert outcome.code == 0, outcome.stderr
    assert "restart 1 of 3 of the training processes" in outcome.stderr
    assert "step_2: actor[1] was killed by SIGKILL" in outcome.stderr
    mine = {pid for pid in set(psutil.pids()) - before if is_running(pid) and str(tmp_path) in _command(pid)}
    assert not mine
    assert metrics(tmp_path / "run") == metrics(whole)
    left, right = (load_file(path / "policy" / "model.safetensors") for path in (tmp_path / "run", whole))
    assert all(left[name].equal(right[name]) for name in left | right)


@pytest.mark.long
def test_a_process_killed_while_it_writes_a_checkpoint_costs_no_other(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    """It writes weights and optimizer state: the third file is of the second checkpoint."""
    outcome = train(config, tmp_path / "run", *TWO, "actor.max_restarts=0", stop_at="write_shard:3:SIGKILL:rank_1")
    assert outcome.code == 1
    assert "actor[1] was killed by SIGKILL" in outcome.stderr and "step_2" in outcome.stderr
    visible = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    assert visible == ["step_2"]
    resumed = embodrl("resume", tmp_path / "run")
    assert resumed.code == 0, resumed.stderr
    assert metrics(tmp_path / "run") == metrics(whole)


@pytest.mark.long
def test_a_run_continues_with_other_numbers_of_processes_and_formats(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    outcome = train(config, run_dir, *TWO, "runner.max_iterations=2")
    assert outcome.code == 0, outcome.stderr
    one = ("actor.training_backend=native", "cluster.component_placement={actor:0,rollout:0,env:0}")
    for last, more in ((3, (*one, "runner.checkpoint_format=sharded")), (4, (*TWO, "actor.tensor_parallel_size=2"))):
        resumed = embodrl("resume", run_dir, f"runner.max_iterations={last}", *more)
        assert resumed.code == 0, resumed.stderr
    exported = embodrl("export", run_dir, tmp_path / "exported")
    assert exported.code == 0 and "step_4" in exported.stdout, exported.stderr
    mine, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "exported", run_dir / "policy"))
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
    files = {path.name for path in (run_dir / "checkpoints/step_4/policy").iterdir()}
    assert files == {f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}
    full = ("runner.checkpoint_format=full", "actor.tensor_parallel_size=1", "runner.max_iterations=5")
    resumed = embodrl("resume", run_dir, *full)
    assert resumed.code == 0, resumed.stderr
    assert (run_dir / "checkpoints/step_5/policy.safetensors").is_file()
    assert [row["iteration"] for row in metrics(run_dir)] == [0, 1, 2, 3, 4, 5]


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
