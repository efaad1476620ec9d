"""Several controllers: main processes of one run, without a process above them, which meet in small reductions.

The arrangement is DistFlow's (Wang et al. 2025, arXiv 2507.13833): each controller has its own simulators, rollouts and
advantages. Gradients, statistics and decisions pass between them, never rollouts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from embodrl.config.schema import Config
from embodrl.errors import WorkerError
from embodrl.hybrid_engines.process_groups import is_connection_error, loopback_only
from embodrl.processes.liveness import report_work

BUCKET_BYTES = 256 * 2**20
_STOP = "embodrl/stop"
_LOOK_S = 0.2
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class SignalStore(Protocol):
    """A key-value store of ``torch.distributed``."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Controllers:
    """The controllers of a run, as one of them sees them. All call the same methods in the same order.

    Attributes:
        rank: number of this one; 0 writes the files of the run.
        count: number of controllers; alone, methods return their arguments.

    Raises:
        WorkerError: in every method: another one has ended, is late, or is elsewhere in the loop.
    """

    def __init__(self, rank: int = 0, count: int = 1, store: SignalStore | None = None) -> None:
        self.rank = rank
        self.count = count
        self._num_bytes = 0
        self._store = store
        self._is_lost = False
        self._looked = 0.0
        self._stop = 0

    # -- values --------------------------------------------------------------------------------------------------------

    def exchange(self, step: str, value: Any) -> list[Any]:
        """Return the JSON values of all controllers, by rank; ``step`` is where in the loop this one is."""
        if self.count == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps([step, value]).encode()), dtype=torch.uint8)
        with self.together(step):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(sizes, torch.tensor([len(data)]))
            padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
            padded[: len(data)] = data
            parts = [torch.zeros_like(padded) for _ in range(self.count)]
            dist.all_gather(parts, padded)
        self._num_bytes += len(padded) + 8
        report_work()  # that of others, for which this one has waited
        found = [json.loads(bytes(part[: int(size)].numpy())) for part, size in zip(parts, sizes, strict=True)]
        elsewhere = [f"controller {rank}: {where}" for rank, (where, _) in enumerate(found) if where != step]
        if elsewhere:
            self._is_lost = True
            raise WorkerError(
                f"controller {self.rank} is at '{step}', but not all others: {', '.join(elsewhere)}",
                "see the first error of their logs; `embodrl resume`, started alike, continues the run",
                code="controllers-differ",
            )
        return [one for _, one in found]

    def first(self, step: str, value: Any) -> Any:
        """Return the JSON value of controller 0."""
        return self.exchange(step, value if self.rank == 0 else None)[0]

    # -- tensors -------------------------------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all controllers of ``float64`` figures, added by rank, so that all get the same bits."""
        return self._reduced("sum", values).sum(0) if self.count > 1 else values

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum over all controllers of ``float64`` figures."""
        return self._reduced("max", values).amax(0) if self.count > 1 else values

    def _reduced(self, step: str, values: Tensor) -> Tensor:
        parts = self.exchange(step, values.double().tolist())
        return torch.tensor(parts, dtype=torch.float64, device=values.device).to(values.dtype)

    def sum_gradients(self, leaves: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients of parameters over all controllers, in place; one that only some have becomes all's."""
        if self.count == 1:
            return
        has = self.exchange("gradients", [leaf.grad is not None for leaf in leaves])
        summed: list[Tensor] = []
        for leaf, anywhere in zip(leaves, map(any, zip(*has, strict=True)), strict=True):
            if anywhere:
                leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                summed.append(leaf.grad)
        for bucket in _buckets(summed):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            with self.together("gradients"):
                dist.all_reduce(flat)
            self._num_bytes += flat.numel() * flat.element_size()
            for gradient, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def take_num_bytes(self) -> int:
        """Return the bytes that this one has given to reductions since the last call."""
        found = self._num_bytes
        self._num_bytes = 0
        return found

    # -- stopping ------------------------------------------------------------------------------------------------------

    def announce_stop(self, number: int) -> None:
        """Let the others know of a signal, without waiting for them."""
        if self._store is not None and not self._stop:
            self._stop = number
            with self.together("a signal"):
                self._store.set(_STOP, str(number))

    def hears_stop(self) -> bool:
        """Return whether another one has announced a signal; asks at most every 0.2 s."""
        now = time.monotonic()
        if self._store is not None and not self._stop and now - self._looked >= _LOOK_S:
            self._looked = now
            with self.together("a signal"):
                if self._store.check([_STOP]):
                    self._stop = int(self._store.get(_STOP))
        return self._stop > 0

    @contextmanager
    def together(self, step: str, computes: bool = False) -> Iterator[None]:
        """Name the errors of a block in which all take part; after one, no further block begins.

        A block that also ``computes`` has errors of its own, which pass.
        """
        if self._is_lost:
            raise _lost(self.rank, step, "an earlier call failed")
        is_done = False
        try:
            yield
            is_done = True
        except RuntimeError as error:  # also the errors of torch.distributed
            if computes and not is_connection_error(str(error)):
                raise
            raise _lost(self.rank, step, str(error).splitlines()[0]) from error
        finally:
            # Also after a signal: the others' next data would not be what this one then waits for.
            self._is_lost = self._is_lost or not is_done


ALONE = Controllers()
"""The only controller of a run."""


@contextmanager
def joined(config: Config, device: torch.device) -> Iterator[Controllers]:
    """Meet the other controllers of a run, as ``VARIABLES`` of ``embodrl.deployment.launched`` say.

    ``device`` is that of the gradients: gloo on a CPU, NCCL on GPUs.

    Raises:
        WorkerError: the others did not come within ``cluster.collective_timeout_s``.
    """
    if config.cluster.controllers == 1:
        yield ALONE
        return
    timeout = timedelta(seconds=config.cluster.collective_timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        found = cast("tuple[Any, int, int]", next(rendezvous("env://", timeout=timeout)))
        store, rank, count = found
        with loopback_only(are_on_one_machine()):
            dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    except RuntimeError as error:
        raise WorkerError(
            f"the other controllers were not found: {str(error).splitlines()[0]}",
            "start cluster.controllers processes with one MASTER_ADDR and MASTER_PORT, as torchrun does",
            code="controllers-missing",
        ) from error
    try:
        yield Controllers(rank, count, store)
    finally:
        dist.destroy_process_group()


def are_on_one_machine() -> bool:
    """Return whether the controllers meet at an address that only this machine has."""
    return os.environ["MASTER_ADDR"] in _LOOPBACK


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, together at most ``BUCKET_BYTES`` or one, and of one dtype."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (size + num_bytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
            size = 0
        bucket.append(tensor)
        size += num_bytes
    if bucket:
        yield bucket


def _lost(rank: int, step: str, reason: str) -> WorkerError:
    return WorkerError(
        f"controller {rank} has lost another one at '{step}': {reason}",
        "see the first error of the others' output; if one was only slow, raise cluster.collective_timeout_s;"
        " `embodrl resume`, started alike, continues the run",
        code="controller-lost",
    )
