"""Functions in several processes that communicate over gloo; forked, so that nothing is imported again."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 1500.0) -> list[Any]:
    """Run ``function(*args)`` in processes of a group; return the results by rank.

    The parent must not have run a backward pass: what must, runs in a group of one.

    Raises:
        AssertionError: a process raised; carries its traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        children = [
            context.Process(target=_child, args=(rank, size, directory, function, args)) for rank in range(size)
        ]
        for child in children:
            child.start()
        errors = []
        for rank, child in enumerate(children):
            child.join(timeout_s)
            path = directory / f"{rank}.txt"
            if child.exitcode != 0:
                errors.append(path.read_text() if path.exists() else f"rank {rank}: exit code {child.exitcode}")
        for child in children:
            child.kill()
        assert not errors, "\n".join(errors)
        return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _child(rank: int, size: int, directory: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=size)
        torch.save(function(*args), directory / f"{rank}.pt")
        dist.barrier()
    except BaseException:  # noqa: BLE001 - the parent raises it
        (directory / f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise SystemExit(1) from None
