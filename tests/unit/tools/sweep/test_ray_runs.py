"""Runs of a sweep as tasks of Ray, with a stand-in for Ray that runs each task when it is waited for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from expect import raises_code
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.errors import MissingDependencyError, UsageError
from embodrl.tools.sweep import ray_runs, ray_task, runs
from embodrl.tools.sweep.ray_runs import read_resources
from embodrl.tools.sweep.runs import new_sweep, read_sweep, run_sweep
from embodrl.tools.sweep.sweep import Sweep

DONE = (
    'mkdir -p {run}/policy; echo \'{{"iteration": 3, "env_steps": 30}}\' > {run}/metrics.jsonl; touch {run}/report.html'
)


class Lost(Exception):
    """A task whose machine is lost."""


class OneByOne:
    """Ray's functions, on this machine. ``lost``: runs whose tasks are lost."""

    exceptions = SimpleNamespace(RayError=Lost)

    def __init__(self, lost: tuple[int, ...] = ()) -> None:
        self.lost = lost
        self.options_: dict[str, Any] = {}
        self.waited: list[int] = []
        self.cancelled: list[object] = []
        self.up = False
        self.lab = 1.0

    def is_initialized(self) -> bool:
        return self.up

    def init(self, address: str | None, **options: object) -> None:
        self.up = True

    def shutdown(self) -> None:
        self.up = False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0, "lab": self.lab}}]

    def remote(self, *values: Any) -> Any:
        if len(values) == 1:  # a function
            self.function = values[0]
            return self
        return values

    def options(self, **options: object) -> OneByOne:
        self.options_ = options
        return self

    def wait(self, tasks: list[Any], num_returns: int, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        self.waited.append(len(tasks))
        return tasks[:num_returns], tasks[num_returns:]

    def get(self, task: Any) -> int:
        if task[1] in self.lost:
            raise Lost("the machine has left")
        return self.function(*task)

    def cancel(self, task: object) -> None:
        self.cancelled.append(task)


def made(monkeypatch: pytest.MonkeyPatch, directory: Path, ray: OneByOne, scripts: list[str], jobs: int = 9) -> Sweep:
    """A sweep on Ray whose runs are shell scripts, in which {run} stands for the directory of the run."""
    for module in (ray_runs, runs):
        monkeypatch.setattr(module, "import_ray", lambda: ray)

    def command(self: Sweep, index: int) -> list[str]:
        return ["bash", "-c", scripts[index].format(run=self.path(index))]

    monkeypatch.setattr(Sweep, "command", command)
    seeds = ",".join(map(str, range(len(scripts))))
    arguments = ["env=toy", f"runner.seed={seeds}", "runner.max_iterations=3"]
    return new_sweep(arguments, None, directory, jobs, "ray", ray=["num_cpus=2", "num_gpus=0.5", "lab=1"])


def test_each_run_is_a_task_with_its_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = OneByOne()
    sweep = made(monkeypatch, tmp_path / "sweep", ray, [DONE, DONE, DONE], jobs=2)
    assert run_sweep(sweep) == 0 and sweep.unfinished() == []
    assert ray.options_ == {"num_cpus": 2.0, "num_gpus": 0.5, "resources": {"lab": 1.0}}
    assert ray.waited == [2, 2, 1]  # never more than --jobs
    assert not ray.up
    assert read_sweep(sweep.directory) == sweep
    assert sweep.runs[0].overrides[0] == "cluster.num_threads=2"
    assert (sweep.directory / "comparison.html").is_file()


def test_failed_and_lost_runs_are_reported_and_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = ["echo broken; exit 3", DONE, DONE]
    sweep = made(monkeypatch, tmp_path / "sweep", OneByOne(lost=(1,)), scripts)
    assert run_sweep(sweep) == 1 and sweep.unfinished() == [0, 1]
    printed = capsys.readouterr()
    shown = printed.out + printed.err
    assert f"seed-0: failed with exit code 3, see {sweep.log(0)}" in shown
    assert f"seed-1: failed with exit code 1, see {sweep.log(1)}" in shown
    assert sweep.log(0).read_text() == "broken\n" and "the machine has left" in sweep.log(1).read_text()


def test_a_cancelled_task_lets_its_run_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray interrupts the task's main thread."""

    def interrupted(seconds: float) -> None:
        if (tmp_path / "started").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(ray_task.time, "sleep", interrupted)
    saves = f"trap 'touch {tmp_path}/saved; exit 143' TERM; touch {tmp_path}/started; while :; do :; done"
    sweep = made(monkeypatch, tmp_path / "sweep", OneByOne(), [saves, DONE])
    assert ray_task.run_one(sweep, 0, str(tmp_path)) == 143
    assert (tmp_path / "saved").exists()


def test_what_no_machine_has_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray = OneByOne()
    run_sweep(made(monkeypatch, tmp_path / "sweep", ray, [DONE, DONE]))
    assert "no machine of Ray" not in caplog.text
    ray.lab = 0.5
    run_sweep(made(monkeypatch, tmp_path / "other", ray, [DONE, DONE]))
    assert "no machine of Ray has" in caplog.text


@pytest.mark.parametrize("text", ["num_cpus", "num_cpus=many", "=2", "num_gpus=-1", "memory=inf"])
def test_what_is_no_resource_is_refused(text: str) -> None:
    with raises_code("sweep-ray", UsageError):
        read_resources([text])


def test_options_of_another_backend_and_a_missing_ray_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises_code("sweep-backend", UsageError, "--ray"):
        new_sweep(["env=toy", "runner.seed=0,1"], None, tmp_path / "sweep", ray=["num_cpus=2"])
    with raises_code("sweep-backend", UsageError, "--slurm"):
        new_sweep(["env=toy", "runner.seed=0,1"], None, tmp_path / "sweep", slurm=["--gpus=1"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises_code("missing-dependency", MissingDependencyError, "embodrl[ray]"):
        new_sweep(["env=toy", "runner.seed=0,1"], None, tmp_path / "sweep", backend="ray")
    assert not (tmp_path / "sweep").exists()
    refused = CliRunner().invoke(app, ["sweep", "env=toy", "runner.seed=0,1", "--ray", "num_cpus=2"])
    assert refused.exit_code == 2 and "sweep-backend" in refused.output
