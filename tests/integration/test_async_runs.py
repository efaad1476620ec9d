"""Whole runs with rollouts beside training, through the command line, on the toy environment."""

import itertools
import json
import random
import signal
from pathlib import Path

import pytest
from runs import TINY, assert_gone, embodrl, metrics

from embodrl.config import LoadedConfig, load_config
from embodrl.reporting.metrics_file import Row
from embodrl.runs.train import train
from embodrl.trainer.training_share import Balancer

pytestmark = pytest.mark.slow

ITERATIONS = 6
SHARDS = 2  # an update: two stages
STREAM = ("rollout.streaming=true", "env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=6")
TWO = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"
ASYNC = (
    "rollout.pipeline_stages=2",
    "algorithm.decoupled.enabled=true",
    f"runner.max_iterations={ITERATIONS}",
    "runner.save_interval=1",
    "runner.keep_last_n=10",
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def trained_shards(checkpoint: Path) -> tuple[int, set[int]]:
    """Return the iteration of a checkpoint and, from its own account, the shards that were trained on by then."""
    state = json.loads((checkpoint / "state.json").read_text())
    rollout = state["rollout"]["state"]
    waiting = {int(shard) for shard in rollout["shards"]}
    assert waiting == {int(name.removeprefix("shard_")) for name in state["rollout"]["tensors"]}
    assert not waiting & set(rollout["again"])
    return state["iteration"], set(range(rollout["next_shard"])) - waiting - set(rollout["again"])


def check_ledger(run_dir: Path, shards: int = SHARDS) -> None:
    """No accepted rollout is lost, and none is trained on twice."""
    before: set[int] = set()
    checkpoints = sorted((run_dir / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    for checkpoint in checkpoints:
        iteration, trained = trained_shards(checkpoint)
        assert len(trained) == iteration * shards, checkpoint
        assert before <= trained
        before = trained


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.long
def test_a_run_killed_at_random_moments_continues_without_losing_or_repeating_a_rollout(
    staleness: int, config: Path, tmp_path: Path
) -> None:
    rng = random.Random(staleness)
    run_dir, children = tmp_path / "run", tmp_path / "children"
    arguments = ("train", "--config", config, f"runner.output_dir={run_dir}", *ASYNC)
    stops = [
        f"act:{rng.randint(10, 30)}:SIGKILL",
        f"optimizer_step:{rng.randint(3, 8)}:SIGKILL",
        f"write_file:{rng.randint(5, 12)}:SIGKILL",
    ]
    outcome = embodrl(*arguments, f"runner.max_staleness={staleness}", stop_at=stops[0], children=children)
    assert outcome.code == -signal.SIGKILL, outcome.stderr
    assert_gone(children)
    check_ledger(run_dir)
    for stop in stops[1:]:
        outcome = embodrl("resume", run_dir, stop_at=stop)
        assert outcome.code == -signal.SIGKILL, (stop, outcome.stderr)
        check_ledger(run_dir)
    outcome = embodrl("resume", run_dir)
    assert outcome.code == 0, outcome.stderr
    check_ledger(run_dir)
    assert trained_shards(run_dir / "checkpoints" / f"step_{ITERATIONS}")[1] == set(range(ITERATIONS * SHARDS))
    rows = metrics(run_dir)
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS + 1))
    assert [row["env_steps"] for row in rows] == [48 * i for i in range(ITERATIONS + 1)]
    for row in rows[1:]:
        assert 0 <= row["staleness/mean"] <= row["staleness/max"] <= staleness
        assert row["staleness/rejected_shards"] == 0


def test_episodes_as_they_end_are_neither_lost_nor_repeated(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ("train", "--config", config, f"runner.output_dir={run_dir}", *ASYNC, *STREAM, "runner.max_staleness=1")
    outcome = embodrl(*arguments, stop_at="optimizer_step:8:SIGKILL")
    assert outcome.code == -signal.SIGKILL, outcome.stderr
    check_ledger(run_dir, shards=4)
    assert embodrl("resume", run_dir).code == 0
    check_ledger(run_dir, shards=4)
    rows = metrics(run_dir)
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS + 1))
    assert all(row["rollout/episodes"] == 4 and row["staleness/max"] <= 1 for row in rows[1:])


def test_processes_stream_their_episodes_and_may_die(config: Path, tmp_path: Path) -> None:
    run_dir, children = tmp_path / "run", tmp_path / "children"
    settings = (*ASYNC, *STREAM, TWO, "rollout.pipeline_stages=1", "env.train.ignore_terminations=false")
    settings = (*settings, "runner.max_staleness=1", "runner.max_iterations=3")
    arguments = ("train", "--config", config, f"runner.output_dir={run_dir}", *settings)
    outcome = embodrl(*arguments, stop_at="act:2:SIGKILL:rank_1_once,log:3:SIGKILL", children=children)
    assert outcome.code == -signal.SIGKILL, outcome.stderr
    assert_gone(children)
    check_ledger(run_dir, shards=4)
    assert "restart 1 of 3 of a rollout process" in (run_dir / "logs" / "embodrl.log").read_text()
    assert embodrl("resume", run_dir).code == 0
    check_ledger(run_dir, shards=4)
    rows = metrics(run_dir)
    assert [row["iteration"] for row in rows] == list(range(4))
    assert all(row["rollout/episodes"] == 4 and row["staleness/max"] <= 1 for row in rows[1:])
    assert trained_shards(run_dir / "checkpoints" / "step_3")[1] == set(range(12))


