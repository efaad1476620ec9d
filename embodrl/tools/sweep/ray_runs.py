"""Runs of a sweep as tasks of a Ray cluster: Ray decides where and when each starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodrl.errors import UsageError
from embodrl.fields import open_descriptor
from embodrl.scheduler.launchers.ray.launcher import connect, import_ray
from embodrl.tools.sweep.ray_task import run_one
from embodrl.tools.sweep.sweep import Sweep
from embodrl.trainer.lock import is_locked

logger = logging.getLogger(__name__)

FAILED = 1
"""Exit code that is reported for a run whose machine or task was lost."""
_AMOUNTS = ("num_cpus", "num_gpus", "memory")
_END_S = 25.0
"""Time in which cancelled tasks answer; one that Ray has not placed yet may never. Runs that are saving have longer."""


def read_resources(texts: Sequence[str]) -> dict[str, Any]:
    """Return the options of a Ray task for ``NAME=AMOUNT``: num_cpus (1), num_gpus (0), memory in bytes, or a resource.

    Raises:
        UsageError: one is not of that form.
    """
    amounts: dict[str, float] = {"num_cpus": 1.0}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            amounts[name] = float(value)
        except ValueError:
            amounts[name] = -1.0
        if not name or not 0 <= amounts[name] < float("inf"):
            hint = 'give the resources of a run, e.g. --ray "num_cpus=4 num_gpus=1"'
            raise UsageError(f"{text!r} is not NAME=AMOUNT", hint, code="sweep-ray")
    others = {name: amount for name, amount in amounts.items() if name not in _AMOUNTS}
    return {name: amounts[name] for name in _AMOUNTS if name in amounts} | ({"resources": others} if others else {})


def _fits(wanted: dict[str, Any], offered: dict[str, float]) -> bool:
    """Return whether a machine of Ray has the resources of a run."""
    amounts = {"CPU": wanted["num_cpus"], "GPU": wanted.get("num_gpus", 0.0), "memory": wanted.get("memory", 0.0)}
    return all(amount <= offered.get(name, 0.0) for name, amount in (amounts | wanted.get("resources", {})).items())


class RayRuns:
    """Runs as tasks of the Ray cluster at RAY_ADDRESS, or of one on this machine.

    A task whose machine is lost starts again elsewhere, and continues its run.

    Raises:
        MissingDependencyError: Ray is not installed.
    """

    started = "submitted to Ray"

    def __init__(self, sweep: Sweep) -> None:
        self._ray = import_ray()
        self._sweep = sweep
        self._owned = not self._ray.is_initialized()
        if self._owned:
            connect(self._ray, None)
        wanted = read_resources(sweep.ray)
        if not any(_fits(wanted, node["Resources"]) for node in self._ray.nodes() if node["Alive"]):
            logger.warning("no machine of Ray has %s: the runs wait until one joins", wanted)
        self._task = self._ray.remote(run_one).options(**wanted)
        self._running: dict[Any, int] = {}

    @property
    def indices(self) -> list[int]:
        return list(self._running.values())

    def has_room(self) -> bool:
        return len(self._running) < self._sweep.jobs

    def start(self, index: int) -> None:
        self._running[self._task.remote(self._sweep, index, str(Path.cwd()))] = index

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        """Wait until a run has ended, at most that long; return index and exit code of each that has."""
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        ended = [(self._running.pop(reference), reference) for reference in done]
        return [(index, self._exit_code(index, reference)) for index, reference in ended]

    def _exit_code(self, index: int, reference: Any) -> int:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            with open(self._sweep.log(index), "a", encoding="utf-8", opener=open_descriptor) as log:
                log.write(f"{error}\n")
            return FAILED

    def end(self) -> None:
        """Stop the remaining runs, which save."""
        for reference in self._running:
            self._ray.cancel(reference)
        if self._running:
            _, left = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_END_S)
            while left and any(is_locked(self._sweep.path(self._running[one])) for one in left):
                _, left = self._ray.wait(left, num_returns=len(left), timeout=1.0)
        self._running = {}

    def close(self) -> None:
        if self._owned:
            self._ray.shutdown()
