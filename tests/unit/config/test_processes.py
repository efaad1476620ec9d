"""``env.num_processes: auto``: what fits, what is kept, and what is fastest."""

import json
from pathlib import Path

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.config import processes as choices
from embodrl.config.load import load_run
from embodrl.config.processes import candidates, read_choice
from embodrl.envs.pool.local import LocalPool
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import ConfigError
from embodrl.runs import measure

TOY = ["env=toy", "model.warm_start=null", "env.num_processes=auto"]


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choices.os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.parametrize(
    ("arguments", "cores", "expected"),
    [
        ((32, 32, 1, 1), 2, (1, 2, 4)),  # up to twice the cores
        ((32, 32, 1, 1), 16, (4, 8, 16, 32)),  # the four nearest to the cores
        ((24, 36, 1, 1), 4, (2, 3, 4, 6)),  # divisors of 12
        ((32, 32, 8, 1), 8, (1, 2, 4)),  # 32 / 8 = 4 groups
        ((32, 32, 1, 2), 4, (2, 4, 8)),  # whole processes a stage
        ((7, 5, 1, 1), 8, (1,)),
        ((3, 3, 1, 2), 8, (2,)),  # nothing fits, and a rule tells so
    ],
)
def test_candidates_suit_the_other_settings(arguments: tuple[int, ...], cores: int, expected: tuple[int, ...]) -> None:
    assert candidates(*arguments, cores=cores) == expected


def test_one_process_where_the_physics_wants_one() -> None:
    assert candidates(32, 32, 1, 1, cores=8, most=1) == (1,)


def test_without_a_measurement_a_number_stands_in() -> None:
    loaded = load_config(TOY)
    assert loaded.processes is not None and not loaded.processes.measured
    assert loaded.config.env.num_processes == 2 == loaded.processes.num_processes
    assert "env.num_processes=auto" in str(loaded.origins["env.num_processes"])
    assert load_config([*TOY[:2], "env.num_processes=1"]).processes is None


def test_a_measurement_is_found_by_machine_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_config(TOY)
    path = first.processes.path
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"num_processes": 4}))
    again = load_config([*TOY, "runner.seed=3", "env.eval.seed=7000000", "algorithm.gamma=0.9"])
    assert again.processes.measured and again.config.env.num_processes == 4
    for other in ("env.max_episode_steps=21", "env.train.total_num_envs=64", "env.cameras.0.height=32"):
        try:
            assert not load_config([*TOY, other]).processes.measured
        except ConfigError as error:
            assert "num_processes" not in str(error)
    monkeypatch.setattr(choices.platform, "node", lambda: "another machine")
    assert not load_config(TOY).processes.measured
    # What doesn't fit any more, or is torn, counts as not measured.
    for content in ('{"num_processes": 3}', '{"num_processes": 0}', "{", "[]"):
        path.write_text(content)
        monkeypatch.setattr(choices, "cache_path", lambda _: path)
        assert load_config(TOY).config.env.num_processes == 2
    assert read_choice(path.with_name("none.json")) is None


def test_the_run_keeps_the_number(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(load_config(TOY).to_yaml())
    resumed = load_run(path)
    assert resumed.config.env.num_processes == 2 and resumed.processes is None


def test_what_is_wrong_elsewhere_is_reported_and_nothing_else() -> None:
    with pytest.raises(ConfigError) as error:
        load_config([*TOY, "env.train.total_num_envs=x"])
    assert [problem.key for problem in error.value.problems] == ["env.train.total_num_envs"]
    with raises_code("config-type"):
        load_config(["env=toy", "env.num_processes=automatic"])


def test_of_equals_the_fewest_processes() -> None:
    assert measure.fastest({1: 50.0, 2: 98.0, 4: 100.0}) == 2
    assert measure.fastest({1: 50.0, 2: 90.0, 4: 100.0}) == 4


class ClockedPool(LocalPool):
    """Two processes need the least time: the clock moves by what a chunk of each number costs."""

    now = 0.0

    def __init__(self, config, total: int, **overrides) -> None:
        self.cost = {1: 1.0, 2: 0.5, 4: 0.8}[config.env.num_processes]
        chunk = config.model.num_action_chunks
        settings = {"num_envs": total, "image_size": 8, "max_episode_steps": 50, "max_chunk": chunk}
        super().__init__(ToyVectorEnv, settings | {"auto_reset": config.env.train.auto_reset} | overrides)

    def step_async(self, actions, active=None):
        ClockedPool.now += self.cost
        super().step_async(actions, active)


def use_local_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "make_pool", ClockedPool)
    monkeypatch.setattr(measure, "check_simulator", lambda config: None)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: ClockedPool.now)


def test_the_fastest_is_measured_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    use_local_pools(monkeypatch)
    loaded = load_config([*TOY, "model.num_action_chunks=1"])
    told: list[str] = []
    assert measure.measure_processes(loaded.config, loaded.processes, told.append) == 2
    kept = json.loads(loaded.processes.path.read_text())
    total = loaded.config.env.train.total_num_envs
    rates = kept["environment_steps_per_s"]
    assert rates["1"] == pytest.approx(total / 1.0) and rates["2"] == pytest.approx(total / 0.5)
    assert told[0] == "measuring env.num_processes: 1, 2, 4"
    assert load_config([*TOY, "model.num_action_chunks=1"]).processes.measured


def test_episodes_that_have_ended_are_not_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    use_local_pools(monkeypatch)
    monkeypatch.setattr(measure, "PROBE_S", 30.0)  # thirty chunks, far beyond the first episodes
    episodes = ["env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=20", "model.num_action_chunks=10"]
    config = load_config([*TOY, *episodes]).config
    rate = measure.steps_per_second(config, 1)
    assert rate >= 9 * config.env.train.total_num_envs, "whole chunks, but where an episode ends"


def test_a_measurement_of_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    path = load_config(TOY).processes.path
    monkeypatch.setattr(choices, "MEASUREMENT", choices.MEASUREMENT - 1)
    assert load_config(TOY).processes.path != path
