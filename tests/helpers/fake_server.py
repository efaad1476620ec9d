"""A server with 8 GPUs that is not here, and a launcher that makes each worker in place, under its own environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from embodrl.errors import WorkerError
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.launchers.base import CallOutcome, Job, Launcher, Running
from embodrl.scheduler.launchers.host import context_message, environment
from embodrl.scheduler.messages import CODEC
from embodrl.scheduler.worker import Worker, WorkerContext, make_worker

NUM_CPUS = 128
RAY_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}
"""What Ray sets in an actor that reserves no GPU of its own."""


class InPlace(Running):
    """A worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def started(self) -> Future[CallOutcome]:
        return _done(None)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[CallOutcome]:
        return _done(getattr(self.worker, method)(*args, **kwargs))

    def explain_delay(self) -> str:
        return ""

    def close(self, grace_s: float) -> None:
        pass

    def kill(self) -> None:
        pass


def _done(value: Any) -> Future[CallOutcome]:
    future: Future[CallOutcome] = Future()
    future.set_result(CallOutcome(value, 0.0))
    return future


class FakeLauncher(Launcher):
    """Makes workers from what a start message carries, with the environment and the cores that they would have.

    Args:
        inherited: variables that differ from those of this process before the worker's own are set.

    Attributes:
        variables: by group and rank.
        workers: by group and rank.
    """

    def __init__(self, inherited: Mapping[str, str] | None = None) -> None:
        self.inherited = dict(inherited or {})
        self.variables: dict[tuple[str, int], dict[str, str]] = {}
        self.workers: dict[tuple[str, int], Any] = {}

    def start(self, job: Job, on_death: Callable[[WorkerError], None]) -> Running:
        context = context_message(job.group, job.rank, job.world_size, job.place, "")
        variables = self.inherited | environment(job.place, job.world_size)
        self.variables[job.group, job.rank] = variables
        with as_child(variables, context["cpus"]):
            placed = WorkerContext(**context, channels=job.channels)
            worker = make_worker(job.worker_class, placed, CODEC.copied(job.kwargs))
        self.workers[job.group, job.rank] = worker
        return InPlace(worker)

    def channel(self, name: str, capacity: int = 2) -> Channel:
        return SimpleNamespace(name=name, capacity=capacity)  # type: ignore[return-value]

    def close(self) -> None:
        pass


@contextmanager
def as_child(variables: Mapping[str, str], cpus: tuple[int, ...]) -> Iterator[None]:
    """Give this process the environment and the affinity of a worker."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(os, "sched_getaffinity", lambda _: set(cpus) if cpus else set(range(NUM_CPUS)))
        yield
