"""MLflow and SwanLab: the calls that they get, on stand-ins, and what a run leaves behind with the packages."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import yaml
from expect import raises_code

from embodrl.config import load_config
from embodrl.config.schema import LoggerConfig
from embodrl.errors import ConfigError, MissingDependencyError
from embodrl.reporting import trackers
from embodrl.reporting.sinks import MetricsLogger
from embodrl.trainer.files import offline_lines

MLFLOW = LoggerConfig(tensorboard=False, mlflow_mode="offline", mlflow_experiment="push")
SWANLAB = LoggerConfig(tensorboard=False, swanlab_mode="offline", swanlab_project="push")


class FakeClient:
    """A client of MLflow that keeps its calls."""

    calls: list[tuple[str, Any]]

    def __init__(self, tracking_uri: str | None) -> None:
        self.calls = CALLS
        self.calls.append(("client", tracking_uri))

    def get_experiment_by_name(self, name: str) -> None:
        self.calls.append(("experiment?", name))

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        self.calls.append(("experiment", (name, artifact_location)))
        return "1"

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        self.calls.append(("run", (experiment_id, run_name)))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def update_run(self, run_id: str, status: str) -> None:
        self.calls.append(("again", (run_id, status)))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert run_id == "abc" and len(params) <= 100 and len(metrics) <= 1000
        self.calls.append(("metrics", metrics) if metrics else ("params", params))

    def set_terminated(self, run_id: str) -> None:
        self.calls.append(("end", run_id))


CALLS: list[tuple[str, Any]] = []
WAITS = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are unset, and what a tracker sets ends with the test."""
    for name in WAITS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    CALLS.clear()
    entities = SimpleNamespace(Metric=lambda *args: args, Param=lambda *args: args)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=FakeClient, entities=entities))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    return CALLS


def play(run_dir: Path, config: LoggerConfig, iteration: int, resumed: int | None = None) -> None:
    """Log one row, with what no tracker takes."""
    settings = {"runner": {"seed": 1, "name": "x" * 600}, "env": {}}
    saved = (run_dir / "metrics.jsonl").read_bytes() if resumed is not None else b""
    with MetricsLogger(run_dir, config, resumed, settings, saved=saved) as metrics:
        metrics.log({"iteration": iteration, "a/b": 0.5, "loss(x)": 2, "bad": float("nan"), "text": "no"})


