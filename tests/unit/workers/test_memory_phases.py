"""What is offloaded between which phases, and what is reported of it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from embodrl.config.schema import Config
from embodrl.envs.pool.faults import FaultCounts
from embodrl.envs.pool.offload import SimulatorMemory
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.learners.memory_phases import MIB, MemoryPhases
from embodrl.workers.rollout_backend import LocalBackend

CPU = torch.device("cpu")


class Part:
    """Writes down what it is asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked, self.version = name, asked, 3
        self.offload_report: OffloadReport | None = None

    def offload(self, *ends: bool) -> Any:
        self.asked.append(f"{self.name} leaves" + (" whole" if ends == (True,) else ""))
        if self.name == "env":
            return SimulatorMemory(8 * MIB, MIB)
        self.offload_report = OffloadReport(CPU, 4 * MIB, 0)
        return self.offload_report

    def onload(self) -> None:
        self.asked.append(f"{self.name} is back")


def phases_of(asked: list[str], **settings: Any) -> MemoryPhases:
    sections = {name: {"enable_offload": settings.get(name, False)} for name in ("actor", "rollout", "env")}
    sections["env"]["offload_level"] = settings.get("level", "process")
    config = Config.model_validate(sections)
    env, acting, engine = (cast(Any, Part(name, asked)) for name in ("env", "rollout", "actor"))
    env.spec, env.faults = SimpleNamespace(tasks=["task"]), FaultCounts()
    return MemoryPhases(config, LocalBackend(env, acting, cast(Any, None), cast(Any, None)), engine)


def test_all_three_leave_in_turn_and_once() -> None:
    asked: list[str] = []
    phases = phases_of(asked, actor=True, rollout=True, env=True)
    phases.enter("act")
    for _ in range(3):  # reference, proximal, train
        phases.enter("train")
    phases.enter("rest")
    figures = phases.take_metrics()
    expected = ["rollout is back", "env is back", "rollout leaves", "env leaves whole", "actor leaves"]
    assert asked == expected
    assert {name: value for name, value in figures.items() if name.startswith("memory/")} == {
        "memory/rollout_before_mib": 4.0,
        "memory/rollout_after_mib": 0.0,
        "memory/env_before_mib": 8.0,
        "memory/env_after_mib": 1.0,
        "memory/actor_before_mib": 4.0,
        "memory/actor_after_mib": 0.0,
    }
    assert {name for name in figures if name.startswith("time/")} == {"time/offload_s", "time/onload_s"}
    asked.clear()
    phases.enter("act")
    phases.enter("train")
    assert asked == expected[:4] and phases.take_metrics()
    assert phases.take_metrics() == {}


@pytest.mark.parametrize("level", ["process", "simulator"])
def test_only_what_is_configured_leaves(level: str) -> None:
    asked: list[str] = []
    phases = phases_of(asked, env=True, level=level)
    phases.enter("train")
    phases.enter("rest")
    figures = phases.take_metrics()
    assert asked == ["env leaves" + (" whole" if level == "process" else "")]
    assert {name for name in figures if name.startswith("memory/")} == {"memory/env_before_mib", "memory/env_after_mib"}


def test_without_offload_nothing_is_moved_or_reported() -> None:
    asked: list[str] = []
    phases = phases_of(asked)
    phases.enter("train")
    phases.enter("rest")
    assert phases.take_metrics() == {} and asked == []
