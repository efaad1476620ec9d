"""Errors that users can act on; each has a hint."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)
MAX_FRAMES = 6


class EmbodrlError(Exception):
    """Base class of all errors that embodrl raises deliberately.

    Args:
        message: what is wrong, naming the object concerned.
        hint: what the user can do about it.
        code: stable identifier, explained by `embodrl explain CODE`; defaults to the class's.

    Attributes:
        code: stable identifier in kebab case; defaults to the class name without ``Error``.
        exit_code: exit code of a command that fails with the error.
    """

    code: str = "embodrl"
    exit_code: int = 1

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "code" not in cls.__dict__:
            cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__.removesuffix("Error")).lower()

    def __init__(self, message: str, hint: str = "", *, code: str | None = None) -> None:
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code
        super().__init__(self._text())

    def _text(self) -> str:
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{self.message}{hint}\n  code: {self.code}"

    def add(self, text: str) -> None:
        """Append a line to the message, before the hint."""
        self.message = f"{self.message}\n  {text}"
        self.args = (self._text(),)

    def add_hint(self, text: str) -> None:
        """Append a further step to the hint."""
        self.hint = "; then ".join(filter(None, (self.hint, text)))
        self.args = (self._text(),)


def without_controls(text: str) -> str:
    """Return a text without control characters, which values and foreign errors may contain, for a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


@dataclass(frozen=True)
class ConfigProblem:
    """A single problem in a configuration.

    Attributes:
        key: dotted key, e.g. ``algorithm.gamma``.
        message: what is wrong, with the offending value.
        origin: origin of the value, e.g. ``configs/algorithm/ppo.yaml:7`` or ``command line``.
        allowed: allowed values or range, in words; empty if not applicable.
        nearest: nearest valid name for a misspelt one; empty if none is near.
        hint: what to change.
        code: stable identifier of the rule, explained by `embodrl explain CODE`.
    """

    key: str
    message: str
    origin: str = ""
    allowed: str = ""
    nearest: str = ""
    hint: str = ""
    code: str = "config"

    def paragraph(self) -> str:
        """Return the problem as in reports: key, message, origin, allowed values, nearest name, hint and code."""
        lines = [f"{self.key}: {self.message}"]
        if self.origin:
            lines.append("     at:       " + self.origin.replace("\n", "\n               "))
        named = {"allowed": self.allowed, "nearest": self.nearest, "hint": self.hint, "code": self.code}
        lines += [f"     {name + ':':<9} {text}" for name, text in named.items() if text]
        return without_controls("\n".join(lines))


@dataclass
class ConfigError(EmbodrlError):
    """All problems of a configuration, in one report."""

    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])

    def __post_init__(self) -> None:
        super().__init__(self.report())

    def __str__(self) -> str:
        return self.report()

    def report(self) -> str:
        """Return the report, one paragraph per problem."""
        count = len(self.problems)
        lines = [f"The configuration has {count} problem{'s' if count != 1 else ''}:"]
        for number, problem in enumerate(self.problems, start=1):
            lines.append(f"\n{number}. {problem.paragraph()}")
        return "\n".join(lines)


class UnknownNameError(EmbodrlError):
    """A name is not in its registry."""


class UsageError(EmbodrlError):
    """The command line names something that does not exist; nothing was started."""

    exit_code = 2


class MissingDependencyError(EmbodrlError):
    """An optional package or a system library is not installed."""


@dataclass(frozen=True)
class PipelineProblem:
    """A single problem in a pipeline.

    Attributes:
        node: name of the node; "" for the whole pipeline.
        message: what is wrong.
        hint: what to change.
        code: stable identifier, explained by `embodrl explain CODE`.
    """

    node: str
    message: str
    hint: str
    code: str = "pipeline"

    def __str__(self) -> str:
        return f"node '{self.node}': {self.message}" if self.node else self.message


class PipelineError(EmbodrlError):
    """A pipeline's graph is invalid, or one of its nodes failed."""

    def __init__(
        self, message: str, hint: str = "", problems: tuple[PipelineProblem, ...] = (), *, code: str | None = None
    ) -> None:
        lines = [
            f"\n  {number}. {p}\n     hint: {p.hint}\n     code: {p.code}" for number, p in enumerate(problems, start=1)
        ]
        super().__init__(message + "".join(lines), hint, code=code)
        self.problems = problems


class BatchError(EmbodrlError):
    """Incompatible batches, or an invalid operation on one."""


class BatchKeyError(BatchError):
    """A batch lacks required columns."""


class BatchShapeError(BatchError):
    """Shapes, lengths or dtypes differ."""


class BatchIndexError(BatchError, IndexError):
    """A batch has no such row."""


class CheckpointError(EmbodrlError):
    """A checkpoint is torn, corrupt, incomplete or does not match the model.

    Args:
        message: what went wrong, naming the checkpoint.
        hint: what the user can do about it.
        report: outcome per name (a ``LoadReport``) if names or shapes do not match.
    """

    def __init__(self, message: str, hint: str = "", report: object = None, *, code: str | None = None) -> None:
        super().__init__(message, hint, code=code)
        self.report = report


