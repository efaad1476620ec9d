"""What a run uses of its machine: metrics ``usage/...`` of every row, since the row before.

| metric | |
|---|---|
| ``usage/cores_C`` | processor cores that component C keeps busy: processor seconds over wall seconds |
| ``usage/memory_C_gib`` | resident memory at the end of the iteration; processes that share pages count them each |
| ``usage/idle_C`` | share of the iteration, without its evaluation, in which C does not work |
| ``usage/sent_C_mib``, ``usage/received_C_mib`` | what the main process sends to C's processes and receives from them |
| ``usage/shared_mib`` | policy inputs that actor's processes read in the memory of rollout's, past the main process |
| ``usage/gpu_N_busy``, ``usage/gpu_N_memory_gib`` | mean utilisation, 0 to 1, and peak memory in use of GPU N |
| ``usage/queue_rewards`` | episodes whose rewards are not known yet when an update needs them |

Components are main, env, rollout, actor and, with ``runner.eval_async``, eval. Only processes and GPUs of the main
process's machine count. Finished shards that wait for training: ``staleness/queue`` (``workers/async_collector.py``).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

from embodrl.config.schema import Config
from embodrl.deployment import Deployment, read_machine
from embodrl.processes.traffic import Traffic, take_shared, totals
from embodrl.processes.tree import COMPONENTS, ProcessTree
from embodrl.reporting.metrics_file import Row
from embodrl.reporting.rows import is_number, number

logger = logging.getLogger(__name__)

GIB = 1 << 30
MIB = 1 << 20
SAMPLE_S = 1.0
CLOSE_S = 5.0
_DIGITS = 4


class Parallel(NamedTuple):
    """How many groups of simulators and how many policies work at once; their times add up in a row."""

    env: int = 1
    rollout: int = 1

    @staticmethod
    def of_run(config: Config, deployment: Deployment) -> Parallel:
        """Return the numbers of a run: in synchronous ones, the groups take turns in one thread."""
        if config.runner.max_staleness == 0:
            return Parallel()
        if deployment.rolls_out_in_processes:
            processes = len(deployment.of("rollout"))
            return Parallel(processes, processes)
        return Parallel(config.rollout.pipeline_stages)


class UsageMonitor:
    """Context manager that measures the use of the machine between two calls of ``take``."""

    def __init__(self, parallel: Parallel | None = None, gpus: GpuSampler | None = None) -> None:
        self._parallel = parallel or Parallel()
        self._gpus = gpus
        self._tree = ProcessTree()
        self._traffic = totals()
        self._looked_s = time.perf_counter()

    @staticmethod
    def of_run(config: Config, deployment: Deployment) -> UsageMonitor:
        """Return the monitor of a run whose processes have started."""
        return UsageMonitor(Parallel.of_run(config, deployment), sampler_of(used_gpus(deployment)))

    def __enter__(self) -> UsageMonitor:
        if self._gpus is not None:
            self._gpus.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gpus is not None:
            self._gpus.close()

    def take(self, row: Mapping[str, object]) -> Row:
        """Return the metrics since the last call; ``row`` has the times of the iteration."""
        before_s, self._looked_s = self._looked_s, time.perf_counter()
        wall_s = max(self._looked_s - before_s, 1e-9)
        found: dict[str, float] = {}
        for component, use in sorted(self._tree.look().items()):
            found[f"usage/cores_{component}"] = use.cpu_s / wall_s
            found[f"usage/memory_{component}_gib"] = use.resident_bytes / GIB
        before, self._traffic = self._traffic, totals()
        found |= idle_shares(row, self._parallel) | _links(before, self._traffic)
        if (shared := take_shared()) is not None:
            found["usage/shared_mib"] = shared / MIB
        if self._gpus is not None:
            found |= self._gpus.take()
        return {name: round(value, _DIGITS) for name, value in found.items()}


def idle_shares(row: Mapping[str, object], parallel: Parallel) -> dict[str, float]:
    """Return the idle share of each component whose time the row has, 0 to 1.

    ``time/env_s`` and ``time/policy_s`` are sums over everything that works at once.
    """
    total_s = number(row, "time/total_s") - number(row, "time/eval_s")
    names = {"env": ("time/env_s", parallel.env), "rollout": ("time/policy_s", parallel.rollout)}
    names["actor"] = ("time/train_s", 1)
    if total_s <= 0:
        return {}
    return {
        f"usage/idle_{component}": min(1.0, max(0.0, 1 - number(row, name) / (count * total_s)))
        for component, (name, count) in names.items()
        if is_number(row.get(name))
    }


def _links(before: Mapping[str, Traffic], now: Mapping[str, Traffic]) -> dict[str, float]:
    found: dict[str, float] = {}
    for link, traffic in now.items():
        earlier = before.get(link, Traffic(0, 0))
        component = COMPONENTS.get(link, link)
        found[f"usage/sent_{component}_mib"] = (traffic.sent - earlier.sent) / MIB
        found[f"usage/received_{component}_mib"] = (traffic.received - earlier.received) / MIB
    return found


# -- GPUs ------------------------------------------------------------------------------------------------------------


@dataclass
class _Samples:
    """Samples of a GPU since the last row: utilisation, 0 to 1, and bytes in use."""

    busy: list[float] = field(default_factory=list[float])
    used_bytes: list[int] = field(default_factory=list[int])

    def restart(self) -> None:
        """Keep only the newest sample, for a row without another one."""
        self.busy = self.busy[-1:]
        self.used_bytes = self.used_bytes[-1:]


class GpuSampler:
    """Samples GPUs in a daemon thread.

    Args:
        nvml: the module pynvml.
        gpus: name of each GPU by its number in the placement: an index or a UUID, as in CUDA_VISIBLE_DEVICES.
        period_s: time between two samples.
    """

    def __init__(self, nvml: Any, gpus: Mapping[int, str], period_s: float = SAMPLE_S) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._period_s = period_s
        self._handles: dict[int, Any] = {}
        self._samples: dict[int, _Samples] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-usage", daemon=True)

    def start(self) -> None:
        """Start sampling; without a working driver, nothing is sampled."""
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            logger.warning("the use of GPUs is not measured: %s", error)
            return
        for gpu, name in self._gpus.items():
            try:
                self._handles[gpu] = self._handle(name)
            except (self._nvml.NVMLError, ValueError) as error:
                logger.warning("the use of GPU %d is not measured: %s", gpu, error)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Return the metrics of the samples since the last call, or of the newest one."""
        found: dict[str, float] = {}
        with self._lock:
            for gpu, samples in self._samples.items():
                found[f"usage/gpu_{gpu}_busy"] = sum(samples.busy) / len(samples.busy)
                found[f"usage/gpu_{gpu}_memory_gib"] = max(samples.used_bytes) / GIB
                samples.restart()
        return found

    def sample(self) -> None:
        """Take a sample of each GPU; one that can't be asked is left out from now on, with a warning."""
        for gpu, handle in list(self._handles.items()):
            try:
                busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                used_bytes = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            except self._nvml.NVMLError as error:
                logger.warning("the use of GPU %d is no longer measured: %s", gpu, error)
                with self._lock:
                    del self._handles[gpu]
                    self._samples.pop(gpu, None)
                continue
            with self._lock:
                samples = self._samples.setdefault(gpu, _Samples())
                samples.busy.append(busy)
                samples.used_bytes.append(used_bytes)

    def close(self) -> None:
        """Stop sampling."""
        self._closing.set()
        if self._thread.ident is None:  # not started
            return
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():  # else the driver hangs
            self._nvml.nvmlShutdown()

    def _watch(self) -> None:
        self.sample()
        while not self._closing.wait(self._period_s):
            self.sample()

    def _handle(self, name: str) -> Any:
        if name.startswith(("GPU-", "MIG-")):
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        return self._nvml.nvmlDeviceGetHandleByIndex(int(name))


def sampler_of(gpus: Mapping[int, str]) -> GpuSampler | None:
    """Return a sampler of GPUs; None without GPUs, or without the extra ``gpu``."""
    if not gpus:
        return None
    if importlib.util.find_spec("pynvml") is None:
        logger.info("the use of GPUs is not measured: pynvml is missing; pip install 'embodrl[gpu]'")
        return None
    return GpuSampler(importlib.import_module("pynvml"), gpus)


def used_gpus(deployment: Deployment) -> dict[int, str]:
    """Return the GPUs of the driver's machine that a run uses, by number in the placement; see ``GpuSampler``."""
    used = sorted({device for place in deployment.processes if place.node == 0 for device in place.devices})
    if not used:
        return {}
    names = read_machine().gpus
    return {device: names[device] if device < len(names) else str(device) for device in used}