def test_mlflow_gets_settings_and_numbers_and_continues_its_run(mlflow: list[Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    play(run_dir, MLFLOW, 1)
    found = dict(mlflow)
    assert found["client"] == f"sqlite:///{run_dir / 'mlflow' / 'mlflow.db'}"
    assert found["experiment"] == ("push", (run_dir / "mlflow").as_uri()) and found["run"] == ("1", "mine")
    assert dict(found["params"]) == {"runner.seed": "1", "runner.name": "x" * 500, "env": "{}"}
    assert {(name, value, step) for name, value, _, step in found["metrics"]} >= {("a/b", 0.5, 1), ("loss_x_", 2.0, 1)}
    assert not {"bad", "text", "iteration"} & {name for name, *_ in found["metrics"]}
    assert mlflow[-1] == ("end", "abc") and (run_dir / "mlflow_id.txt").read_text() == "abc\n"
    mlflow.clear()
    play(run_dir, MLFLOW, 2, resumed=1)
    assert [name for name, _ in mlflow] == ["client", "again", "metrics", "end"]
    assert dict(mlflow)["again"] == ("abc", "RUNNING")


def test_mlflow_online_is_the_server_of_its_own_variable(mlflow: list[Any], tmp_path: Path) -> None:
    play(tmp_path, MLFLOW.model_copy(update={"mlflow_mode": "online"}), 1)
    assert dict(mlflow)["client"] == "http://tracking:5000" and dict(mlflow)["experiment"] == ("push", None)
    assert not (tmp_path / "mlflow").exists()


def test_mlflow_waits_for_a_server_as_long_as_the_user_says_or_about_a_minute(
    mlflow: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WAITS[0], "9")
    play(tmp_path, MLFLOW.model_copy(update={"mlflow_mode": "online"}), 1)
    assert [os.environ[name] for name in WAITS] == ["9", "15"]


def test_mlflow_itself_gives_up_on_a_server_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{address}")
    monkeypatch.setattr(trackers, "_MLFLOW_WAITS", {WAITS[0]: "1", WAITS[1]: "2"})
    play(tmp_path, MLFLOW.model_copy(update={"mlflow_mode": "online"}), 1)
    assert "MLflow is disabled for this run" in caplog.text and "Retry(total=0" in caplog.text
    assert "Retry(total=1" not in caplog.text and (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_swanlab_gets_numbers_and_continues_its_experiment_online(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []
    logged: list[tuple[dict[str, Any], int]] = []
    ended: list[None] = []

    def init(**arguments: Any) -> Any:
        begun.append(arguments)
        return SimpleNamespace(log=lambda values, step: logged.append((values, step)))

    fake = SimpleNamespace(init=init, finish=lambda: ended.append(None))
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    run_dir, config = tmp_path / "mine", SWANLAB.model_copy(update={"swanlab_mode": mode})
    play(run_dir, config, 1)
    play(run_dir, config, 2, resumed=1)
    assert [(one["project"], one["experiment_name"]) for one in begun] == [("push", "mine")] * 2
    assert {one["mode"] for one in begun} == {"cloud" if mode == "online" else "offline"}
    assert begun[0]["logdir"] == str(run_dir / "swanlab") and (run_dir / "swanlab").is_dir()
    assert begun[0]["config"]["runner"]["seed"] == 1
    ids = {(one.get("id"), one.get("resume")) for one in begun}
    (run_id, resume) = ids.pop()
    assert not ids and (mode == "offline") == (run_id is None) == (resume is None)
    assert run_id is None or len(run_id) == 21
    assert [step for _, step in logged] == [1, 2] and len(ended) == 2
    assert logged[0][0]["a/b"] == 0.5 and not {"bad", "text", "iteration"} & set(logged[0][0])


def test_an_upload_that_does_not_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    run = SimpleNamespace(log=lambda values, step: None)
    fake = SimpleNamespace(init=lambda **_: run, finish=threading.Event().wait)
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    monkeypatch.setattr(trackers, "FINISH_S", 0.01)
    play(tmp_path, SWANLAB, 1)
    assert "SwanLab is disabled" in caplog.text and "swanlab sync" in caplog.text


@pytest.mark.parametrize(("name", "config"), [("mlflow", MLFLOW), ("swanlab", SWANLAB)])
def test_a_package_that_is_missing_is_named_with_its_extra(
    name: str, config: LoggerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embodrl.config.rules import runner

    monkeypatch.setitem(sys.modules, name, None)
    with raises_code("missing-dependency", MissingDependencyError, f"embodrl[{name}]"):
        MetricsLogger(tmp_path, config)
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda _: None)
    with raises_code("trackers-are-available", ConfigError, f"embodrl[{name}]"):
        load_config([f"runner.logger.{name}_mode=offline"])


def test_a_server_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from embodrl.config.rules import runner

    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda _: True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with raises_code("trackers-are-available", ConfigError, "MLFLOW_TRACKING_URI"):
        load_config(["env=toy", "runner.logger.mlflow_mode=online"])


def test_offline_runs_are_named_at_the_end(tmp_path: Path) -> None:
    config = load_config(["env=toy", "model=mlp"]).config
    logger = MLFLOW.model_copy(update={"swanlab_mode": "offline"})
    config = config.model_copy(update={"runner": config.runner.model_copy(update={"logger": logger})})
    first, second = offline_lines(config, tmp_path)
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow/mlflow.db" in first and "swanlab sync" in second


def test_mlflow_itself_has_what_was_logged(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    play(tmp_path / "mine", MLFLOW, 1)
    play(tmp_path / "mine", MLFLOW, 2, resumed=1)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mine' / 'mlflow' / 'mlflow.db'}")
    run_id = (tmp_path / "mine" / "mlflow_id.txt").read_text().strip()
    assert [each.step for each in client.get_metric_history(run_id, "a/b")] == [1, 2]
    assert client.get_run(run_id).data.params["runner.seed"] == "1"


def test_swanlab_itself_writes_into_the_run(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    play(tmp_path, SWANLAB, 1)
    (written,) = (tmp_path / "swanlab").glob("run-*/backup.swanlab")
    content = written.read_bytes()
    assert all(text in content for text in (b'"key": "a/b"', b'"data": 0.5', b'"step": 1'))
    (settings,) = (tmp_path / "swanlab").glob("run-*/files/config.yaml")
    assert yaml.safe_load(settings.read_text())["runner"]["value"]["seed"] == 1


@pytest.mark.parametrize("name", ["mlflow", "swanlab"])
def test_a_run_arrives_in_the_package_itself(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    run_dir = tmp_path / "mine"
    argument = f"runner.logger.{name}_mode=offline"
    done = runs.embodrl(
        "train",
        "env=toy",
        "model=mlp",
        "runner=debug",
        "runner.max_iterations=2",
        f"runner.output_dir={run_dir}",
        argument,
    )
    assert done.code == 0, done.stderr
    losses = [row["train/policy_loss"] for row in runs.metrics(run_dir)]
    if name == "swanlab":
        (written,) = (run_dir / "swanlab").glob("run-*/backup.swanlab")
        assert all(f'"data": {loss}'.encode() in written.read_bytes() for loss in losses)
        return
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{run_dir / 'mlflow' / 'mlflow.db'}")
    run = client.get_run((run_dir / "mlflow_id.txt").read_text().strip())
    assert [each.value for each in client.get_metric_history(run.info.run_id, "train/policy_loss")] == losses
    assert run.data.params["runner.max_iterations"] == "2" and run.info.status == "FINISHED"
