"""MLflow and SwanLab as destinations of metrics, see ``sinks.Tracker``.

Of a row they get the numbers. A resumed run continues the same one there; SwanLab only does so online.
"""

from __future__ import annotations

import os
import re
import secrets
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from embodrl.config.schema import LoggerConfig
from embodrl.errors import MissingDependencyError
from embodrl.fields import read_regular_file
from embodrl.storage.json_file import write_text_file

FINISH_S = 60.0
MAX_ID_BYTES = 1024
MLFLOW_DATABASE = "mlflow.db"
_MLFLOW_PARAMS = 100
_MLFLOW_PARAM_CHARS = 500
_MLFLOW_METRICS = 1000
"""Limits of one call of MLflow, and of one parameter."""
_MLFLOW_WAITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}
"""Where the user has set none: with its own, a server that does not answer stops the run for 16 minutes."""
_NOT_OF_MLFLOW = re.compile(r"[^\w.:/ -]", re.ASCII)
_SWANLAB_ID = 21, string.ascii_lowercase + string.digits


class MlflowTracker:
    """A run of MLflow, in ``RUN/mlflow`` or on the server of ``MLFLOW_TRACKING_URI``; its id is in ``mlflow_id.txt``.

    A request to a server that is away fails after about a minute, or as MLflow's own variables say.

    Raises:
        MissingDependencyError: the package is not installed.
    """

    def __init__(self, run_dir: Path, config: LoggerConfig, run_config: Mapping[str, object]) -> None:
        try:
            import mlflow  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingDependencyError("mlflow is not installed", "pip install 'embodrl[mlflow]'") from error
        self._metric: Callable[..., Any] = mlflow.entities.Metric
        directory = (run_dir / "mlflow").absolute()
        local: dict[str, str] = {}
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        for name, value in _MLFLOW_WAITS.items():
            os.environ.setdefault(name, value)
        if config.mlflow_mode == "offline":
            directory.mkdir(parents=True, exist_ok=True)
            uri, local = f"sqlite:///{directory / MLFLOW_DATABASE}", {"artifact_location": directory.as_uri()}
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        id_file = run_dir / "mlflow_id.txt"
        known = read_id(id_file)
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._id = known
            return
        found = self._client.get_experiment_by_name(config.mlflow_experiment)
        experiment = (
            self._client.create_experiment(config.mlflow_experiment, **local) if found is None else found.experiment_id
        )
        self._id: str = self._client.create_run(experiment, run_name=run_dir.name).info.run_id
        write_text_file(id_file, f"{self._id}\n")
        params = [
            mlflow.entities.Param(_NOT_OF_MLFLOW.sub("_", key), str(value)[:_MLFLOW_PARAM_CHARS])
            for key, value in settings_of(run_config)
        ]
        for start in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MLFLOW_PARAMS])

    def log(self, metrics: Mapping[str, float | int | str | None], iteration: int) -> None:
        now = int(1000 * time.time())
        values = [
            self._metric(_NOT_OF_MLFLOW.sub("_", name), float(value), now, iteration)
            for name, value in numbers(metrics).items()
        ]
        for start in range(0, len(values), _MLFLOW_METRICS):
            self._client.log_batch(self._id, metrics=values[start : start + _MLFLOW_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanlabTracker:
    """An experiment of SwanLab; online its id is in ``swanlab_id.txt``, offline each process writes its own.

    Raises:
        MissingDependencyError: the package is not installed.
    """

    def __init__(self, run_dir: Path, config: LoggerConfig, run_config: Mapping[str, object]) -> None:
        try:
            import swanlab  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingDependencyError("swanlab is not installed", "pip install 'embodrl[swanlab]'") from error
        self._swanlab: Any = swanlab
        self._directory = run_dir / "swanlab"
        self._directory.mkdir(parents=True, exist_ok=True)
        resume: dict[str, str] = {}
        if config.swanlab_mode == "online":
            id_file = run_dir / "swanlab_id.txt"
            length, letters = _SWANLAB_ID
            run_id = read_id(id_file) or "".join(secrets.choice(letters) for _ in range(length))
            write_text_file(id_file, f"{run_id}\n")
            resume = {"id": run_id, "resume": "allow"}
        self._run: Any = swanlab.init(
            project=config.swanlab_project,
            experiment_name=run_dir.name,
            config=dict(run_config),
            logdir=str(self._directory),
            mode="cloud" if config.swanlab_mode == "online" else "offline",
            **resume,
        )

    def log(self, metrics: Mapping[str, float | int | str | None], iteration: int) -> None:
        self._run.log(numbers(metrics), step=iteration)

    def close(self) -> None:
        """Finish uploading; raises TimeoutError if that takes too long."""
        finish_within(FINISH_S, self._swanlab.finish, f"`swanlab sync {self._directory}/run-*` uploads the rest")


def numbers(metrics: Mapping[str, float | int | str | None]) -> dict[str, float | int]:
    """Return the numbers of a row."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "iteration"}


def settings_of(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield ``section.key`` and value of each setting."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from settings_of(cast("Mapping[str, object]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_id(path: Path) -> str | None:
    """Return the run id in a file; None without one."""
    try:
        return read_regular_file(path, MAX_ID_BYTES).decode().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def finish_within(limit_s: float, finish: Callable[[], object], hint: str) -> None:
    """Finish an upload; raise its error, or TimeoutError if it takes too long: without a network, it never ends."""
    errors: list[Exception] = []

    def call() -> None:
        try:
            finish()
        except Exception as error:  # noqa: BLE001  re-raised in the waiting thread
            errors.append(error)

    thread = threading.Thread(target=call, name="tracker-finish", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"the upload is not complete after {limit_s:g} s; {hint}")
    if errors:
        raise errors[0]
