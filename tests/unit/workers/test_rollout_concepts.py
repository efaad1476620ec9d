"""The rollout side has six concepts; everything else in it implements one of them or is a record."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import is_typeddict

from embodrl.scheduler.worker import Worker

CONCEPTS = {
    "RolloutEngine": "embodrl.hybrid_engines.rollout.base",  # policy: observations -> actions
    "EpisodeRunner": "embodrl.workers.async_collector",  # environments: episodes -> a shard
    "Collector": "embodrl.workers.collector",  # runners: iteration -> a batch
    "RolloutWorkflow": "embodrl.workers.workflow",  # the user's view of one episode
    "Evaluator": "embodrl.workers.evaluator",  # fixed episodes -> a result
    "RolloutBackend": "embodrl.workers.rollout_backend",  # all of it, here or in processes of its own
}
MODULES = (
    *sorted(set(CONCEPTS.values())),
    "embodrl.workers.lockstep",
    "embodrl.workers.remote_backend",
    "embodrl.workers.rollout_process",
    "embodrl.workers.workflow_runner",
)


def is_record(found: type) -> bool:
    return dataclasses.is_dataclass(found) or is_typeddict(found) or issubclass(found, (Exception, tuple))


def methods(found: type) -> set[str]:
    return {name for name, value in vars(found).items() if inspect.isfunction(value) and not name.startswith("_")}


def implements(found: type, concept: type) -> bool:
    """Return whether a class derives from a concept, or has all methods of a protocol."""
    if not getattr(concept, "_is_protocol", False):
        return issubclass(found, concept)
    return all(hasattr(found, name) for name in methods(concept))


def test_there_are_six_concepts_on_the_rollout_side() -> None:
    concepts = {name: getattr(importlib.import_module(module), name) for name, module in CONCEPTS.items()}
    others: list[str] = []
    for module in map(importlib.import_module, MODULES):
        for name, found in vars(module).items():
            if not inspect.isclass(found) or found.__module__ != module.__name__ or is_record(found):
                continue
            if not issubclass(found, Worker) and not any(implements(found, concept) for concept in concepts.values()):
                others.append(f"{module.__name__}.{name}")
    assert others == [], "a further concept: is it one of the six under another name?"
