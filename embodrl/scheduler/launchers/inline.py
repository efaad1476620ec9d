"""Workers in this process: a call runs at once, rank after rank, within reach of a debugger."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from embodrl.errors import WorkerError
from embodrl.processes.serve import describe_error
from embodrl.scheduler.channel import Channel, LocalChannel
from embodrl.scheduler.launchers.base import CallOutcome, Job, Launcher, RendezvousFiles, Running, raised
from embodrl.scheduler.messages import CODEC
from embodrl.scheduler.worker import WorkerContext, make_worker


class _InlineWorker(Running):
    def __init__(self, job: Job) -> None:
        self._job = job
        self._started: Future[CallOutcome] = Future()
        place = job.place
        context = WorkerContext(
            job.group,
            job.rank,
            job.world_size,
            place.node,
            place.devices,
            place.cpus,
            job.rendezvous,
            dict(job.channels),
        )
        self._worker = None
        try:
            self._worker = make_worker(job.worker_class, context, job.kwargs)
        except Exception as error:  # noqa: BLE001 - raised by the caller that waits for the start
            self._started.set_exception(self._describe(error, "__init__"))
        else:
            self._started.set_result(CallOutcome(None, 0.0))

    def started(self) -> Future[CallOutcome]:
        return self._started

    def call(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Future[CallOutcome]:
        future: Future[CallOutcome] = Future()
        # Copied as if sent, so that a worker can't come to rely on shared objects.
        args, kwargs = CODEC.copied((args, kwargs))
        start = time.perf_counter()
        try:
            value = getattr(self._worker, method)(*args, **kwargs)
            seconds = time.perf_counter() - start
            future.set_result(CallOutcome(CODEC.copied(value), seconds))
        except Exception as error:  # noqa: BLE001 - raised by the caller that waits for the result
            future.set_exception(self._describe(error, method))
        return future

    def _describe(self, error: Exception, method: str) -> WorkerError:
        described = raised(self._job.name, self._job.rank, describe_error(error, method))
        described.__cause__ = error
        return described

    def explain_delay(self) -> str:
        return ""

    def close(self, grace_s: float) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def kill(self) -> None:
        self._worker = None


class InlineLauncher(Launcher):
    """One process. The worker knows devices and cores of its placement, but is not bound to them.

    Arguments and results are copied as if sent, so that a worker can't come to rely on sharing; constructor arguments
    are passed as they are.
    """

    def __init__(self) -> None:
        self._rendezvous = RendezvousFiles()

    def start(self, job: Job, on_death: Callable[[WorkerError], None]) -> Running:
        return _InlineWorker(job)

    def channel(self, name: str, capacity: int = 2) -> Channel:
        return LocalChannel(name, capacity)

    def rendezvous(self, group: str) -> str:
        return self._rendezvous.init_method(group)

    def close(self) -> None:
        self._rendezvous.close()