class HubError(CheckpointError):
    """A hub repository can't be fetched: no network, no permission, no such name, or a wrong checksum."""


class StatisticsMissingError(CheckpointError):
    """A checkpoint has no statistics for the requested robot."""


class PolicyFileError(CheckpointError):
    """A file of a policy directory is invalid: config, statistics, shard index, weights or tokenizer."""


class EnvError(EmbodrlError):
    """A simulator process failed."""


class EnvOrderError(EnvError):
    """A simulator was called out of order: it has not started, is busy, offloaded or never reset."""


class EnvWorkerDied(EnvError):
    """A simulator process ended without reporting why (signal, out of memory, ...)."""


class EnvProtocolError(EnvWorkerDied):
    """A simulator process sent an invalid answer, and was killed."""


class EnvTimeout(EnvError):
    """A simulator process did not answer in time."""


class EnvRaised(EnvError):
    """The simulator raised; the message carries the child's traceback."""


class EnvQuarantined(EnvError):
    """A simulator returned invalid values in too many consecutive episodes; new episodes do not help."""


class TaskRunnerError(EmbodrlError, RuntimeError):
    """A task runner is closed, its loop has failed, or an unsupported operation was requested."""


class TaskQueueFull(TaskRunnerError):
    """The queue had no free slot in time; nothing was queued."""


class TaskIdTaken(TaskRunnerError, ValueError):
    """A task with this id is queued, running, or has an undelivered result."""


class FileFormatError(EmbodrlError):
    """A file does not have the expected format, or a value in it is invalid."""


class FileDamagedError(EmbodrlError):
    """A file differs from what was written: its size or checksum does not match."""


class OutputError(EmbodrlError):
    """The output directory can't be written, or the disk is full."""


class WorkerError(EmbodrlError):
    """A worker of a group failed.

    Args:
        message: what went wrong, naming group and rank.
        hint: what the user can do about it.
        rank: rank of the worker.
        traceback: traceback in the worker, or "".
        log_tail: end of the worker's output.
    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        rank: int = 0,
        traceback: str = "",
        log_tail: str = "",
        *,
        code: str | None = None,
    ) -> None:
        parts = [message, traceback.rstrip(), f"last output:\n{log_tail}" if log_tail else ""]
        super().__init__("\n".join(filter(None, parts)), hint, code=code)
        self.rank = rank
        self.traceback = traceback
        self.log_tail = log_tail


class WorkerDied(WorkerError):
    """A worker process ended unexpectedly."""


class WorkerHung(WorkerDied):
    """A worker process was stopped or hung, and was killed."""


class WorkerTimeout(WorkerError):
    """A worker did not answer in time."""


class WorkerRaised(WorkerError):
    """A method of a worker raised; carries the worker's traceback."""


class RolloutEngineError(EmbodrlError):
    """A rollout engine failed and can no longer act."""


class NonFiniteError(EmbodrlError):
    """Losses or gradients were NaN or infinite several times in a row."""


class WorkflowError(EmbodrlError):
    """A workflow leaves nothing to train on."""


class EpisodeTimeout(EmbodrlError):
    """A workflow episode took longer than ``rollout.episode_timeout_s``."""


class RewardError(EmbodrlError):
    """A reward function failed, took too long, or returned an invalid reward."""


class MessageError(EmbodrlError):
    """A value can't be sent between processes."""


class WireError(EmbodrlError):
    """A message of a policy client or server is malformed, too large, or incomplete."""


class RemotePolicyError(EmbodrlError):
    """A policy server can't be reached, refuses an observation, or returns an invalid answer."""


class ServingError(EmbodrlError):
    """A policy server can't start, or can't answer."""


class StoreError(EmbodrlError):
    """A shared store can't be reached, or has incompatible content."""


class ChannelError(EmbodrlError):
    """A channel can't perform a requested operation."""


class ChannelClosed(ChannelError):
    """The channel was closed and is empty."""


class ChannelTimeout(ChannelError):
    """The channel stayed full, or empty, for too long."""


class WeightSyncError(EmbodrlError):
    """Weights did not reach a rollout, which keeps its previous version."""


class IncompleteSyncError(WeightSyncError):
    """A weight sync started but did not complete, or a part of it is missing."""


class WeightChecksumError(WeightSyncError):
    """A tensor arrived with different bytes than were sent."""


class WeightVersionError(WeightSyncError):
    """A version is not above the previous one, or builds on a missing one."""


class WeightLayoutError(WeightSyncError):
    """Names or shapes do not match the receiving policy."""


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the traceback frames in the user's own files, innermost last: not in embodrl, installed packages or the
    standard library. At most ``MAX_FRAMES``.
    """
    frames = traceback.extract_tb(error.__traceback__)
    standard = str(Path(traceback.__file__).parent)
    foreign = (_PACKAGE, standard, "<")
    found = [f for f in frames if not f.filename.startswith(foreign) and "site-packages" not in f.filename]
    return found[-MAX_FRAMES:]


def user_location(error: BaseException) -> str:
    """Return ``"FILE:LINE in FUNCTION"`` of the innermost frame in the user's files; "" without one."""
    frames = user_frames(error)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
