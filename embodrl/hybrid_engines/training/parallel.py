"""Micro-batches side by side on the cores of a CPU.

Splitting each small operation over the cores costs a barrier an operation; at the size of a tiny policy that eats most
of the gain, and stalls whenever another process wants a core. Here every core takes whole micro-batches instead.
Gradients are summed in the order of the micro-batches, so that the result does not depend on which thread was first.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor, nn

T = TypeVar("T")


def on_threads(tasks: Sequence[Callable[[], T]], num_threads: int, niceness: int = 0) -> list[T]:
    """Return what the tasks return, in their order; ``torch.set_num_threads(1)`` must have been called.

    Args:
        tasks: each a piece of work.
        num_threads: cores to use.
        niceness: added to that of this process, so that other threads of it go first (Linux only).
    """
    if not niceness and (num_threads <= 1 or len(tasks) <= 1):
        return [task() for task in tasks]
    # In threads of their own even for one task: without privileges a thread can't lower its niceness again.
    with ThreadPoolExecutor(num_threads, initializer=_be_nice, initargs=(niceness,)) as pool:
        return list(pool.map(lambda task: task(), tasks))


def _be_nice(niceness: int) -> None:
    if niceness and sys.platform == "linux":  # elsewhere threads have no niceness of their own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness))


def add_gradients(gradients: Sequence[Sequence[Tensor | None]], leaves: Sequence[nn.Parameter]) -> None:
    """Add gradients of several losses, in their order, to those of leaves, in the precision of these.

    Args:
        gradients: for each loss one per leaf; None where the loss does not depend on it.
        leaves: what gets them.
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
