"""A code agent: a language model runs programs on an example, and submits one that computes what was asked for.

PYTHONPATH=examples/code_agent embodrl train --config examples/code_agent/config.yaml

A program is an expression of ``a`` and ``b`` in Python's syntax. ``run_program`` evaluates it itself: numbers, the two
names, ``+``, ``-``, ``*``, comparisons and ``x if y else z``, of bounded size, and nothing else, so what a model writes
reaches neither files nor the network. The agent sees one input and its output, may run a program on the input, and
reads what it returns or its error; what it submits earns 1 if it agrees with the wanted function on other inputs, too.

From random weights (seed 0) 40 iterations of GRPO raise the success of 64 evaluation episodes from 22 to 59 % with the
most probable messages, and to 55 % with sampled ones; guessing earns a quarter. It took four minutes beside other work.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

import numpy as np

from embodrl import Environment, EpisodeEngine, EpisodeTask, RolloutWorkflow, Tool, Trajectory

PROGRAMS = ("a+b", "a-b", "a*b", "b-a")
TURNS = 2  # messages of an episode: the last one submits, those before run a program
MAX_CHARACTERS = 200
LARGEST = 10**9
HIDDEN = tuple((a, b) for a in range(5) for b in range(5))

Number = int | float
_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Number, Number], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def run_program(code: str, values: Mapping[str, Number]) -> Number:
    """Return the value of an expression.

    Raises:
        ValueError: it is no expression of this language, or too large.
    """
    if len(code) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(code, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression") from error
    return _value(tree.body, values)


def _value(node: ast.expr, values: Mapping[str, Number]) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            found: Number = value
        case ast.Name(id=name) if name in values:
            found = values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            found = _BINARY[type(op)](_value(left, values), _value(right, values))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            found = _COMPARED[type(op)](_value(left, values), _value(right, values))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            found = _value(body if _value(test, values) else orelse, values)
        case _:
            raise ValueError(f"{ast.unparse(node)} is not allowed")
    if not abs(found) <= LARGEST:
        raise ValueError("too large")
    return found


def solves(code: str, wanted: str) -> bool:
    """Return whether two programs agree on all hidden inputs."""
    try:
        return all(run_program(code, {"a": a, "b": b}) == run_program(wanted, {"a": a, "b": b}) for a, b in HIDDEN)
    except ValueError:
        return False


def make_tool(name: str) -> Tool:
    """Return a tool whose argument is a program."""
    return Tool(name, "", {"type": "object", "properties": {"code": {"enum": list(PROGRAMS)}}, "required": ["code"]})


class CodeWorkflow(RolloutWorkflow):
    """The agent runs programs on the example, and submits one."""

    async def run_episode(self, engine: EpisodeEngine, env: Environment, task: EpisodeTask) -> Trajectory | None:
        """Play one episode of at most ``TURNS`` messages."""
        random = np.random.default_rng(task.seed)
        wanted = str(random.choice(PROGRAMS))
        example = {"a": 3, "b": int(random.choice((2, 4)))}
        question = f"f({example['a']}, {example['b']}) is {run_program(wanted, example)}"
        messages: list[dict[str, object]] = [{"role": "user", "content": question}]
        trajectory = Trajectory(task)
        for turn in range(TURNS):
            tool = make_tool("submit" if turn + 1 == TURNS else "run")
            completion = await engine.generate(messages, [tool], tool_choice="required")
            code = str(completion.tool_calls[0].arguments["code"])
            if tool.name == "submit":
                right = solves(code, wanted)
                trajectory.add_message(completion, float(right), terminated=True, success=right)
                break
            trajectory.add_message(completion)
            try:
                said = f"{code} is {run_program(code, example)}"
            except ValueError as error:
                said = f"{code}: {error}"
            messages += [{"role": "assistant", "content": completion.text}, {"role": "tool", "content": said}]
        return trajectory
