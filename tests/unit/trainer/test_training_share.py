"""``cluster.training_share: auto``: what is measured, where it is kept, and for which settings it is valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodrl.config import LoadedConfig, load_config
from embodrl.config import training_share as shares
from embodrl.config.load import load_run
from embodrl.reporting.metrics_file import Row
from embodrl.trainer.training_share import Balancer, ShareMeter, share_meter, share_of

DIVIDED = (
    *("env=maniskill", "model=openvla", "cluster=8xh100", "actor=fsdp", "actor.micro_batch_size=10"),
    *("env.num_processes=30", "env.train.total_num_envs=120", "cluster.placement=auto", "cluster.training_share=auto"),
    *("runner.max_staleness=1", "algorithm.decoupled.enabled=true"),
)


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def planned(*settings: str) -> LoadedConfig:
    return load_config([*DIVIDED, *settings], verb="plan")


def row(iteration: int, train_s: float, env_s: float, policy_s: float) -> Row:
    return {"iteration": iteration, "time/train_s": train_s, "time/env_s": env_s, "time/policy_s": policy_s}


def measured(loaded: LoadedConfig, directory: Path, train_s: float) -> str:
    """Let a run measure, whose 3 rollout processes take 40 s together for each of two iterations; return its line."""
    directory.mkdir(exist_ok=True)
    meter = share_meter(loaded, directory)
    assert meter is not None
    assert meter.take(row(1, train_s, 28.0, 12.0)) == ""
    return meter.take(row(2, train_s, 24.0, 16.0))


@pytest.mark.parametrize(
    ("train_s", "actors", "rollout_s", "rollouts", "share"),
    [
        (30.0, 4, 10.0, 2, 0.857),  # 120 / (120 + 20)
        (10.0, 1, 10.0, 3, 0.25),
        (0.0, 1, 10.0, 1, 0.001),  # devices of its own, nevertheless
        (10.0, 1, 0.0, 1, 0.999),
        (0.0, 1, 0.0, 1, 0.5),
    ],
)
def test_the_share_by_hand(train_s: float, actors: int, rollout_s: float, rollouts: int, share: float) -> None:
    assert share_of(train_s, actors, rollout_s, rollouts) == share


def test_two_iterations_measure_and_the_next_run_uses_it(tmp_path: Path) -> None:
    first = planned()
    assert first.share is not None and not first.share.measured and first.config.cluster.training_share == 0.5
    assert "has not been measured" in first.share.line
    assert (len(first.deployment.of("actor")), len(first.deployment.of("rollout"))) == (4, 3)
    # Training takes 2 x 2.5 s in 4 processes, rollouts 2 x 40 s in all: 20 of 100.
    line = measured(first, tmp_path / "run", 2.5)
    assert line.startswith("cluster.training_share = 0.2: training took 5.0 s in 4 process(es), rollouts 26.7 s in 3")
    # 30 simulators are shared by 1, 2, 3, 5 and 6 rollout processes: 2 and 6 take max(0.2 / 2, 0.8 / 6) = 0.13.
    assert "it implies another placement" in line and "{actor:0-1,rollout:2-7,env:2-7}" in line
    written = json.loads((tmp_path / "run" / "training_share.json").read_text())
    assert written == json.loads(first.share.path.read_text())
    assert (written["training_share"], written["train_s"]) == (0.2, 5.0)
    assert written["rollout_s"] == pytest.approx(80 / 3)
    assert written["settings"]["settings"]["actor"]["micro_batch_size"] == 10
    again = planned()
    assert again.share is not None and again.share.measured and again.config.cluster.training_share == 0.2
    assert str(first.share.path) in again.share.line
    assert share_meter(again, tmp_path) is None, "measured once"
    by_hand = again.deployment.reasons[-1]
    assert by_hand in line
    assert "training is 20% of the work" in again.deployment.reasons[0]


def test_a_measurement_is_valid_for_its_settings_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(planned(), tmp_path / "run", 2.5)
    for same in ("runner.seed=3", "runner.max_iterations=7", "env.eval.num_episodes=8", "cluster.stall_timeout_s=50"):
        found = planned(same).share
        assert found is not None and found.measured, same
    for other in (
        *("actor.micro_batch_size=5", "runner.max_staleness=2", "env.train.total_num_envs=240", "env.num_processes=15"),
        *("algorithm.update_epoch=3", "cluster.hardware.num_gpus=4", "algorithm.gamma=0.9", "model.warm_start=null"),
    ):
        found = planned(other).share
        assert found is not None and not found.measured, other
    path = planned().share.path
    content = json.loads(path.read_text())
    for broken in ({**content, "settings": {}}, {**content, "training_share": 1.5}, [], {"training_share": 0.2}):
        path.write_text(json.dumps(broken))
        assert not planned().share.measured
    path.write_text(json.dumps(content))
    assert planned().share.measured
    monkeypatch.setattr(shares, "__version__", "another")
    assert not planned().share.measured


def test_another_model_of_the_same_name_is_measured_anew(tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"12345")
    before = shares._files(str(weights.parent))
    assert before == [[str(weights), 5]]
    weights.write_bytes(b"123456")
    assert shares._files(str(weights.parent)) != before


def test_the_number_of_processes_is_part_of_the_settings(tmp_path: Path) -> None:
    measured(planned(), tmp_path / "run", 2.5)
    choice = planned("env.num_processes=15").share
    assert choice is not None and not choice.measured
    assert choice.with_processes(30).measured and choice.with_processes(30).training_share == 0.2


def test_a_run_keeps_the_number(tmp_path: Path) -> None:
    measured(planned(), tmp_path / "run", 2.5)
    path = tmp_path / "config.yaml"
    path.write_text(planned().to_yaml())
    resumed = load_run(path, verb="plan")
    assert resumed.config.cluster.training_share == 0.2 and resumed.share is None


def test_rows_without_times_do_not_count_and_nothing_is_measured_where_it_does_not_matter(tmp_path: Path) -> None:
    loaded = planned()
    meter = share_meter(loaded, tmp_path)
    assert isinstance(meter, ShareMeter)
    assert meter.take({"iteration": 0, "time/train_s": None, "time/env_s": None, "time/policy_s": None}) == ""
    assert meter.take(row(1, 1.0, 4.0, 4.0)) == "" != meter.take(row(2, 1.0, 4.0, 4.0))
    assert meter.take(row(3, 9.0, 4.0, 4.0)) == ""
    assert share_meter(planned("cluster.placement=colocated"), tmp_path) is None
    assert share_meter(load_config(list(DIVIDED[:-3]), verb="plan"), tmp_path) is None


def test_a_cache_that_can_not_be_written_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    line = measured(planned(), tmp_path / "run", 2.5)
    assert "not kept for later runs" in line and (tmp_path / "run" / "training_share.json").is_file()


def test_a_run_moves_where_a_measured_iteration_is_shorter() -> None:
    loaded = planned("cluster.rebalance=2")
    sizes = (len(loaded.deployment.of("actor")), len(loaded.deployment.of("rollout")))
    assert sizes == (4, 3)
    balancer = Balancer(loaded)
    assert balancer.take({"iteration": 0}) is None, "without times"
    # Training takes 2 x 2.5 s in 4 processes, rollouts 2 x 40 s in all: 20 of 100, as in the test above.
    assert balancer.take(row(0, 900.0, 28.0, 12.0)) is None, "the first iteration does not count"
    assert balancer.take(row(1, 2.5, 28.0, 12.0)) is None
    found = balancer.take(row(2, 2.5, 24.0, 16.0))
    assert found is not None
    other, reason = found
    assert (len(other.deployment.of("actor")), len(other.deployment.of("rollout"))) == (2, 6)
    assert other.config.cluster.training_share == 0.2
    # max(0.2 / 2, 0.8 / 6) against max(0.2 / 4, 0.8 / 3)
    assert reason.startswith("cluster.training_share = 0.2: training took 5.0 s in 4 process(es)") and "50%" in reason
    again = Balancer(other)
    assert [again.take(row(number, 2.5, 14.0, 6.0)) for number in (3, 4, 5)] == [None] * 3, "it is the fastest"


def test_a_run_stays_where_little_is_gained() -> None:
    balancer = Balancer(planned("cluster.rebalance=1"))
    balancer.take(row(0, 15.0, 28.0, 14.0))
    # 4 x 15 s of 4 x 15 + 42 s is 0.59: 0.2 per device at 4 and 3, and at no other numbers less than 0.18.
    assert balancer.take(row(1, 15.0, 28.0, 14.0)) is None
