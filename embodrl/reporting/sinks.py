"""Destinations of metrics: always metrics.jsonl, and the configured trackers.

Metrics that depend on the clock are named ``time/...``, and those on the use of the machine ``usage/...``
(``usage.py``); all others are equal in two runs with the same seed. ``rows.is_measured`` tells them apart.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from embodrl.config.schema import LoggerConfig
from embodrl.errors import MissingDependencyError, OutputError
from embodrl.fields import open_descriptor
from embodrl.reporting.metrics_file import METRICS_FILE, parse_row, restore_metrics
from embodrl.reporting.trackers import MlflowTracker, SwanlabTracker, finish_within, read_id
from embodrl.storage.atomic import ELSEWHERE_OF_RUNS, output_error
from embodrl.storage.json_file import write_text_file

if TYPE_CHECKING:
    from google.protobuf.message import Message

logger = logging.getLogger(__name__)

WANDB_FINISH_S = 60.0
MetricValue = float | int | str | None


class Tracker(Protocol):
    """A destination that metrics are copied to; its errors disable the tracker, not the run."""

    def log(self, metrics: Mapping[str, MetricValue], iteration: int) -> None:
        """Record the numbers of an iteration."""
        ...

    def close(self) -> None:
        """Finish writing."""
        ...


class TensorBoardTracker:
    """Scalars in a TensorBoard event file.

    Written here, not by torch's SummaryWriter, whose thread prints tracebacks when the disk is full, and then blocks
    the process on its queue.

    Args:
        resume_iteration: later iterations of an earlier process are hidden; None for a new run.
    """

    def __init__(self, directory: Path, resume_iteration: int | None) -> None:
        # By name: protobuf creates the classes of these modules at import.
        proto = import_module("tensorboard.compat.proto.event_pb2")
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = proto.Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        directory.mkdir(parents=True, exist_ok=True)
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        started = f"{seconds:010d}.{nanoseconds:09d}"  # readers sort by name
        name = f"events.out.tfevents.{started}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("xb")
        self._writer = RecordWriter(self._file)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if resume_iteration is not None:
            start = proto.SessionLog(status=proto.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=resume_iteration + 1, session_log=start))
        self._file.flush()

    def _write(self, event: Message) -> None:
        self._writer.write(event.SerializeToString())

    def log(self, metrics: Mapping[str, MetricValue], iteration: int) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and name != "iteration"
        ]
        self._write(self._event(wall_time=time.time(), step=iteration, summary=self._summary(value=values)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbTracker:
    """Weights & Biases; a resumed run continues under the run id in ``wandb_id.txt``.

    Raises:
        MissingDependencyError: the package is not installed.
    """

    def __init__(self, run_dir: Path, config: LoggerConfig, run_config: Mapping[str, object]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingDependencyError("wandb is not installed", "pip install 'embodrl[wandb]'") from error

        self._directory = run_dir
        self._step = -1
        id_file = run_dir / "wandb_id.txt"
        run_id = read_id(id_file) or os.urandom(4).hex()
        write_text_file(id_file, f"{run_id}\n")
        self._run = wandb.init(
            project=config.wandb_project,
            name=run_dir.name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            mode="offline" if config.wandb_mode == "offline" else "online",
            config=dict(run_config),
            settings=wandb.Settings(init_timeout=60, silent=True, console="off"),
        )

    def log(self, metrics: Mapping[str, MetricValue], iteration: int) -> None:
        """Record numbers; W&B's steps never decrease: late ones get the current step, and ``eval/iteration``."""
        known = {name: value for name, value in metrics.items() if value is not None}
        if iteration < self._step:
            known = known | {"iteration": self._step, "eval/iteration": iteration}
        self._step = max(iteration, self._step)
        self._run.log(known, step=self._step)

    def close(self) -> None:
        """Finish uploading; raises TimeoutError if that takes too long."""
        hint = f"`wandb sync {self._directory}/wandb/*run-*` uploads the rest"
        finish_within(WANDB_FINISH_S, self._run.finish, hint)


