"""Parallel micro-batches on the cores of a CPU.

Splitting each small operation over the cores costs a barrier per operation; for a tiny policy that eats most of the
gain, and stalls whenever another process wants a core. Here every core takes whole micro-batches instead. Gradients are
summed in micro-batch order, so that the result does not depend on thread timing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

from torch import Tensor, nn

T = TypeVar("T")
SWITCH_INTERVAL_S = 5e-4


def on_threads(tasks: Sequence[Callable[[], T]], num_threads: int, niceness: int = 0) -> list[T]:
    """Return the tasks' results in order; requires a previous ``torch.set_num_threads(1)``.

    ``niceness`` is added to the process's, so that its other threads have priority (Linux only).
    """
    if not niceness and (num_threads <= 1 or len(tasks) <= 1):
        return [task() for task in tasks]
    # In threads of their own even for one task: an unprivileged thread cannot lower its niceness again.
    with _short_turns():
        return list(_threads(num_threads, niceness, os.getpid()).map(lambda task: task(), tasks))


@lru_cache(maxsize=8)
def _threads(num_threads: int, niceness: int, process_id: int) -> ThreadPoolExecutor:
    """Return a thread pool that is reused: new threads would allocate the buffers of matrix products again."""
    del process_id  # threads do not survive a fork
    return ThreadPoolExecutor(num_threads, "embodrl-batch", _be_nice, (niceness,))


@contextmanager
def _short_turns() -> Iterator[None]:
    """Shorten the time that a thread waits for the interpreter lock: operations here are small."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _be_nice(niceness: int) -> None:
    if niceness and sys.platform == "linux":  # other systems have no per-thread niceness
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness))


def add_gradients(gradients: Sequence[Sequence[Tensor | None]], leaves: Sequence[nn.Parameter]) -> None:
    """Add the gradients of several losses, in order, to the leaves' gradients, in the leaves' precision.

    ``gradients`` has one per leaf for each loss, None for independent ones.
    """
    for found in gradients:
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is None:
                continue
            if leaf.grad is None:
                # A copy: it is added to in place, and autograd may return one tensor for several leaves.
                leaf.grad = gradient.to(leaf.dtype, copy=True)
            else:
                leaf.grad += gradient
