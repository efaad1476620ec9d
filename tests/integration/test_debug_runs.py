"""Runs whose update leaves the policy as it is end like any other, on every kind of processor."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from runs import embodrl, metrics

from embodrl.processor import processor

with_simulator = [
    pytest.mark.sim,
    pytest.mark.skipif(importlib.util.find_spec("mani_skill") is None, reason="mani_skill is not installed"),
]
SMALL = [
    "env.video.enabled=false",
    "env.train.total_num_envs=4",
    "env.train.max_steps_per_rollout_epoch=20",
]
SMALL += [
    "env.eval.num_episodes=4",
    "env.eval.decoding=greedy",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=8",
    "env.num_processes=1",
]
TOY = ["env=toy", "model.warm_start=null", "runner=debug"]
MLP = [*TOY, "model=mlp", "env.state=full"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            ["env=maniskill", "model=openvla", "runner=debug"],
            marks=[*with_simulator, pytest.mark.long],
            id="maniskill",
        ),
        pytest.param(TOY, marks=pytest.mark.long, id="toy"),
        # One iteration, in which the critic alone trains: a divergence of 1e-14 is all that there is to draw.
        pytest.param(
            [*TOY, "model=mlp", "env.state=full", "runner=default", "runner.max_iterations=1"], id="one point"
        ),
    ],
)
def test_a_run_that_moves_little_ends_with_a_report(settings: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    outcome = embodrl("train", *settings, *SMALL, f"runner.output_dir={run_dir}")
    if "env=maniskill" in settings and re.search(r"^ *code: missing-dependency$", outcome.stderr, re.MULTILINE):
        pytest.skip(outcome.stderr)
    assert outcome.code == 0, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert metrics(run_dir)[-1]["eval/success_rate"] >= 0.0
    page = (run_dir / "report.html").read_text()
    assert "<svg" in page and "nan" not in page.split("<svg", 1)[1].split("</svg>")[0]
    precision = "bf16" if processor().has_bf16 else "fp32"
    assert f"computing in {precision} on {processor()}" in outcome.stdout + outcome.stderr
