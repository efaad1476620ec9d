"""Checkpoints that every process writes its part of, by megatron-core's dist_checkpointing; they reshard on load.

Tensors have their public names and shapes, so that a checkpoint of any tensor and data parallelism is read at any
other. Saving allocates on ``torch.cuda.current_device()``: this is for CUDA only. A run's own checkpoints are the
ordinary ones (``state_dict``), in one piece.
megatron-core keeps the index of the tensors in a pickle: load only what you have saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.training.megatron.core import data_group, megatron, tensor_group
from embodrl.hybrid_engines.training.megatron.engine import MegatronTrainEngine

INDEX = "embodrl.json"


def save_sharded(engine: MegatronTrainEngine, directory: Path) -> None:
    """Write the engine's state; all processes call it, with the same directory on a file system that all see.

    Args:
        engine: after or before any update.
        directory: must not exist.

    Raises:
        CheckpointError: it exists.
    """
    shards = engine.shards()
    if directory.exists():
        raise CheckpointError(f"{directory} exists", "save to a new directory")
    dist.barrier()
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
        index = {"counters": engine.counters(), "names": {section: sorted(parts) for section, parts in shards.items()}}
        (directory / INDEX).write_text(json.dumps(index))
    dist.barrier()
    tensors = {
        f"{s}.{name}": _sharded(f"{s}.{name}", part) for s, parts in shards.items() for name, part in parts.items()
    }
    megatron("dist_checkpointing").save(tensors, str(directory))


def load_sharded(engine: MegatronTrainEngine, directory: Path) -> None:
    """Take over a state that ``save_sharded`` wrote, perhaps with other numbers of processes.

    Raises:
        CheckpointError: there is none, or it is of another policy.
    """
    if not (directory / INDEX).is_file():
        raise CheckpointError(f"{directory} has no {INDEX}", "give a directory that save_sharded wrote")
    index = json.loads((directory / INDEX).read_text())
    wanted = dict(_empty(engine, index["names"]))
    targets = {name: _sharded(name, part) for name, part in wanted.items()}
    try:
        found = megatron("dist_checkpointing").load(targets, str(directory))
    except (KeyError, RuntimeError, ValueError, megatron("dist_checkpointing.core").CheckpointingException) as error:
        hint = "load it with the model settings that it was made with"
        raise CheckpointError(f"{directory} does not fit the policy: {error}", hint) from error
    engine.begin_load()
    for name, part in wanted.items():
        section, _, rest = name.partition(".")
        engine.put_part(section, rest, found[name].to(_local(part).device))
    engine.finish_load()
    engine.set_counters(index["counters"])


def _empty(engine: MegatronTrainEngine, names: dict[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    """Yield room for the process's part of every tensor of a checkpoint."""
    shapes = engine.shards_like()
    for section, inside in names.items():
        for name in inside:
            key, _, owner = name.partition(".") if section == "optimizer" else ("", "", name)
            if owner not in shapes:
                raise CheckpointError(
                    f"the checkpoint has '{name}', which is no tensor of the policy",
                    "load it with the model settings that it was made with",
                )
            part = shapes[owner]
            if key == "step":
                yield f"{section}.{name}", torch.zeros((), device=engine.device)
            else:
                dtype = torch.float32 if section == "optimizer" and engine.distributed else part.dtype
                yield f"{section}.{name}", torch.zeros_like(part, dtype=dtype)


def _local(part: Tensor) -> Tensor:
    return part.to_local() if isinstance(part, DTensor) else part


def _sharded(key: str, part: Tensor) -> Any:
    """Return a part as megatron-core wants it: where it is in the whole, and which of the copies it is."""
    sharded = megatron("dist_checkpointing.mapping").ShardedTensor
    tensor, data = tensor_group(), data_group().rank()
    placement = part.placements[0] if isinstance(part, DTensor) else None
    if isinstance(placement, Shard):
        offset = (placement.dim, tensor.rank(), tensor.size())
        return sharded.from_rank_offsets(key, _local(part), offset, replica_id=(0, data))
    return sharded.from_rank_offsets(key, _local(part), replica_id=(tensor.rank(), data))
