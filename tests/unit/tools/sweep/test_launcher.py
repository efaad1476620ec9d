"""Hydra's launchers among the arguments of a sweep."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.errors import UsageError
from embodrl.tools.sweep.launcher import HydraLauncher, read_launcher
from tests.helpers.expect import raises_code


def test_settings_of_a_launcher_become_options_of_the_sweep() -> None:
    assert read_launcher(["env=toy", "runner.seed=0,1"]) == HydraLauncher(["env=toy", "runner.seed=0,1"])
    slurm = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=90", "+hydra.launcher.gpus_per_node=2"]
    more = ["hydra.launcher.mem_gb=32", "hydra.launcher.partition='long'", "hydra.launcher.array_parallelism=4"]
    assert read_launcher([slurm[0], "runner.seed=0,1", *slurm[1:], *more]) == HydraLauncher(
        ["runner.seed=0,1"], "slurm", 4, ("--time=90", "--gpus-per-node=2", "--mem=32G", "--partition=long")
    )
    assert read_launcher(["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]) == HydraLauncher([], "local", 2)
    assert read_launcher(["hydra/launcher=ray"]) == HydraLauncher([], "ray")


@pytest.mark.parametrize(
    "arguments",
    [
        ["hydra/launcher=slrm"],
        ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout=60"],
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=many"],
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=0"],
        ["hydra.launcher.timeout_min=60"],
        ["hydra/launcher=submitit_slurm", "hydra.launcher.mem_gb"],
        ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min="],
        ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2"],
    ],
)
def test_what_no_launcher_has_is_refused(arguments: list[str]) -> None:
    with raises_code("sweep-launcher", UsageError):
        read_launcher(arguments)


def test_a_launcher_of_slurm_submits_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/bash\necho 17\n")
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings = ["env=toy", "model=mlp", "runner.seed=0,1", "hydra/launcher=slurm", "hydra.launcher.timeout_min=60"]
    other = CliRunner().invoke(app, ["sweep", *settings, "hydra.launcher.array_parallelism=2", "--jobs", "3"])
    assert other.exit_code == 2 and "sweep-launcher" in other.output
    local = CliRunner().invoke(app, ["sweep", *settings, "--backend", "local"])
    assert local.exit_code == 2 and "sweep-launcher" in local.output
    done = CliRunner().invoke(app, ["sweep", *settings, "--output", str(tmp_path / "sweep")])
    assert done.exit_code == 0, done.output
    script = (tmp_path / "sweep" / "sweep.sbatch").read_text()
    assert "#SBATCH --array=0,1%1\n" in script and "#SBATCH --time=60\n" in script
