"""The example of a code agent: what its programs may do, and what an episode earns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from embodrl.envs.environment import Environment, Tool
from embodrl.hybrid_engines.rollout.batched import Completion, EpisodeEngine
from embodrl.models.common.chat import ToolCall
from embodrl.types import PolicyOutput
from embodrl.workers.workflows.workflow import EpisodeTask

EXAMPLE = Path(__file__).parents[4] / "examples" / "code_agent"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the example."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "program", raising=False)
    import program  # pyright: ignore[reportMissingImports]

    return program


@pytest.mark.parametrize(
    ("code", "value"),
    [("a+b*2", 7), ("-(a - b)", -1), ("1.5*b", 3.0), ("a if a <= b else b", 2), ("(a == 3) + (b != 2)", 1)],
)
def test_a_program_is_evaluated(program: Any, code: str, value: float) -> None:
    assert program.run_program(code, {"a": 3, "b": 2}) == value


@pytest.mark.parametrize(
    "code",
    [
        *("__import__('os')", "a.real", "[a]", "a**a", "lambda: a", "c", "'a'", "a < b < 2", "a b", "", "1e999", "a/b"),
        *("*".join(["999999"] * 3), "(" * 150 + "a" + ")" * 150, "+".join("a" * 150), "f'{a}'", "(a := 3)"),
    ],
)
def test_nothing_else_is(program: Any, code: str) -> None:
    with pytest.raises(ValueError):
        program.run_program(code, {"a": 3, "b": 2})


def test_a_program_solves_what_agrees_on_all_inputs(program: Any) -> None:
    assert program.solves("b+a", "a+b") and program.solves("a--b", "a+b")
    assert not program.solves("a*b", "a+b") and not program.solves("a/b", "a+b")
    assert not program.solves("a-b if b <= 2 else b-a", "a-b"), "it agrees on a part"


class Scripted:
    """An engine that runs a program, and submits one."""

    has_values = False

    def __init__(self, run: str, submit: str) -> None:
        self.codes = {"run": run, "submit": submit}
        self.read: list[str] = []

    async def generate(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], **_: Any) -> Completion:
        self.read.append(str(messages[-1]["content"]))
        call = ToolCall(tools[0].name, {"code": self.codes[tools[0].name]})
        output = PolicyOutput(np.zeros((1, 1, 0), np.float32), torch.zeros(1, 1, 1), None, {})
        return cast(Completion, SimpleNamespace(text=call.to_text(), tool_calls=(call,), output=output))


def test_what_solves_the_task_earns_1(program: Any) -> None:
    """Over the seeds every program is wanted; exactly one of those offered is right."""
    for seed in range(12):
        right: list[str] = []
        for code in program.PROGRAMS:
            engine = Scripted("a/b", code)
            task = EpisodeTask("reach-red", 0, seed, 2, 0)
            run = program.CodeWorkflow().run_episode(cast(EpisodeEngine, engine), cast(Environment, None), task)
            trajectory = asyncio.run(run)
            assert trajectory.done and float(trajectory.chunks[0].rewards) == 0.0
            assert engine.read[0].startswith("f(3, ") and engine.read[1] == "a/b: a / b is not allowed"
            right += [code] if trajectory.success else []
        assert len(right) == 1
        outcome = int(engine.read[0].split()[-1])
        example = {"a": 3, "b": int(engine.read[0][5])}
        assert program.run_program(right[0], example) == outcome
