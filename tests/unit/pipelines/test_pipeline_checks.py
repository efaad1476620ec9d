"""What is wrong with a pipeline is found before anything starts, all of it, with the node's name."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from expect import raises_code

from embodrl.errors import PipelineError, PipelineProblem
from embodrl.pipelines.graph import Graph, Pipeline

NODES = "embodrl.pipelines.nodes"


def anything(context: Any, *outputs: Any) -> None:
    """A node that fits everywhere."""


def sound() -> Pipeline:
    return (
        Pipeline("test")
        .add_node("rollout", anything, role="rollout")
        .add_node("train", anything, deps=("rollout",), role="train")
        .add_node("sync", anything, deps=("train",), role="sync")
    )


def problems_of(pipeline: Pipeline) -> list[PipelineProblem]:
    with pytest.raises(PipelineError) as caught:
        pipeline.build()
    report = str(caught.value)
    for problem in caught.value.problems:
        assert problem.hint and str(problem) in report and f"hint: {problem.hint}" in report
    return list(caught.value.problems)


def only_problem(pipeline: Pipeline, node: str) -> str:
    [problem] = problems_of(pipeline)
    assert problem.node == node
    return f"{problem.message} | {problem.hint}"


def test_a_sound_pipeline_has_no_problem_and_does_not_change_any_more() -> None:
    pipeline = sound()
    assert pipeline.problems() == []
    graph = pipeline.build()
    pipeline.add_node("sink", anything, ("train",), "sink")
    assert [node.name for node in graph.nodes] == ["rollout", "train", "sync"]
    with pytest.raises(AttributeError):
        graph.nodes = ()  # pyright: ignore[reportAttributeAccessIssue]


def test_experience_is_gathered_by_one_node() -> None:
    pipeline = (
        Pipeline("two")
        .add_node("rollout", f"{NODES}:rollout", role="rollout")
        .add_node("more", f"{NODES}:rollout", role="rollout")
        .add_node("train", lambda context, one, two: None, ("rollout", "more"), "train")
        .add_node("sync", f"{NODES}:sync", ("train",), "sync")
    )
    (problem,) = problems_of(pipeline)
    assert problem.node == "more" and "so does 'rollout'" in problem.message
    assert "algorithm.rollout_epoch" in problem.hint


def test_all_problems_come_in_one_report() -> None:
    pipeline = (
        Pipeline("bad")
        .add_node("a", anything, ("b",))
        .add_node("b", anything, ("a",))
        .add_node("alone", lambda context, batch: None, retries=-1)
        .add_node("odd", f"{NODES}:rewrd", ("rolout",), "rewards")
    )
    found = [(problem.node, problem.message) for problem in problems_of(pipeline)]
    assert found == [
        ("alone", "retries is -1"),
        ("alone", f"{__name__}:{test_all_problems_come_in_one_report.__name__}.<locals>.<lambda>(context, batch)"
         " can't be called with (context)"),
        ("odd", found[2][1]),
        ("odd", "module 'embodrl.pipelines.nodes' has no attribute 'rewrd'"),
        ("odd", "depends on 'rolout', which does not exist"),
        ("a", "is in a cycle: a -> b -> a"),
        ("alone", "its output is not used"),
        ("odd", "its output is not used"),
        ("", "no node has the role 'train'"),
        ("", "no node has the role 'sync'"),
    ]  # fmt: skip
    assert found[2][1].startswith("unknown role 'rewards'; known: rollout, ")
    with raises_code("pipeline-cycle", PipelineError, "'bad'", 10):
        pipeline.build()


def test_a_name_is_given_once() -> None:
    with raises_code("pipeline-node-duplicate"):
        sound().add_node("rollout", anything)


@pytest.mark.parametrize(
    ("links", "paths"),
    [
        ({"a": ("a",)}, {"a": "a -> a"}),
        ({"a": ("c",), "b": ("a",), "c": ("b",)}, {"a": "a -> b -> c -> a"}),
        ({"a": ("b", "c"), "b": ("a",), "c": ("a",)}, {"a": "a -> b -> a", "c": "c -> a -> c"}),
        ({"a": ("b",), "b": ("a",), "c": ("d",), "d": ("c",)}, {"a": "a -> b -> a", "c": "c -> d -> c"}),
        ({"a": ("b",), "b": ("c",), "c": ("b",)}, {"b": "b -> c -> b"}),  # a only depends on the cycle
    ],
)
def test_cycles_are_reported_with_their_paths(links: dict[str, tuple[str, ...]], paths: dict[str, str]) -> None:
    pipeline = sound()
    for name, deps in links.items():
        pipeline.add_node(name, anything, deps)
    pipeline.add_node("end", anything, tuple(links), "sink")
    assert {p.node: p.message for p in problems_of(pipeline)} == {
        node: f"is in a cycle: {path}" for node, path in paths.items()
    }


def test_a_missing_dependency_has_the_nearest_name() -> None:
    pipeline = sound().add_node("log", anything, ("rolloutt",), "sink")
    assert only_problem(pipeline, "log") == "depends on 'rolloutt', which does not exist | did you mean 'rollout'?"


def test_an_output_that_is_not_used() -> None:
    assert only_problem(sound().add_node("idle", anything), "idle").startswith("its output is not used")
    for role in ("sync", "sink"):
        assert sound().add_node("idle", anything, ("train",), role).problems() == []


async def later(context: Any) -> None:
    """It would never be awaited."""


def one_by_one(context: Any) -> Any:
    """It would never be iterated."""
    yield context


class Later:
    """A callable that is a coroutine function."""

    async def __call__(self, context: Any) -> None:
        """It would never be awaited."""


def with_keyword(context: Any, batch: Any, *, needed: int) -> None:
    """A parameter that is never given."""


WRONG: list[tuple[Any, tuple[str, ...], str]] = [
    (lambda context: None, ("rollout",), "can't be called with (context, rollout)"),
    (lambda context, a, b: None, ("rollout",), "can't be called with (context, rollout)"),
    (lambda: None, (), "can't be called with (context)"),
    (with_keyword, ("rollout",), "(context: 'Any', batch: 'Any', *, needed: 'int') -> 'None' can't be called with"),
    (later, (), "later is a coroutine or a generator"),
    (one_by_one, (), "one_by_one is a coroutine or a generator"),
    (Later(), (), "Later is a coroutine or a generator"),
    (functools.partial(later), (), "later is a coroutine or a generator"),
    (3, (), "fn is a int, not a function"),
    ("no_module_of_mine:f", (), "No module named 'no_module_of_mine'"),
    ("embodrl.pipelines.nods:train", (), "did you mean 'embodrl.pipelines.nodes'?"),
    (f"{NODES}:trian", (), f"did you mean {NODES}:train?"),
    (f"{NODES}:NODES", (), "has no attribute 'NODES'"),
    ("nodes", (), "is not of the form module:attribute"),
    ("embodrl.pipelines.checks:ENDS", (), "is a tuple, not a function"),
]


@pytest.mark.parametrize(("fn", "deps", "says"), WRONG)
def test_functions_that_do_not_fit(fn: Any, deps: tuple[str, ...], says: str) -> None:
    assert says in only_problem(sound().add_node("end", fn, deps, "sink"), "end")


class Counter:
    """A callable with parameters beside self."""

    def __call__(self, context: Any, batch: Any) -> None:
        """Fit a node with one dependency."""


@pytest.mark.parametrize(
    "fn",
    [
        anything,
        lambda context, batch: None,
        lambda context, batch, scale=1.0: None,
        lambda context, *outputs: None,
        functools.partial(lambda scale, context, batch: None, 2.0),
        Counter(),
        f"{NODES}:reward",
    ],
)
def test_functions_that_fit(fn: Callable[..., Any] | str) -> None:
    assert sound().add_node("end", fn, ("rollout",), "sink").problems() == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"role": "sinc"}, "did you mean 'sync'?"),
        ({"role": "sink", "retries": -2}, "retries is -2"),
        ({"role": "sink", "retries": True}, "retries is True"),
        ({"role": "sink", "retries": 1.5}, "retries is 1.5"),
        ({"role": "sink", "deps": "rollout"}, "write deps=('rollout',)"),
        ({"role": "sink", "deps": ("rollout", "rollout")}, "depends on 'rollout' more than once"),
    ],
)
def test_arguments_that_are_wrong(arguments: dict[str, Any], says: str) -> None:
    pipeline = sound().add_node("end", anything, **{"deps": ("train",)} | arguments)
    found = [f"{p.message} | {p.hint}" for p in problems_of(pipeline) if p.node == "end"]
    assert says in found[0]


@pytest.mark.parametrize("name", ["", "Reward", "a-b", "a/b", "total", "env"])
def test_names_that_would_make_no_metric(name: str) -> None:
    [problem] = problems_of(sound().add_node(name, anything, ("train",), "sink"))
    assert problem.message == "is not a name" or f"the metric time/{name}_s" in problem.message


def test_one_node_trains_and_not_twice() -> None:
    twice = sound().add_node("again", anything, ("rollout",), "train")
    assert only_problem(twice, "again").startswith("has the role 'train', but so does 'train'")
    retried = Pipeline("test").add_node("rollout", anything, role="rollout")
    retried.add_node("train", anything, ("rollout",), "train", retries=1).add_node("sync", anything, ("train",), "sync")
    assert "repeat the optimizer steps" in only_problem(retried, "train")
    nothing = Pipeline("test").add_node("end", anything, role="sink")
    assert [p.message for p in problems_of(nothing)] == [
        "no node has the role 'train'",
        "no node has the role 'sync'",
    ]


def test_training_depends_on_every_rollout() -> None:
    pipeline = sound().add_node("more", anything, ("train",), "rollout").add_node("log", anything, ("more",), "sink")
    assert any(
        problem.node == "more" and problem.message.startswith("'train', which trains, does not depend on it")
        for problem in problems_of(pipeline)
    )


def test_weights_are_handed_over_after_training() -> None:
    early = sound().add_node("early", anything, ("rollout",), "sync")
    assert only_problem(early, "early").startswith(
        "does not depend on 'train', so it might send the weights from before"
    )
    late = sound().add_node("between", anything, ("train",)).add_node("later", anything, ("between",), "sync")
    assert late.problems() == []


# -- order ------------------------------------------------------------------------------------------------------------


def diamond() -> Graph:
    """Named and added so that neither the alphabet nor a set gives the order by chance."""
    pipeline = Pipeline("diamond").add_node("train", anything, ("right", "left", "middle"), "train")
    pipeline.add_node("sync", anything, ("train",), "sync")
    for name in ("right", "left", "middle"):
        pipeline.add_node(name, anything, ("rollout",))
    return pipeline.add_node("log", anything, ("left",), "sink").add_node("rollout", anything, role="rollout").build()


def test_the_order_is_that_of_the_dependencies_then_of_insertion() -> None:
    assert [node.name for node in diamond().nodes] == ["rollout", "right", "left", "middle", "train", "sync", "log"]


@pytest.mark.parametrize("seed", ["0", "1", "2", "3"])
def test_the_order_does_not_depend_on_the_hash_seed(seed: str) -> None:
    program = "import test_pipeline_checks as t; print(*(node.name for node in t.diamond().nodes))"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])  # noqa: PTH120
    environ = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rollout", "right", "left", "middle", "train", "sync", "log"]
