"""Peak memory and time of a save and a load: whole tensors by the main process, and shards by those that train.

``python benchmarks/checkpoint_memory.py [FILE.json]``: an OpenVLA of random weights, trained by two processes of fsdp
on the CPU. Linux alone: ``VmHWM`` of /proc, reset before each measurement. Files of shards are mapped while they are
read, so that the memory of a load counts pages that the system can take back.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hardware import describe_hardware

from embodrl.config import load_config
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training.remote import RemoteTrainEngine
from embodrl.hybrid_engines.training.side_modules import ADAM_STATE
from embodrl.storage.checkpoint import CheckpointManager
from embodrl.workers.actor import launch_trainers
from embodrl.workers.policy import build_policy, configure_torch

SETTINGS = (
    "env=toy",
    "model=openvla",
    "actor=fsdp",
    "cluster.device=cpu",
    "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}",
    "model.warm_start=null",
    "model.architecture.hidden_size=768",
    "model.architecture.intermediate_size=2048",
    "model.architecture.num_hidden_layers=6",
)
MIB = 1 << 20


def memory(pid: int | str, field: str) -> int:
    """Return a field of a process's status, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measure(action: Callable[[], Any], others: list[int]) -> dict[str, float]:
    """Return seconds, and by how many MiB memory grew at most: in this process, and in that of the others that most."""
    pids: list[int | str] = ["self", *others]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = [memory(pid, "VmRSS") for pid in pids]
    clock = time.perf_counter()
    action()
    seconds = time.perf_counter() - clock
    grown = [(memory(pid, "VmHWM") - start) / MIB for pid, start in zip(pids, before, strict=True)]
    return {
        "main_process_mib": round(grown[0], 1),
        "training_process_mib": round(max(grown[1:]), 1),
        "seconds": round(seconds, 2),
    }


def main(output: Path | None) -> int:
    """Measure, print, and write what was found."""
    loaded = load_config(list(SETTINGS))
    config = loaded.config
    configure_torch(config)
    policy = build_policy(config)
    engine = RemoteTrainEngine(policy, launch_trainers(config, loaded.deployment))
    try:
        trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        moments = {
            f"{key}.{name}": torch.ones(()) if key == "step" else torch.ones_like(p, requires_grad=False)
            for name, p in trained.items()
            for key in ADAM_STATE
        }
        engine.load_state_dict(EngineState({"policy": policy.state_dict(), "optimizer": moments}, engine.counters()))
        del moments
        pids: list[int] = engine.group.process_id().result()
        result: dict[str, Any] = {
            "hardware": describe_hardware(),
            "parameters": sum(p.numel() for p in policy.parameters()),
            "state_mib": round(engine.shapes().num_bytes / MIB, 1),
            "training_processes": len(pids),
        }
        with tempfile.TemporaryDirectory() as directory:
            result |= measure_formats(engine, Path(directory), pids)
    finally:
        engine.close()
    text = json.dumps(result, indent=2)
    print(text)
    if output is not None:
        output.write_text(text + "\n")
    return 0


def measure_formats(engine: RemoteTrainEngine, directory: Path, pids: list[int]) -> dict[str, Any]:
    """Return the figures of a save and a load in both formats."""

    def save_full() -> None:
        state = engine.state_dict()
        manager.save(1, state.tensors, state.state)

    def load_full() -> None:
        checkpoint, _ = manager.latest_good()
        assert checkpoint is not None
        names = ("policy", "optimizer")
        engine.load_state_dict(EngineState({name: checkpoint.tensors(name) for name in names}, checkpoint.state))

    def save_sharded() -> None:
        manager.save(2, {}, engine.counters(), write_shards=engine.save_shards)

    def load_sharded() -> None:
        checkpoint, _ = manager.latest_good()
        assert checkpoint is not None
        engine.load_shards(checkpoint.path, checkpoint.state)

    manager = CheckpointManager(directory, 2)
    actions = {
        "save_full": save_full,
        "load_full": load_full,
        "save_sharded": save_sharded,
        "load_sharded": load_sharded,
    }
    return {name: measure(action, pids) for name, action in actions.items()}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
