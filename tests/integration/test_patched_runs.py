"""Whole runs whose rollout processes get only changed weights: the same runs, with fewer bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import embodrl, metrics
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

TWO = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"
OWN = "weight_sync/"
SMALL = ("actor.param_dtype=bf16", "actor.optim.lr=1e-5")


def train(config: Path, run_dir: Path, *arguments: str, stop_at: str = "") -> list[dict[str, object]]:
    order = (f"runner.output_dir={run_dir}", TWO, *SMALL, *arguments)
    done = embodrl("train", "--config", config, *order, stop_at=stop_at, children=run_dir.with_name("children"))
    assert done.code == 0, done.stderr
    return metrics(run_dir)


@pytest.fixture(scope="module")
def plain(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    assert not any(name.startswith(OWN) for row in train(config, run_dir) for name in row)
    return run_dir


@pytest.mark.parametrize(
    ("sync", "stop_at"),
    [
        ("memory", ""),
        pytest.param("collective", "", marks=pytest.mark.long),
        pytest.param("memory", "take_weights:3:SIGKILL:rank_1_once", marks=pytest.mark.long),
        pytest.param("collective", "take_weights:3:SIGKILL:rank_1_once", marks=pytest.mark.long),
    ],
)
def test_the_run_is_the_one_without_patches(config: Path, plain: Path, tmp_path: Path, sync: str, stop_at: str) -> None:
    run_dir = tmp_path / "run"
    order = ("rollout.weight_patches=true", f"rollout.weight_sync={sync}")
    rows = train(config, run_dir, *order, stop_at=stop_at)
    assert [without(row) for row in rows] == [without(row) for row in metrics(plain)]
    mine, theirs = (load_file(path / "policy" / "model.safetensors") for path in (run_dir, plain))
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
    total_mib = sum(tensor.numel() * 2 for tensor in mine.values()) / 2**20
    syncs = [(row[f"{OWN}whole"], row[f"{OWN}changed"], row[f"{OWN}mib"]) for row in rows[1:]]
    # A process that has been replaced needs all weights; the other one gets them, too.
    restarted = [row["rollout/restarts"] for row in rows[1:]]
    assert restarted[-1] == (1 if stop_at else 0)
    assert [number for number, _, _ in syncs] == [1 + number for number in restarted]
    for before, now, (_, changed, mib) in zip([0, *restarted], restarted, syncs, strict=False):
        if now > before:
            assert changed == 1.0 and mib >= total_mib
        else:
            assert 0.0 < changed < 0.1 and mib < 0.2 * total_mib


def without(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name != "rollout/restarts" and not name.startswith(OWN)}
