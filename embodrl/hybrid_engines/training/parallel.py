"""Micro-batches side by side on the cores of a CPU.

Splitting each small operation over the cores costs a barrier an operation; at the size of a tiny policy that eats most
of the gain, and stalls whenever another process wants a core. Here every core takes whole micro-batches instead.
Gradients are summed in the order of the micro-batches, so that the result does not depend on which thread was first.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
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


def add_gradients(
    losses: Sequence[Callable[[], tuple[Tensor, T]]],
    leaves: Mapping[nn.Parameter, nn.Parameter],
    num_threads: int,
    niceness: int = 0,
) -> tuple[Tensor, list[T]]:
    """Add the gradients of several losses to those of leaves, in the precision of these.

    Args:
        losses: each computes a scalar loss and something to return; they must not share a graph.
        leaves: parameters with ``requires_grad`` -> what gets their gradients.
        num_threads: cores to use.
        niceness: see ``on_threads``.

    Returns:
        the sum of the losses (scalar, detached), and what else they returned.
    """

    def differentiate(compute: Callable[[], tuple[Tensor, T]]) -> tuple[Tensor, T, tuple[Tensor | None, ...]]:
        loss, extra = compute()
        # Not ``backward``: threads would add to the same gradients, in the order in which they end.
        return loss.detach(), extra, torch.autograd.grad(loss, list(leaves), allow_unused=True)

    if num_threads <= 1 and not niceness:
        results = list(map(differentiate, losses))
    else:
        results = on_threads([partial(differentiate, compute) for compute in losses], num_threads, niceness)
    for _, _, gradients in results:
        for leaf, gradient in zip(leaves.values(), gradients, strict=True):
            if gradient is None:
                continue
            if leaf.grad is None:
                # A copy: it is added to in place, and autograd may return one tensor for several leaves.
                leaf.grad = gradient.to(leaf.dtype, copy=True)
            else:
                leaf.grad += gradient
    total = torch.stack([loss for loss, _, _ in results]).sum()
    return total, [extra for _, extra, _ in results]
