"""Engine tensors that leave the device between phases and return bit-exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OffloadReport:
    """Bytes that PyTorch allocated on ``device`` before and after; on a CPU, bytes of the tensors themselves."""

    device: torch.device
    before: int
    after: int

    @staticmethod
    def total(reports: Sequence[OffloadReport]) -> OffloadReport | None:
        """Return the sum over several processes; None if none freed memory."""
        if not reports:
            return None
        return OffloadReport(reports[0].device, sum(r.before for r in reports), sum(r.after for r in reports))

    def __str__(self) -> str:
        return f"{self.before / 2**20:.1f} -> {self.after / 2**20:.1f} MiB on {self.device}"


class Offload:
    """Moves the memory of tensors to the host and back, in place.

    Only the storages move: every tensor, view and optimizer state keeps its identity; of a ``DTensor``, this rank's
    shard moves. Do not use offloaded tensors. On a CPU the host copy saves nothing, but exercises the same code.
    ``tensors`` is called each time, since gradients and optimizer state come and go.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    @property
    def is_offloaded(self) -> bool:
        """Whether the tensors are offloaded."""
        return bool(self._away)

    def offload(self) -> OffloadReport | None:
        """Move the tensors off their device; return None if already offloaded, or without tensors.

        Memory that cannot be released (mapped files, shared memory) stays.
        """
        storages = {} if self._away else _storages(self._tensors())
        if not storages:
            return None
        device = next(iter(storages.values())).device
        before = _allocated(device, storages.values())
        for storage in storages.values():
            # PyTorch caches pinned memory for reuse; pinning memory from another allocator would cost a copy.
            pinned = storage.device.type == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
            host.copy_(storage, non_blocking=pinned)
            self._away.append((storage, host))
        _wait_for(device)
        for storage in storages.values():
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return OffloadReport(device, before, _allocated(device, storages.values()))

    def onload(self) -> OffloadReport | None:
        """Bring the tensors back; return None if they are not offloaded."""
        if not self._away:
            return None
        device = self._away[0][0].device
        before = _allocated(device, [storage for storage, _ in self._away])
        for storage, host in self._away:
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=host.device != storage.device)
        _wait_for(device)
        after = _allocated(device, [storage for storage, _ in self._away])
        self._away.clear()
        return OffloadReport(device, before, after)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Temporarily bring the tensors back if they are offloaded."""
        away = self.is_offloaded
        self.onload()
        try:
            yield
        finally:
            if away:
                self.offload()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield an optimizer's state tensors and the gradients of its parameters."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    for group in optimizer.param_groups:
        yield from (p.grad for p in group["params"] if p.grad is not None)


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the distinct storages of tensors, by address."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local: Tensor = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        mapped = storage.device.type == "cpu" and storage.is_shared()
        if storage.nbytes() and storage.resizable() and not mapped:
            found[storage.data_ptr()] = storage
    return found


def _wait_for(device: torch.device) -> None:
    """Wait until the copies are done, in whichever stream the tensors are used next."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes in use on a GPU by all processes; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def take_peak_bytes(device: torch.device) -> int | None:
    """Return PyTorch's peak allocation on a GPU since the last call; None on a CPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _allocated(device: torch.device, storages: Iterable[torch.UntypedStorage]) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum(storage.nbytes() for storage in storages)
