"""`bench.py envs` without a simulator: what is counted, compared and said; the figures mean nothing here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import envs
import psutil
import pytest
from expect import raises_code

from embodrl.errors import EmbodrlError, MissingDependencyError


def test_steps_a_second_count_every_environment_and_every_action_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.2, 10.0, 12.0, 20.0, 22.0])
    processor = iter([1.0, 2.0, 5.0, 6.0])
    played: list[int] = []
    monkeypatch.setattr(envs.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(envs, "cpu_seconds", lambda processes: next(processor))
    monkeypatch.setattr(envs, "BLOCK_S", 0.5)
    side = envs.Side(played.append, unit=5, num_envs=4, processes=[])
    side.prepare()
    assert played == [1, 2] and side.block == 5, "a chunk takes 0.1 s, a block 0.5 s"
    side.measure()
    side.measure()
    # Two blocks of 5 chunks of 5 actions in 4 environments, in 2 s each and with a second of processor time each.
    assert played == [1, 2, 5, 5]
    assert side.figures() == {"steps_per_s": 200 / 4, "steps_per_cpu_s": 200 / 2}


@contextmanager
def still_stock(options: dict[str, Any], python: str) -> Iterator[envs.Side]:
    assert options["env"] == "toy" and options["size"] == 16 and python == sys.executable
    yield envs.Side(lambda steps: None, 1, options["num_envs"], [psutil.Process()])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = envs.Case(("env=toy",), "stock", full_detail={"auto_reset": True})
    for name, value in {"CASES": {"toy": toy, "maniskill": envs.CASES["maniskill"]}, "ROUNDS": 1}.items():
        monkeypatch.setattr(envs, name, value)
    monkeypatch.setattr(envs, "BLOCK_S", 0.01)
    monkeypatch.setattr(envs, "FULL_DETAIL_NUM_ENVS", (2,))
    monkeypatch.setattr(envs, "stock_side", still_stock)


def lacks_maniskill(config: Any) -> None:
    if config.env.env_type == "maniskill":
        raise MissingDependencyError("no ManiSkill", "get it")


def test_every_side_is_compared_with_the_stock_one_and_what_is_missing_is_reported(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(envs, "check_simulator", lacks_maniskill)
    monkeypatch.setattr(envs, "SIZES", (16,))
    told: list[str] = []
    kept: list[int] = []
    result = envs.run(
        ["toy", "maniskill"], [16], [1, 2], told.append, lambda sofar: kept.append(len(sofar["envs"]["toy"]["rows"]))
    )
    assert kept == [3, 7], "nothing that has been measured is lost when it is stopped"
    assert told == ["toy, 16 x 16, 1 environments", "toy, 16 x 16, 2 environments"]
    assert result["left_out"] == {"maniskill": "no ManiSkill: get it"}
    rows = result["envs"]["toy"]["rows"]
    ours = [f"embodrl, {name}" for name in (envs.EVERY_STEP, envs.ONCE_A_CHUNK, envs.FULL_DETAIL)]
    assert [(row["num_envs"], row["what"]) for row in rows] == [
        *((1, what) for what in ("stock", *ours[:2])),
        *((2, what) for what in ("stock", *ours)),
    ]
    for row in rows:
        stock = next(each for each in rows if each["what"] == "stock" and each["num_envs"] == row["num_envs"])
        assert row["steps_per_s"] > 0
        assert row["ratio"] == pytest.approx(row["steps_per_s"] / stock["steps_per_s"], abs=0.01)
    every_step = [row["ratio"] for row in rows if row["what"] == ours[0]]
    assert result["envs"]["toy"]["smallest_ratio"] == {"16": min(every_step)}


def test_a_table_and_a_file(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(envs, "check_simulator", lacks_maniskill)
    rows = [{"size": 16, "num_envs": 1, "what": "stock", "steps_per_s": 3.0, "ratio": 1.0, "cpu_ratio": 1.0}]
    result = {"left_out": {"maniskill": "no ManiSkill: get it"}, "envs": {"toy": {"task": "a task", "rows": rows}}}
    monkeypatch.setattr(envs, "run", lambda names, tell, keep, settings: result)
    path = tmp_path / "envs.json"
    assert envs.main(path) == 0
    assert json.loads(path.read_text()) == result
    printed = capsys.readouterr().out
    assert "maniskill is left out: no ManiSkill: get it" in printed and "a task" in printed and "stock" in printed


def test_the_other_side_says_why_it_ended() -> None:
    options = {"env": "gymnasium", "id": "NoSuchThing-v0", "size": 16, "num_envs": 1, "max_episode_steps": 5}
    told = raises_code("bench-env-failed", EmbodrlError, "'ready'", "NoSuchThing")
    with told, envs.stock_side(options, sys.executable):
        pytest.fail("there is no such environment")


def test_the_views_are_the_simulators_own() -> None:
    for name in ("maniskill", "metaworld", "gymnasium", "libero"):
        camera = envs.configure(name, 224).env.cameras[0]
        assert (camera.height, camera.width, camera.fov_rad) == (224, 224, None)


def test_settings_go_to_every_simulator() -> None:
    for name in ("maniskill", "metaworld"):
        env = envs.configure(name, 64, [f"env.python={sys.executable}", "env.num_processes=1"]).env
        assert (env.python, env.num_processes) == (sys.executable, 1)
