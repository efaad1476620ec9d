"""What leaves at which border of phases, and what is told of it."""

from typing import Any, cast

import pytest
import torch

from embodrl.config.schema import Config
from embodrl.envs.pool.offload import SimulatorMemory
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.workers.offload import MIB, PhaseOffload
from embodrl.workers.rollouts import LocalRollouts

CPU = torch.device("cpu")


class Part:
    """Writes down what it is asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked, self.version = name, asked, 3
        self.may_offload = False
        self.offload_report: OffloadReport | None = None

    def offload(self, *ends: bool) -> Any:
        self.asked.append(f"{self.name} leaves" + (" whole" if ends == (True,) else ""))
        if self.name == "env":
            return SimulatorMemory(8 * MIB, MIB)
        self.offload_report = OffloadReport(CPU, 4 * MIB, 0)
        return self.offload_report

    def onload(self) -> None:
        self.asked.append(f"{self.name} is back")

    def update(self, *_: object) -> dict[str, float]:
        self.asked.append("update")
        return {"train/loss": 1.0}

    def reference_logprobs(self, *_: object) -> str:
        self.asked.append("reference")
        return "logprobs"

    def proximal(self, *_: object) -> str:
        self.asked.append("proximal")
        return "proximal"

    def weights(self) -> Any:
        return iter([("w", torch.zeros(1))])


def phases_of(asked: list[str], **settings: Any) -> PhaseOffload:
    sections = {name: {"enable_offload": settings.get(name, False)} for name in ("actor", "rollout", "env")}
    sections["env"]["offload_level"] = settings.get("level", "process")
    config = Config.model_validate(sections)
    env, acting, engine = (cast(Any, Part(name, asked)) for name in ("env", "rollout", "actor"))
    return PhaseOffload(config, rollouts_of(env, acting), engine)


def rollouts_of(env: Any, acting: Any) -> LocalRollouts:
    rollouts = LocalRollouts.__new__(LocalRollouts)
    rollouts.pool, rollouts.acting = env, acting
    return rollouts


def test_all_three_leave_in_turn_and_once() -> None:
    asked: list[str] = []
    phases, nothing = phases_of(asked, actor=True, rollout=True, env=True), cast(Any, None)
    phases.begin_acting()
    assert phases.engine.reference_logprobs(nothing, nothing) == "logprobs"
    assert phases.engine.proximal(nothing, nothing) == "proximal"
    assert phases.engine.update(nothing, nothing, nothing, nothing) == {"train/loss": 1.0}
    assert phases.engine.version == 3 and [name for name, _ in phases.engine.weights()] == ["w"]
    figures = phases.end_training()
    assert asked == [
        *("rollout is back", "env is back", "rollout leaves", "env leaves whole"),
        *("reference", "proximal", "update", "actor leaves"),
    ]
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
    phases.begin_acting()
    phases.engine.update(nothing, nothing, nothing, nothing)
    assert asked == ["rollout is back", "env is back", "rollout leaves", "env leaves whole", "update"]
    phases.finish()
    assert asked[-1] == "rollout is back"


@pytest.mark.parametrize("level", ["process", "simulator"])
def test_only_what_is_asked_for_leaves(level: str) -> None:
    asked: list[str] = []
    phases, nothing = phases_of(asked, env=True, level=level), cast(Any, None)
    phases.engine.update(nothing, nothing, nothing, nothing)
    figures = phases.end_training()
    assert asked == ["env leaves" + (" whole" if level == "process" else ""), "update"]
    assert {name for name in figures if name.startswith("memory/")} == {"memory/env_before_mib", "memory/env_after_mib"}


@pytest.mark.parametrize(("apart", "rollout", "may"), [(False, True, False), (True, True, True), (True, False, False)])
def test_what_acts_may_leave_if_nothing_else_uses_it(
    apart: bool, rollout: bool, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting = cast(Any, Part("rollout", []))
    acting.may_offload = None
    monkeypatch.setattr("embodrl.workers.rollouts.make_rollout_engine", lambda *_: acting)
    for name in ("make_rollout_source", "Evaluator"):
        monkeypatch.setattr(f"embodrl.workers.rollouts.{name}", lambda *_, **__: None)
    rollouts = rollouts_of(None, None)
    rollouts.config = Config.model_validate({"actor": {"own_process": apart}, "rollout": {"enable_offload": rollout}})
    rollouts.prepare(cast(Any, None), lambda: False, keep_frames=False)
    assert acting.may_offload is may


def test_without_offload_nothing_is_moved_or_told() -> None:
    asked: list[str] = []
    phases, nothing = phases_of(asked), cast(Any, None)
    phases.engine.update(nothing, nothing, nothing, nothing)
    assert phases.end_training() == {} and asked == ["update"]
