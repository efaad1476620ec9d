"""Whole runs with vLLM, beside the same runs with the native engine; `make test-vllm` runs this."""

from __future__ import annotations

import importlib.util
import shutil
import signal
from pathlib import Path

import pytest
from runs import TINY, Outcome, assert_gone, embodrl, metrics

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make test-vllm` makes an environment that has it", allow_module_level=True)

TOLERANCE = 1e-4
# A chunk has 21 tokens, so that the 7th batch, the third of the first rollout, begins with the 127th.
BATCH_6, BATCH_7, LATER = "vllm_token:110", "vllm_token:130", "vllm_token:140"
SETTINGS = ("rollout.precision=fp32", "actor.precision=fp32", "env.start_timeout_s=600")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY.replace("hidden_size: 16", "hidden_size: 64"))
    return path


def train(config: Path, run_dir: Path, *args: str) -> list[dict[str, object]]:
    outcome = start(config, run_dir, *args)
    assert outcome.code == 0, outcome.stderr
    return metrics(run_dir)


def start(config: Path, run_dir: Path, *args: str, **options: object) -> Outcome:
    command = ("train", "--config", config, f"runner.output_dir={run_dir}", *SETTINGS, *args)
    return embodrl(*command, timeout_s=1500, **options)


@pytest.fixture(scope="module")
def served(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("served") / "run"
    train(config, run_dir, "rollout=vllm")
    return run_dir


@pytest.mark.timeout(3600)
def test_a_run_learns_the_same_as_with_the_native_engine(config: Path, served: Path, tmp_path: Path) -> None:
    found, wanted = metrics(served), train(config, tmp_path / "native")
    assert [row["iteration"] for row in found] == [0, 1, 2, 3, 4]
    # An engine that acts apart from what trains has its log-probs recomputed, which says how far they were off.
    recomputed = {f"train/behavior_{name}" for name in ("weight_mean", "weight_max", "clamped_fraction")}
    for row, other in zip(found, wanted, strict=True):
        assert row.keys() - recomputed == other.keys()
        assert row.get("train/behavior_weight_mean", 1.0) == pytest.approx(1.0, abs=TOLERANCE)
        for name, value in other.items():
            near = value if value is None else pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE)
            assert row[name] == near, (row["iteration"], name)
    assert found[4]["train/policy_loss"] != found[2]["train/policy_loss"]
    assert recomputed <= found[4].keys()


@pytest.mark.timeout(3600)
def test_a_resumed_run_is_the_uninterrupted_one_bit_exactly(served: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(served, copy)
    shutil.rmtree(copy / "checkpoints" / "step_4")
    outcome = embodrl("resume", copy, timeout_s=1500)
    assert outcome.code == 0, outcome.stderr
    assert metrics(copy) == metrics(served)


@pytest.mark.timeout(3600)
def test_vllm_acts_ahead_of_training(config: Path, tmp_path: Path) -> None:
    ahead = ("rollout=vllm", "runner.max_staleness=1", "algorithm.decoupled.enabled=true")
    rows = train(config, tmp_path / "run", *ahead)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    stale = [row["staleness/max"] for row in rows[1:]]
    assert all(isinstance(one, float) and one <= 1 for one in stale) and 1 in stale
    weights = [row["train/behavior_weight_mean"] for row in rows[1:]]
    assert weights[0] == pytest.approx(1.0, abs=TOLERANCE), "the first update's weights have chosen all"


@pytest.mark.timeout(3600)
def test_nothing_is_left_of_a_run_that_is_killed(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two processes that were there are the simulators, and vLLM's files are gone before it starts to decode."""
    temporary, children, stop_at = tmp_path / "tmp", tmp_path / "children", f"{BATCH_6}:SIGKILL"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    outcome = start(config, tmp_path / "run", "rollout=vllm", stop_at=stop_at, children=children)
    assert outcome.code == -signal.SIGKILL, outcome.stderr
    assert_gone(children)
    assert not [path for path in temporary.rglob("*") if "vllm" in path.name]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stop_at", [f"{BATCH_7}:SIGINT", f"{BATCH_7}:SIGINT,{LATER}:SIGINT"])
def test_an_interrupted_run_ends_cleanly(stop_at: str, config: Path, served: Path, tmp_path: Path) -> None:
    run_dir, children = tmp_path / "run", tmp_path / "children"
    outcome = start(config, run_dir, "rollout=vllm", stop_at=stop_at, children=children)
    assert outcome.code == 128 + signal.SIGINT, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert_gone(children)
    outcome = embodrl("resume", run_dir, timeout_s=1500)
    assert outcome.code == 0, outcome.stderr
    assert metrics(run_dir) == metrics(served)


@pytest.mark.timeout(3600)
def test_a_fault_in_vllm_ends_the_run_and_is_named(config: Path, tmp_path: Path) -> None:
    outcome = start(
        config,
        tmp_path / "run",
        "rollout=vllm",
        "runner.eval_at_start=false",
        "extensions=[stop_at,broken_vllm]",
        search_path=Path(__file__).parent,
    )
    assert outcome.code == 1
    assert "error: vLLM could not decode 4 rows: RuntimeError: no page left" in outcome.stderr
    assert "node 'rollout'" in outcome.stderr and "no checkpoint was saved yet" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.timeout(3600)
def test_a_rollout_process_with_vllm_plays_the_same_run(config: Path, served: Path, tmp_path: Path) -> None:
    rows = train(config, tmp_path / "run", "rollout=vllm", "rollout.own_process=true")
    assert rows == metrics(served)


@pytest.mark.timeout(3600)
def test_workflows_ask_vllm_for_one_row_at_a_time(config: Path, tmp_path: Path) -> None:
    episodes = (
        "rollout.workflow='embodrl.workers.workflows.workflow:ChunkWorkflow'",
        "env.train.auto_reset=false",
        "env.train.max_steps_per_rollout_epoch=6",
        "actor.global_batch_size=4",
        "runner.max_iterations=2",
    )
    rows = train(config, tmp_path / "run", "rollout=vllm", *episodes)
    assert [row.get("workflow/failed_episodes") for row in rows] == [None, 0, 0]
    assert rows[-1]["train/policy_loss"] is not None
