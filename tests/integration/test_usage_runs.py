"""Rows of whole runs have what the run used of the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from runs import embodrl, metrics

SMALL = (
    *("env=toy", "model=mlp", "runner.max_iterations=2", "runner.eval_interval=0", "runner.eval_at_start=false"),
    *("env.train.total_num_envs=4", "env.num_processes=2", "env.train.max_steps_per_rollout_epoch=8"),
    *("env.max_episode_steps=8", "env.eval.num_episodes=2"),
    *("actor.global_batch_size=8", "actor.micro_batch_size=4", "cluster.num_threads=1", "runner.logger.console=plain"),
)


def run(directory: Path, *settings: str) -> list[dict[str, float]]:
    done = embodrl("train", *SMALL, f"runner.output_dir={directory}", *settings)
    assert done.code == 0, done.stderr
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def assert_plausible(row: dict[str, float], components: set[str], links: set[str]) -> None:
    names = {name.removeprefix("usage/") for name in row if name.startswith("usage/")}
    wanted = {f"cores_{each}" for each in components} | {f"memory_{each}_gib" for each in components}
    wanted |= {f"{way}_{link}_mib" for way in ("sent", "received") for link in links}
    assert names - {"shared_mib"} == wanted | {"idle_env", "idle_rollout", "idle_actor"}
    for component in components:
        assert 0 <= row[f"usage/cores_{component}"] <= 2 * (os.cpu_count() or 1)
        assert 0.01 < row[f"usage/memory_{component}_gib"] < 64
    for link in links:
        assert row[f"usage/sent_{link}_mib"] > 0 and row[f"usage/received_{link}_mib"] > 0
    assert all(0 <= row[f"usage/idle_{each}"] <= 1 for each in ("env", "rollout", "actor"))


@pytest.mark.parametrize("is_apart", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_row_has_the_use_of_each_component(
    is_apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Forked processes of tests show the environment of their server, which is in no family.
    monkeypatch.setenv("EMBODRL_TESTS_COLD", "1")
    apart = ("actor.own_process=true", "rollout.own_process=true") if is_apart else ()
    rows = run(tmp_path / "run", *apart)
    others = {"actor", "rollout"} if is_apart else set[str]()
    for row in rows:
        assert_plausible(row, {"main", "env"} | others, others or {"env"})
    assert (rows[-1].get("usage/shared_mib", 0) > 0) == is_apart
    assert "<h2>Usage</h2>" in (tmp_path / "run" / "report.html").read_text()
    assert not any(name.startswith("usage/") for row in metrics(tmp_path / "run") for name in row)
