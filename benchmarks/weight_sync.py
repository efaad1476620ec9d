"""Weights from a trainer to a rollout, by every kind of sync and for growing models, beside memcpy of as many bytes.

Sender and receiver are processes of this machine. A sync is timed from the call of the sender
until the receiver's policy holds the last tensor, checksums as each kind has them by default; for each size memcpy
comes first and then every kind, in one run. memcpy is from and to memory that has been touched, on one core. Disk is
whatever holds the directory for temporary files, and its files are synced.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hardware import describe_hardware
from rich.console import Console
from rich.table import Table
from torch import Tensor

from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.weight_sync.base import WeightReceiver, WeightSender
from embodrl.hybrid_engines.weight_sync.collective import CollectiveReceiver, CollectiveSender, SyncGroup
from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver, DiskSender
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver, MemorySender
from embodrl.scheduler.group import WorkerGroup, wait_all
from embodrl.scheduler.launchers.process import ProcessLauncher
from embodrl.scheduler.worker import Worker, dispatch
from embodrl.storage.json_file import write_json_file
from embodrl.workers.weights import KINDS

SIZES_MB = (10, 100, 1000)
ROUNDS = 5
BUCKET_BYTES = 64 * 2**20
TENSOR_BYTES = 16 * 2**20  # a layer of a 7B has tensors of 32 MB and more in bf16; the tiny models far smaller ones
CALL_S = 600.0
CHANNEL = "weights"


def make_weights(size_mb: float, fill: float = 0.0) -> dict[str, Tensor]:
    """Return float32 tensors of ``size_mb`` megabytes (10^6 bytes) together."""
    left, weights = int(size_mb * 1e6) // 4, dict[str, Tensor]()
    while left:
        count = min(left, TENSOR_BYTES // 4)
        weights[f"layer_{len(weights)}"] = torch.full((count,), fill)
        left -= count
    return weights


class Holder:
    """A policy of bare tensors that takes weights over."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy, except what is the same memory."""
        for name, tensor in weights:
            if self.weights[name].data_ptr() != tensor.data_ptr():
                self.weights[name].copy_(tensor)


class Sending(Worker):
    """The trainer's process."""

    sender: WeightSender
    weights: dict[str, Tensor]

    @dispatch("rank_zero")
    def connect(self, kind: str, meeting: str, size_mb: float) -> None:
        """Make weights and a sender."""
        torch.set_num_threads(1)
        self.weights = make_weights(size_mb)
        if kind == "memory":
            self.sender = MemorySender([self.channel(CHANNEL)], bucket_bytes=BUCKET_BYTES)
        elif kind == "collective":
            self.sender = CollectiveSender(SyncGroup(meeting, 0, 2), bucket_bytes=BUCKET_BYTES)
        else:
            self.sender = DiskSender(Path(meeting), bucket_bytes=BUCKET_BYTES, keep=1)

    @dispatch("rank_zero")
    def send(self, version: int) -> float:
        """Change the weights and send them; return when that began, on a clock that all processes share."""
        for tensor in self.weights.values():
            tensor.fill_(float(version))
        start = time.monotonic()
        self.sender.send(self.weights.items(), version)
        return start


class Receiving(Worker):
    """The rollout's process."""

    receiver: WeightReceiver
    holder: Holder

    @dispatch("rank_zero")
    def connect(self, kind: str, meeting: str, size_mb: float) -> None:
        """Make a policy and a receiver."""
        torch.set_num_threads(1)
        self.holder = Holder(make_weights(size_mb))
        if kind == "memory":
            self.receiver = MemoryReceiver(self.holder, self.channel(CHANNEL))
        elif kind == "collective":
            self.receiver = CollectiveReceiver(self.holder, SyncGroup(meeting, 1, 2))
        else:
            self.receiver = DiskReceiver(self.holder, Path(meeting))

    @dispatch("rank_zero")
    def receive(self, version: int) -> float:
        """Wait for the weights and take them over; return when that was done.

        Raises:
            EmbodrlError: others came.
        """
        report = self.receiver.receive(CALL_S)
        end = time.monotonic()
        if report is None or any(float(t[-1]) != version for t in self.holder.weights.values()):
            raise EmbodrlError(f"the weights of version {version} did not come", "run it again")
        return end


def _processes(kind: str, size_mb: float, directory: Path, sending: WorkerGroup, receiving: WorkerGroup) -> list[float]:
    """Return the seconds of each sync between the two processes."""
    meeting = f"file://{directory}/meeting_{size_mb:g}" if kind == "collective" else f"{directory}/weights_{size_mb:g}"
    wait_all([group.connect(kind, meeting, size_mb) for group in (sending, receiving)], CALL_S)
    seconds: list[float] = []
    for version in range(1, ROUNDS + 2):  # the first one touches its memory for the first time
        sent, received = sending.send(version), receiving.receive(version)
        wait_all([sent, received], CALL_S)
        seconds.append(received.result() - sent.result())
    return seconds[1:]


def _memcpy(size_mb: float) -> list[float]:
    source, holder = make_weights(size_mb, 1.0), Holder(make_weights(size_mb))
    seconds: list[float] = []
    for _ in range(ROUNDS + 1):
        clock = time.monotonic()
        holder.update_weights(source.items(), 0)
        seconds.append(time.monotonic() - clock)
    return seconds[1:]


def _figures(size_mb: float, seconds: list[float], copy_s: float) -> dict[str, Any]:
    median = float(np.median(seconds))
    return {
        "size_mb": size_mb,
        "median_ms": round(median * 1e3, 3),
        "largest_ms": round(max(seconds) * 1e3, 3),
        "gb_per_s": round(size_mb / 1e3 / median, 3),
        "of_memcpy": round(copy_s / median, 3),
    }


def run(sizes_mb: Iterable[float] = SIZES_MB) -> dict[str, Any]:
    """Measure and return the figures."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    launcher = ProcessLauncher()
    channels = {CHANNEL: launcher.channel(CHANNEL, 2)}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="embodrl-bench-") as directory,
            WorkerGroup(Sending).launch(1, launcher, channels, timeout_s=CALL_S) as sending,
            WorkerGroup(Receiving).launch(1, launcher, channels, timeout_s=CALL_S) as receiving,
        ):
            for size_mb in sizes_mb:
                copies = _memcpy(size_mb)
                copy_s = float(np.median(copies))
                rows.append({"kind": "memcpy", **_figures(size_mb, copies, copy_s)})
                for kind in KINDS:
                    seconds = _processes(kind, size_mb, Path(directory), sending, receiving)
                    rows.append({"kind": kind, **_figures(size_mb, seconds, copy_s)})
    finally:
        launcher.close()
        torch.set_num_threads(threads)
    return {"bucket_mb": BUCKET_BYTES / 1e6, "rounds": ROUNDS, "rows": rows, "hardware": describe_hardware()}


def main(json_path: Path | None = None, sizes_mb: Iterable[float] = SIZES_MB) -> int:
    """Measure, print a table, write the figures to ``json_path``; return 0."""
    result = run(sizes_mb)
    hardware = result["hardware"]
    title = f"weight sync, median of {result['rounds']}, {hardware['cores']} cores of {hardware['cpu']}"
    table = Table("MB", "kind", "ms", "GB/s", "of memcpy", title=title)
    for row in result["rows"]:
        rates = (f"{row['gb_per_s']:.2f}", f"{row['of_memcpy']:.2f}")
        table.add_row(f"{row['size_mb']:g}", row["kind"], f"{row['median_ms']:.2f}", *rates)
    Console().print(table)
    if json_path is not None:
        write_json_file(json_path, result)
    return 0