class MetricsLogger:
    """Writes one JSON object per iteration, and copies it to the trackers.

    Adds ``time/elapsed_s``, the sum of ``time/total_s`` over all iterations, including those before a resume.

    Args:
        run_dir: directory of metrics.jsonl and of the trackers' files.
        resume_iteration: None for a new run; otherwise the file is restored to ``saved``, which ends with that
            iteration, so that it ends up like an uninterrupted run's.
        trackers: replaces the configured ones (tests).
        file_name: name of the metrics file in ``run_dir``.
        saved: ``content`` from the checkpoint being resumed.

    Attributes:
        content: the whole file, for checkpoints.

    Raises:
        OutputError: the file can't be written, or a new run would append to an old run's metrics.
        MissingDependencyError: a tracker's package is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LoggerConfig,
        resume_iteration: int | None = None,
        run_config: Mapping[str, object] | None = None,
        trackers: Mapping[str, Tracker] | None = None,
        file_name: str = METRICS_FILE,
        saved: bytes = b"",
    ) -> None:
        self.path = Path(run_dir) / file_name
        self.content = bytearray()
        self._elapsed_s = 0.0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume_iteration is None:
                self._refuse_old_metrics()
            else:
                self.content += restore_metrics(self.path, saved)
                found = (parse_row(line) or {} for line in reversed(bytes(self.content).splitlines(keepends=True)))
                self._elapsed_s = next((float(row["time/elapsed_s"]) for row in found if "time/elapsed_s" in row), 0.0)
            self._file = open(self.path, "ab", opener=_open_no_link)  # noqa: SIM115  (closed by ``close``)
        except OSError as error:
            # A device, pipe, directory or link with this name.
            foreign = self.path.is_symlink() or (self.path.exists() and not self.path.is_file())
            hint = "set runner.output_dir to a writable directory"
            if foreign:
                hint = f"move {self.path} away: it is not a file of embodrl; `embodrl resume` restores its rows"
            raise OutputError(f"{self.path} can't be written: {error}", hint) from error
        if trackers is None:
            trackers = self._build_trackers(config, resume_iteration, run_config or {})
        self._trackers = dict(trackers)

    def _refuse_old_metrics(self) -> None:
        if self.path.is_file() and self.path.stat().st_size:
            raise OutputError(
                f"{self.path} holds the metrics of an earlier run",
                f"run `embodrl resume {self.path.parent}` or choose another runner.output_dir",
                code="run-exists",
            )

    def _build_trackers(
        self, config: LoggerConfig, resume_iteration: int | None, run_config: Mapping[str, object]
    ) -> dict[str, Tracker]:
        run_dir = self.path.parent
        builders: dict[str, Callable[[], Tracker]] = {}
        if config.tensorboard:
            builders["TensorBoard"] = lambda: TensorBoardTracker(run_dir / "tensorboard", resume_iteration)
        if config.wandb_mode != "off":
            builders["Weights & Biases"] = lambda: WandbTracker(run_dir, config, run_config)
        if config.mlflow_mode != "off":
            builders["MLflow"] = lambda: MlflowTracker(run_dir, config, run_config)
        if config.swanlab_mode != "off":
            builders["SwanLab"] = lambda: SwanlabTracker(run_dir, config, run_config)
        trackers: dict[str, Tracker] = {}
        for name, build in builders.items():
            try:
                trackers[name] = build()
            except MissingDependencyError:
                raise
            except Exception as error:  # noqa: BLE001  a tracker may raise anything, and must not end the run
                logger.warning("%s is disabled for this run: it could not be started: %s", name, error)
        return trackers

    def log(self, metrics: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
        """Append the metrics of an iteration, synced to disk, and copy them to the trackers; return them as written.

        ``metrics`` includes ``iteration``; non-finite numbers are written as null.

        Raises:
            OutputError: metrics.jsonl can't be written.
        """
        self._elapsed_s += float(metrics.get("time/total_s") or 0.0)
        return self.log_late({**metrics, "time/elapsed_s": round(self._elapsed_s, 3)})

    def log_late(self, metrics: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
        """Append late metrics of an iteration that already has a row; as ``log``, without adding to the time."""
        row = {name: _finite(value) for name, value in metrics.items()}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise output_error(f"{self.path} can't be written", self.path, error, ELSEWHERE_OF_RUNS) from error
        for name in list(self._trackers):
            self._guard(name, lambda tracker: tracker.log(row, int(metrics["iteration"] or 0)))
        self.content += line  # last: a checkpoint after an interruption has either the row or its evaluation pending
        return row

    def _guard(self, name: str, call: Callable[[Tracker], None]) -> None:
        try:
            call(self._trackers[name])
        except Exception as error:  # noqa: BLE001  a tracker may raise anything, and must not end the run
            logger.warning("%s is disabled for the rest of this run: %s; metrics.jsonl is complete", name, error)
            del self._trackers[name]

    def close(self) -> None:
        """Close the file and the trackers; may be called twice."""
        for name in list(self._trackers):
            self._guard(name, lambda tracker: tracker.close())
        self._trackers = {}
        try:
            self._file.close()
        except OSError as error:  # ``log`` has synced every row or raised: nothing more is lost
            logger.error("%s could not be closed: %s", self.path, error)

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_no_link(path: str, flags: int) -> int:
    return open_descriptor(path, flags | os.O_NOFOLLOW)


def _finite(value: MetricValue) -> MetricValue:
    return None if isinstance(value, float) and not math.isfinite(value) else value
