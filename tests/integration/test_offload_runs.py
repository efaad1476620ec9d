"""Offload between phases does not change a run: in turn for every backend, and through kills and resuming."""

import json
from pathlib import Path

import pytest
from runs import Outcome, embodrl, metrics
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

EVERYTHING = ("actor.enable_offload=true", "rollout.enable_offload=true", "env.enable_offload=true")
INSIDE = EVERYTHING[::2]
"""In one process, what acts is what trains: the rollout has nothing of its own that could leave."""
TWO = ("cluster.device=cpu", "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}")
BACKENDS = {
    "native in process": (),
    "native apart": ("actor.own_process=true",),
    "native apart with a reference": ("actor.own_process=true", "algorithm.kl.coef=0.1"),
    "fsdp": ("actor.training_backend=fsdp", *TWO),
    "fsdp with a reference": ("actor.training_backend=fsdp", "algorithm.kl.coef=0.1", *TWO),
    "tensor parallel": ("actor.training_backend=fsdp", "actor.tensor_parallel_size=2", *TWO),
}


def train(config: Path, run_dir: Path, *arguments: str, stop_at: str = "") -> Outcome:
    return embodrl("train", "--config", config, f"runner.output_dir={run_dir}", *arguments, stop_at=stop_at)


def without_memory(run_dir: Path) -> list[dict[str, object]]:
    return [{n: v for n, v in row.items() if not n.startswith("memory/")} for row in metrics(run_dir)]


def memory(run_dir: Path, name: str) -> list[tuple[float, float]]:
    """Return MiB before and after, of the iterations."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    return [(row[f"memory/{name}_before_mib"], row[f"memory/{name}_after_mib"]) for row in rows]


def assert_same_run(left: Path, right: Path) -> None:
    assert without_memory(left) == without_memory(right)
    files = sorted(path.relative_to(left) for path in left.glob("checkpoints/**/*.safetensors"))
    assert files == sorted(path.relative_to(right) for path in right.glob("checkpoints/**/*.safetensors")) != []
    for file in [*files, Path("policy/model.safetensors")]:
        mine, theirs = load_file(left / file), load_file(right / file)
        assert mine.keys() == theirs.keys()
        assert all(mine[name].equal(theirs[name]) for name in mine), file


IN_SHORT = ("native in process",)
ALL = [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.long) for name in BACKENDS]


@pytest.mark.parametrize("backend", ALL)
def test_a_run_is_the_same_with_offload_and_without(config: Path, tmp_path: Path, backend: str) -> None:
    inside = backend == "native in process"
    for name, settings in (("off", ()), ("on", INSIDE if inside else EVERYTHING)):
        outcome = train(config, tmp_path / name, *BACKENDS[backend], *settings)
        assert outcome.code == 0, outcome.stderr
    assert_same_run(tmp_path / "off", tmp_path / "on")
    assert not any(name.startswith("memory/") for row in metrics(tmp_path / "off") for name in row)
    for part in ("actor", "env") if inside else ("actor", "rollout", "env"):
        assert all(before > after == 0 for before, after in memory(tmp_path / "on", part)), part
    log = (tmp_path / "on" / "logs" / "embodrl.log").read_text()
    assert log.count("offloaded for training: ") == 4
    assert "offloaded for rollouts: actor" in log


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    outcome = train(config, run_dir)
    assert outcome.code == 0, outcome.stderr
    return run_dir


@pytest.mark.parametrize(("level", "signal"), [("process", "SIGKILL"), ("simulator", "SIGINT")])
@pytest.mark.long
def test_an_interrupted_run_with_offload_resumes_bit_exactly(
    config: Path, whole: Path, tmp_path: Path, level: str, signal: str
) -> None:
    settings = (*INSIDE, f"env.offload_level={level}")
    outcome = train(config, tmp_path / "run", *settings, stop_at=f"act:10:{signal}")  # in iteration 3
    assert outcome.code != 0
    resumed = embodrl("resume", tmp_path / "run")
    assert resumed.code == 0, resumed.stderr
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.long
def test_simulators_that_die_while_they_are_away_come_back_in_their_state(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    settings = (*INSIDE, "env.offload_level=simulator")
    outcome = train(config, tmp_path / "run", *settings, stop_at="optimizer_step:10:SIGKILL:simulator")
    assert outcome.code == 0, outcome.stderr
    assert "restart of an offloaded simulator process" in outcome.stderr
    mine, others = without_memory(tmp_path / "run"), without_memory(whole)
    assert [row.pop("env/restarts", 0) for row in mine] == [0, 0, 0, 0, 1]
    assert [row.pop("env/restarts", 0) for row in others] == [0, 0, 0, 0, 0]
    assert mine == others
