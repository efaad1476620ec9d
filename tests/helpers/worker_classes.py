"""Workers that the tests launch; importable by name, as worker classes must be."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError
from embodrl.scheduler.worker import Worker, dispatch


def to_the_last(size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [None] * (size - 1) + [(args, kwargs)]


class Adder(Worker):
    """Adds, and tells about itself."""

    def __init__(self, offset: int = 0, fail_on: int = -1) -> None:
        if self.rank == fail_on:
            raise EmbodrlError(f"rank {fail_on} will not", "ask another", code="rank-refused")
        self.offset = offset
        self.calls: list[str] = []

    @dispatch()
    def where(self) -> dict[str, Any]:
        context = self.context
        return {"rank": self.rank, "size": self.world_size, "node": context.node, "devices": context.devices}

    @dispatch("split")
    def add(self, numbers: Tensor, extra: int = 0) -> Tensor:
        return numbers + self.offset + extra

    @dispatch("split")
    def label(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        batch["rank"] = torch.full(batch.batch_size, self.rank)
        return batch

    @dispatch()
    def raise_no_exception(self, name: str) -> None:
        raise {"SystemExit": SystemExit, "CancelledError": asyncio.CancelledError, "GeneratorExit": GeneratorExit}[name]

    @dispatch("rank_zero")
    def first(self, value: Any) -> Any:
        return value

    @dispatch(to_the_last, collect=sum)
    def last(self, value: int) -> int:
        return value + self.rank

    @dispatch()
    def note(self, text: str) -> list[str]:
        self.calls.append(text)
        return self.calls

    @dispatch()
    def spoil(self, values: Any) -> float:
        values += 1
        return float(values.sum())

    @dispatch()
    def fail(self, rank: int) -> int:
        if self.rank == rank:
            print("about to fail", flush=True)
            raise KeyError("no such thing")
        return self.rank

    @dispatch("rank_zero")
    def unsendable(self) -> Any:
        return threading.Lock()

    @dispatch()
    def cpus(self) -> tuple[list[int], int]:
        return sorted(os.sched_getaffinity(0)), os.getpid()

    def hidden(self) -> int:
        return 1


class Trouble(Worker):
    """Fails in the ways that processes fail."""

    @dispatch()
    def pid(self) -> int:
        return os.getpid()

    @dispatch()
    def forked_child_ends_by(self, number: int) -> bool:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, number)
        return os.WTERMSIG(os.waitpid(child, 0)[1]) == number

    @dispatch()
    def kill_yourself(self, rank: int, number: int = signal.SIGKILL) -> None:
        if self.rank == rank:
            print("these are my last words", flush=True)
            os.kill(os.getpid(), number)
        threading.Event().wait()

    @dispatch()
    def wait_for_ever(self) -> None:
        threading.Event().wait()

    @dispatch()
    def hold_the_lock(self, rank: int) -> None:
        """Hang in native code that never releases the interpreter lock."""
        if self.rank == rank:
            ctypes.PyDLL(None).pause()

    @dispatch()
    def compute(self, rank: int, seconds: float) -> int:
        """Use the processor for so long."""
        if self.rank != rank:
            return 0
        rounds, end = 0, time.process_time() + seconds
        while time.process_time() < end:
            rounds += 1
        return rounds

    @dispatch()
    def start_daemon(self) -> int:
        """Start a process that leaves process group, session and terminal."""
        code = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        return int(child.stdout.readline())

    @dispatch()
    def take_memory(self, rank: int, num_bytes: int) -> int:
        if self.rank == rank:
            self.taken = b"\1" * num_bytes
        return os.getpid()

    @dispatch()
    def oom_score_adj(self) -> int:
        return int(Path("/proc/self/oom_score_adj").read_text())

    @dispatch()
    def flood(self, num_bytes: int) -> None:
        """Print so much; the first line and the last line say so."""
        print("the first line")
        for _ in range(num_bytes >> 16):
            os.write(1, b"x" * 65535 + b"\n")
        print("the last line", flush=True)

    @dispatch()
    def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


class Talker(Worker):
    """Puts into and takes out of channels."""

    @dispatch()
    def produce(self, count: int) -> None:
        channel = self.channel("numbers")
        for index in range(count):
            channel.put({"index": index, "array": np.full(50_000, index, np.float32)}, timeout_s=60)

    @dispatch()
    def consume(self, count: int) -> list[int]:
        channel = self.channel("numbers")
        found = []
        for _ in range(count):
            item = channel.get(timeout_s=60)
            assert (item["array"] == item["index"]).all()
            found.append(item["index"])
        return found

    @dispatch()
    def misname(self) -> None:
        self.channel("numbrs")


class Reducer(Worker):
    """Talks to the other ranks by torch.distributed."""

    @dispatch()
    def total(self, value: float) -> float:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=self.context.rendezvous, rank=self.rank, world_size=self.world_size)
        tensor = torch.tensor(value * (self.rank + 1))
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return float(tensor)