def test_a_signal_saves_the_rollouts_that_wait(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ("train", "--config", config, f"runner.output_dir={run_dir}", *ASYNC, "runner.max_staleness=2")
    outcome = embodrl(*arguments, stop_at="optimizer_step:4:SIGTERM")
    assert outcome.code == 128 + signal.SIGTERM, outcome.stderr
    check_ledger(run_dir)
    assert embodrl("resume", run_dir).code == 0
    check_ledger(run_dir)


@pytest.mark.long
def test_an_asynchronous_run_is_resumed_as_one(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ("train", "--config", config, f"runner.output_dir={run_dir}", *ASYNC, "runner.max_staleness=1")
    assert embodrl(*arguments, stop_at="optimizer_step:8:SIGKILL").code == -signal.SIGKILL
    outcome = embodrl("resume", run_dir, "runner.max_staleness=0")
    assert outcome.code == 1 and "runner.max_staleness above 0" in outcome.stderr, outcome.stderr
    assert embodrl("resume", run_dir, "runner.max_staleness=4").code == 0
    check_ledger(run_dir)


@pytest.mark.parametrize("streams", [False, pytest.param(True, marks=pytest.mark.long)])
def test_dynamic_sampling_takes_further_rollouts(config: Path, tmp_path: Path, streams: bool) -> None:
    run_dir = tmp_path / "run"
    outcome = embodrl(
        "train",
        "--config",
        config,
        f"runner.output_dir={run_dir}",
        "algorithm=dapo",
        "algorithm.group_size=2",
        "actor.optim.critic_warmup_iterations=0",
        "env.train.max_steps_per_rollout_epoch=6",
        "runner.max_staleness=1",
        "runner.max_iterations=2",
        *(("rollout.streaming=true", "env.train.auto_reset=false") if streams else ()),
    )
    assert outcome.code == 0, outcome.stderr
    rows = metrics(run_dir)[1:]
    # Counted when the second update takes its rollouts: those that the first one took beyond its own.
    shards = 2 if streams else 1  # of a rollout: groups, or all environments
    assert rows[0]["rollout/resamples"] * shards == rows[-1]["staleness/rejected_shards"] > 0


@pytest.mark.long
def test_the_first_run_measures_the_share_of_training(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = ("--config", config, *ASYNC, "runner.max_staleness=1", "runner.max_iterations=2")
    settings = (*settings, "cluster.placement=auto", "cluster.training_share=auto")
    outcome = embodrl("train", *settings, f"runner.output_dir={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    measured = json.loads((tmp_path / "run" / "training_share.json").read_text())
    every = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    rows = [row for row in every if row["iteration"]]
    work = (  # two stages in the driver play at once, each half of the time that they take together
        sum(row["time/train_s"] for row in rows),
        sum(row["time/env_s"] / 2 + row["time/policy_s"] for row in rows),
    )
    assert measured["training_share"] == pytest.approx(work[0] / sum(work), abs=2e-3)
    assert f"cluster.training_share = {measured['training_share']:g}" in outcome.stdout
    plan = embodrl("plan", "train", *settings)
    assert f"is {measured['training_share']:g}, as measured in {tmp_path}" in plan.stdout, plan.stderr


def test_a_run_moves_to_another_placement_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_as_it_was: None
) -> None:
    """Two rollout processes in place of one: as if devices had moved, of which this machine has none."""
    arguments = [*ASYNC, "runner.max_staleness=1", "rollout.own_process=true", "rollout.pipeline_stages=1"]
    arguments += ["cluster.placement=auto", "cluster.rebalance=2", f"runner.output_dir={tmp_path / 'run'}"]
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text(TINY.replace("extensions: [stop_at]\n", ""))
    loaded = load_config(arguments, tiny, verb="train")
    places = {"actor": "0", "rollout": "0:0-1", "env": "0"}
    cluster = loaded.config.cluster.model_copy(update={"placement": "given", "component_placement": places})
    other = loaded.with_config(loaded.config.model_copy(update={"cluster": cluster}))
    assert [len(each.deployment.of("rollout")) for each in (loaded, other)] == [1, 2]

    def take(_: Balancer, row: Row) -> tuple[LoadedConfig, str] | None:
        return (other, "measured") if row["iteration"] == 2 else None

    monkeypatch.setattr(Balancer, "take", take)
    assert train(loaded).exit_code == 0
    rows = metrics(tmp_path / "run")
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS + 1))
    assert all(late["env_steps"] > early["env_steps"] for early, late in itertools.pairwise(rows))
    states = {
        int(path.name[5:]): json.loads((path / "state.json").read_text())["rollout"]["state"]
        for path in (tmp_path / "run" / "checkpoints").glob("step_*")
    }
    assert [states[step]["settings"]["players"] for step in (2, 3, ITERATIONS)] == [1, 2, 2]
    first, second = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert not first["changed"] and "cluster.placement" in second["changed"]
