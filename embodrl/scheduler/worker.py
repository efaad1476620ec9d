"""Workers: classes whose methods are called on all processes of a group, and the dispatch of calls.

class Learner(Worker):
    @dispatch("split")
    def update(self, batch: Batch) -> dict[str, float]: ...

group = WorkerGroup(Learner, name="actor").launch(placement.of("actor"))
metrics = group.update(batch).result()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.data.batch import Batch
from embodrl.errors import ChannelError, EmbodrlError
from embodrl.names import nearest
from embodrl.scheduler.channel import Channel

Arguments = tuple[tuple[object, ...], dict[str, object]]
Dispatch = Callable[[int, tuple[object, ...], dict[str, object]], Sequence[Arguments | None]]
"""From world size and arguments to the arguments of each rank; None for a rank that is not called."""
Collect = Callable[[list[object]], object]
"""From the results of the called ranks, in order, to the result of the call."""
Method = TypeVar("Method", bound=Callable[..., object])
_MARK = "_embodrl_dispatch"


@dataclass(frozen=True)
class WorkerContext:
    """Identity and resources of a worker.

    Attributes:
        rank: process number, from 0.
        devices: GPUs, as numbered by the machine; the process sees only these.
        cpus: logical CPUs it is bound to; empty for all.
        rendezvous: ``init_method`` for ``torch.distributed``, the same for all workers of the group.
    """

    group: str
    rank: int
    world_size: int
    node: int = 0
    devices: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    rendezvous: str = ""
    channels: Mapping[str, Channel] = field(default_factory=dict[str, Channel])


class Worker:
    """A part of a run in its own process; methods marked with ``dispatch`` are called through its group.

    ``context`` is already set in ``__init__``, which gets the group's keyword arguments.
    """

    context: WorkerContext

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    def channel(self, name: str) -> Channel:
        """Return a channel that the group was launched with; raises EmbodrlError for an unknown name."""
        channels = self.context.channels
        if name not in channels:
            near = nearest(name, list(channels))
            hint = f"did you mean '{near}'?" if near else "name it in launch(channels=...)"
            raise ChannelError(f"group '{self.context.group}' has no channel '{name}'", hint)
        return channels[name]

    def close(self) -> None:
        """Release resources; called once, when the group is closed."""


def make_worker(worker_class: type[Worker], context: WorkerContext, kwargs: Mapping[str, object]) -> Worker:
    """Return a worker whose ``__init__`` can already read its context."""
    # Without the constructor first, which may read the context.
    worker = worker_class.__new__(worker_class)
    worker.context = context
    worker.__init__(**kwargs)
    return worker


@dataclass(frozen=True)
class Marked:
    """Dispatch and collection of a method."""

    dispatch: Dispatch
    collect: Collect


def dispatch(how: str | Dispatch = "one_to_all", collect: Collect | None = None) -> Callable[[Method], Method]:
    """Mark a method of a worker as callable through its group.

    Args:
        how: ``one_to_all`` (same arguments to all ranks, list of results), ``split`` (batches, tensors, arrays and
            lists are split into one part per rank, other arguments go to all; results are joined), ``rank_zero`` (only
            rank 0, its result), or a function, which runs in the driver.
        collect: combines the results; None for the default of ``how``, which is a list for a function.

    Raises:
        EmbodrlError: unknown dispatch.
    """
    if isinstance(how, str) and how not in _WAYS:
        near = nearest(how, list(_WAYS))
        raise EmbodrlError(
            f"unknown dispatch '{how}'; known: {', '.join(_WAYS)}",
            f"did you mean '{near}'?" if near else "name one of them, or give a function",
            code="worker-method",
        )
    share, gather = _WAYS[how] if isinstance(how, str) else (how, list)
    marked = Marked(share, collect or gather)

    def mark(method: Method) -> Method:
        setattr(method, _MARK, marked)
        return method

    return mark


def marked_method(worker_class: type[Worker], name: str) -> Marked:
    """Return the dispatch of a method.

    Raises:
        EmbodrlError: the class has no such method, or the method is not marked.
    """
    found = getattr(worker_class, name, None)
    marked = getattr(found, _MARK, None)
    if isinstance(marked, Marked):
        return marked
    known = [key for key, value in inspect.getmembers(worker_class) if hasattr(value, _MARK)]
    if found is not None:
        raise EmbodrlError(
            f"{worker_class.__name__}.{name} is not marked with @dispatch", "mark it", code="worker-method"
        )
    near = nearest(name, known)
    raise EmbodrlError(
        f"{worker_class.__name__} has no method '{name}'; it has {', '.join(known) or 'none'}",
        f"did you mean '{near}'?" if near else "mark a method with @dispatch",
        code="worker-method",
    )


def _one_to_all(size: int, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Arguments | None]:
    return [(args, kwargs)] * size


def _rank_zero(size: int, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Arguments | None]:
    return [(args, kwargs), *[None] * (size - 1)]


def _split(size: int, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Arguments | None]:
    positional = [_parts(value, size, f"argument {index}") for index, value in enumerate(args)]
    named = {name: _parts(value, size, f"argument '{name}'") for name, value in kwargs.items()}
    return [
        (tuple(parts[rank] for parts in positional), {name: parts[rank] for name, parts in named.items()})
        for rank in range(size)
    ]


def _parts(value: object, size: int, what: str) -> list[object]:
    """Return one part per rank: slices of values with rows, the same value for everything else."""
    if not isinstance(value, Batch | Tensor | np.ndarray | list) or (isinstance(value, Tensor) and not value.ndim):
        return [value] * size
    rows = cast(Batch | Tensor | list[object], value)
    if len(rows) % size:
        raise EmbodrlError(
            f"{what} has {len(rows)} rows for {size} workers: {len(rows)} / {size} leaves {len(rows) % size}",
            "pass a multiple of the workers, or pad the batch (Batch.pad)",
            code="dispatch-rows",
        )
    count = len(rows) // size
    return [rows[rank * count : (rank + 1) * count] for rank in range(size)]


def _join(results: list[object]) -> object:
    """Join the parts; results of other types stay a list."""
    first = results[0]
    if isinstance(first, Batch):
        return type(first).concat(cast(list[Batch], results))
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(cast(list[Tensor], results))
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(cast(list[NDArray[np.generic]], results))
    if isinstance(first, list):
        return [item for result in cast(list[list[object]], results) for item in result]
    return results


_WAYS: dict[str, tuple[Dispatch, Collect]] = {
    "one_to_all": (_one_to_all, list),
    "split": (_split, _join),
    "rank_zero": (_rank_zero, lambda results: results[0]),
}
