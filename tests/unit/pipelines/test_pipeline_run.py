"""Walking a graph: who sees what, when outputs go, retries, and what a failure says."""

from __future__ import annotations

import gc
import logging
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from expect import raises_code

from embodrl.algorithms.advantages import Advantages
from embodrl.data.batch import Batch
from embodrl.errors import EmbodrlError, NonFiniteError, PipelineError
from embodrl.pipelines.context import PipelineContext
from embodrl.pipelines.graph import Graph, GraphNode, Pipeline
from embodrl.pipelines.outcomes import described
from embodrl.pipelines.walk import Walk
from embodrl.reporting.rows import is_measured

CONTEXT = cast(PipelineContext, object())


def ends(context: Any, *outputs: Any) -> None:
    """The node that trains, where a test is about others."""


def walked(graph: Graph, on_node: Callable[[GraphNode], None] = lambda _: None) -> dict[str, float | None]:
    """Run every node, and return their metrics."""
    with Walk(graph, CONTEXT, on_node) as walk:
        while (node := walk.next()) is not None:
            walk.end(node, *walk.begin(node).call())
    return walk.metrics()


def walk(pipeline: Pipeline, **options: Any) -> dict[str, float | None]:
    """Walk a pipeline, with the node that it needs at its end; metrics without times."""
    metrics = walked(pipeline.add_node("sync", ends, ("train",), "sync").build(), **options)
    return {name: value for name, value in metrics.items() if not is_measured(name)}


def source(make: Callable[[], Any], name: str = "test") -> Pipeline:
    return Pipeline(name).add_node("rollout", lambda context: make(), role="rollout")


def a_batch() -> Batch:
    return Batch({"rewards": torch.tensor([1.0, 2.0]), "inputs": {"seen": torch.zeros(2, 3)}}, None, {"steps": 2})


def test_every_node_gets_the_context_and_all_outputs_in_the_order_of_its_deps() -> None:
    seen: dict[str, tuple[Any, ...]] = {}

    def node(name: str, value: Any) -> Callable[..., Any]:
        def call(context: Any, *outputs: Any) -> Any:
            assert context is CONTEXT
            seen[name] = outputs
            return value

        return call

    pipeline = Pipeline("fan").add_node("rollout", node("rollout", 1), role="rollout")
    pipeline.add_node("left", node("left", "l"), ("rollout",)).add_node("right", node("right", "r"), ("rollout",))
    pipeline.add_node("train", node("train", None), ("right", "rollout", "left"), "train")
    pipeline.add_node("after", node("after", None), ("train", "left"), "sink")
    order: list[str] = []
    assert walk(pipeline, on_node=lambda node: order.append(node.name)) == {}
    assert seen == {"rollout": (), "left": (1,), "right": (1,), "train": ("r", 1, "l"), "after": ("l",)}
    assert order == ["rollout", "left", "right", "train", "after", "sync"]


def test_metrics_are_collected_with_the_seconds_of_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 10.5, 20.0, 24.0, 30.0, 31.0])
    monkeypatch.setattr("embodrl.pipelines.walk.time.perf_counter", lambda: next(ticks))
    pipeline = source(lambda: ("batch", {"a": 1.0, "b": None}))
    pipeline.add_node("train", lambda context, batch: (None, {"a": 2, "c": np.float32(0.5)}), ("rollout",), "train")
    metrics = walked(pipeline.add_node("sync", ends, ("train",), "sync").build())
    times = {"time/rollout_s": 0.5, "time/train_s": 4.0, "time/sync_s": 1.0}
    assert metrics == {"a": 2, "b": None, "c": 0.5} | times
    assert type(metrics["c"]) is float


@pytest.mark.parametrize("value", [None, ("a", "b"), ({}, 1), ("a", {}, "c"), {"a": 1.0}, [1, {}]])
def test_what_is_no_pair_with_metrics_is_a_value(value: Any) -> None:
    seen: list[Any] = []
    pipeline = source(lambda: value).add_node("train", lambda context, x: seen.append(x), ("rollout",), "train")
    assert walk(pipeline) == {}
    assert seen == [value]


@pytest.mark.parametrize("metrics", [{"a": "fast"}, {1: 1.0}, {"a": torch.zeros(2)}, {"iteration": 3}])
def test_metrics_are_numbers_by_name(metrics: Any) -> None:
    with raises_code("pipeline-node-result"):
        walk(source(lambda: (None, metrics)).add_node("train", ends, ("rollout",), "train"))


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_node_changes_columns_of_its_own_copy_only() -> None:
    first, seen = a_batch(), dict[str, Any]()

    def changes(context: Any, batch: Batch) -> Batch:
        batch["rewards"] = batch["rewards"] * 10
        batch["more"] = torch.ones(2)
        batch.pop(("inputs", "seen"))
        batch.meta["steps"] = 5
        return batch

    def looks(context: Any, batch: Batch) -> None:
        seen["sibling"] = batch["rewards"].tolist(), "more" in batch, ("inputs", "seen") in batch, dict(batch.meta)
        seen["same memory"] = batch["rewards"].data_ptr() == first["rewards"].data_ptr()

    def keeps(context: Any, changed: Batch, looked: None) -> None:
        seen["changed"] = changed["rewards"].tolist()

    pipeline = source(lambda: first).add_node("changes", changes, ("rollout",)).add_node("look", looks, ("rollout",))
    walk(pipeline.add_node("train", keeps, ("changes", "look"), "train"))
    assert seen["sibling"] == ([1.0, 2.0], False, True, {"steps": 2}) and seen["same memory"]
    assert seen["changed"] == [10.0, 20.0]


class Value:
    """Something that can be watched."""


def test_outputs_go_as_soon_as_they_are_not_needed() -> None:
    alive: dict[str, dict[str, bool]] = {}
    watched: dict[str, weakref.ref[Value]] = {}

    def node(name: str) -> Callable[..., Any]:
        def call(context: Any, *outputs: Any) -> Value:
            gc.collect()
            alive[name] = {other: watched[other]() is not None for other in list(watched)}
            value = Value()
            watched[name] = weakref.ref(value)
            return value

        return call

    pipeline = Pipeline("long").add_node("rollout", node("rollout"), role="rollout")
    pipeline.add_node("a", node("a"), ("rollout",)).add_node("log", node("log"), ("a",), "sink")
    pipeline.add_node("b", node("b"), ("rollout", "a")).add_node("train", node("train"), ("b", "log"), "train")
    pipeline.add_node("after", node("after"), ("train",), "sink")
    walk(pipeline)
    # Each until its last reader has begun; log and b run at once, before train.
    assert alive["rollout"] == {} and alive["a"] == {"rollout": True}
    assert alive["b"]["rollout"] and alive["b"]["a"] and alive["log"]["a"]
    assert alive["train"] == {"rollout": False, "a": False, "log": True, "b": True}
    assert not any(alive["after"].values())
    gc.collect()
    assert not any(reference() for reference in watched.values())


# -- failures ---------------------------------------------------------------------------------------------------------


def test_nodes_that_do_not_depend_on_each_other_run_at_once() -> None:
    """Each of three nodes waits until all have begun: one after the other they never end."""
    meeting = threading.Barrier(3)

    def meets(context: Any, *outputs: Any) -> tuple[int, dict[str, float]]:
        meeting.wait(20)
        return len(outputs), {"last": float(len(outputs))}

    def trains(context: Any, *outputs: Any) -> None:
        meeting.wait(20)
        assert threading.current_thread() is threading.main_thread()

    pipeline = source(a_batch).add_node("left", meets, ("rollout",))
    pipeline.add_node("train", trains, ("rollout",), "train")
    pipeline.add_node("log", meets, ("rollout",), "sink").add_node("used", ends, ("left",), "sink")
    assert walk(pipeline) == {"last": 1.0}
    assert meeting.n_waiting == 0


def test_metrics_follow_the_order_of_nodes_whoever_ends_first() -> None:
    ended = threading.Event()

    def first(context: Any, batch: Batch) -> tuple[None, dict[str, float]]:
        assert ended.wait(20)
        return None, {"same": 1.0}

    def second(context: Any, batch: Batch) -> tuple[None, dict[str, float]]:
        ended.set()
        return None, {"same": 2.0}

    pipeline = source(a_batch).add_node("first", first, ("rollout",), "sink")
    pipeline.add_node("second", second, ("rollout",), "sink").add_node("train", ends, ("rollout",), "train")
    assert walk(pipeline) == {"same": 2.0}


def test_an_error_in_a_thread_ends_the_walk_when_the_others_have_ended() -> None:
    began, ended = threading.Event(), threading.Event()

    def fails(context: Any, batch: Batch) -> None:
        assert began.wait(20)
        raise ValueError("no")

    def lasts(context: Any, batch: Batch) -> None:
        began.set()
        ended.set()

    pipeline = source(a_batch).add_node("fails", fails, ("rollout",), "sink")
    pipeline.add_node("lasts", lasts, ("rollout",), "sink").add_node("train", ends, ("rollout",), "train")
    with raises_code("pipeline-node-raised", PipelineError, "ValueError: no"):
        walk(pipeline)
    assert ended.is_set()


class Unsteady:
    """Fails some times, after it has changed its input, and then works."""

    def __init__(self, failures: int, error: BaseException) -> None:
        self.failures, self.error, self.seen = failures, error, list[list[float]]()

    def __call__(self, context: Any, batch: Batch) -> Batch:
        self.seen.append(batch["rewards"].tolist())
        batch["rewards"] = batch["rewards"] + 1
        if len(self.seen) <= self.failures:
            raise self.error
        return batch


def with_node(node: Callable[..., Any], retries: int = 0) -> Pipeline:
    pipeline = source(a_batch).add_node("shape", node, ("rollout",), retries=retries)
    return pipeline.add_node("train", ends, ("shape",), "train")


def test_a_node_is_tried_again_with_fresh_inputs(caplog: pytest.LogCaptureFixture) -> None:
    node = Unsteady(2, ValueError("not yet"))
    with caplog.at_level(logging.WARNING):
        assert walk(with_node(node, retries=3)) == {"pipeline/retries": 2.0}
    assert node.seen == [[1.0, 2.0]] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "node 'shape' failed (attempt 1 of 4): ValueError: not yet",
        "node 'shape' failed (attempt 2 of 4): ValueError: not yet",
    ]
    assert walk(with_node(Unsteady(0, ValueError()), retries=1)) == {"pipeline/retries": 0.0}


def test_an_error_of_the_users_tells_node_inputs_and_cause() -> None:
    node = Unsteady(9, ValueError("bad shape"))
    with pytest.raises(PipelineError) as caught:
        walk(with_node(node, retries=1))
    assert len(node.seen) == 2
    assert caught.value.__cause__ is node.error
    assert caught.value.message.splitlines() == [
        "ValueError: bad shape",
        caught.value.message.splitlines()[1],
        f"  in node 'shape' ({__name__}:Unsteady) of the pipeline 'test', after 2 attempts",
    ]
    assert re.fullmatch(rf"  at {__file__}:\d+ in __call__", caught.value.message.splitlines()[1])
    assert caught.value.hint.splitlines() == [
        "fix the function; rerun with --debug for the traceback; its inputs were",
        "    rollout: Batch [2] with rewards float32[2], inputs/seen float32[2, 3]",
    ]
    assert "hint: " in str(caught.value)


def test_an_error_of_ours_keeps_type_and_remedy() -> None:
    node = Unsteady(9, NonFiniteError("the loss is NaN", "lower the learning rate"))
    with pytest.raises(NonFiniteError) as caught:
        walk(with_node(node))
    assert caught.value is node.error and caught.value.hint == "lower the learning rate"
    assert str(caught.value).startswith("the loss is NaN\n  in node 'shape' (")
    assert str(caught.value).endswith("inputs/seen float32[2, 3]\n  hint: lower the learning rate\n  code: non-finite")


@pytest.mark.parametrize("error", [InterruptedError(), KeyboardInterrupt()])
def test_interruptions_are_never_tried_again(error: BaseException) -> None:
    node = Unsteady(9, error)
    with pytest.raises(type(error)) as caught:
        walk(with_node(node, retries=5))
    assert caught.value is error and len(node.seen) == 1


def test_an_interruption_after_training_has_begun_is_an_error() -> None:
    node = Unsteady(9, InterruptedError())
    pipeline = source(a_batch).add_node("train", lambda context, batch: None, ("rollout",), "train")
    with raises_code("pipeline-interrupted"):
        walk(pipeline.add_node("late", node, ("train", "rollout"), "sink", retries=5))
    assert len(node.seen) == 1


def test_what_a_message_says_about_an_input() -> None:
    column = torch.zeros(4, 2, 1)
    estimate = Advantages(column, column, column.bool())
    assert described(estimate) == (
        "Advantages with advantages Tensor float32[4, 2, 1], returns Tensor float32[4, 2, 1],"
        " valid Tensor bool[4, 2, 1]"
    )
    assert described(np.zeros((3,), np.int64)) == "ndarray int64[3]"
    assert described({"a": torch.zeros(2), "b": [1, 2]}) == "dict {a: Tensor float32[2], b: list of 2}"
    assert (described(None), described(0.5), described("text")) == ("None", "0.5", "str")
    assert described(Batch({}, None, None, [0])) == "Batch [0] with no columns"


def test_an_error_can_be_raised_more_than_once() -> None:
    error = EmbodrlError("one", "fix it")
    error.add("two")
    error.add("three")
    assert str(error) == "one\n  two\n  three\n  hint: fix it\n  code: embodrl"


def test_nodes_that_exit_are_named() -> None:
    import os
    import sys

    def leaves(context: Any) -> None:
        sys.exit(7)

    def gone(context: Any) -> None:
        os._exit(9)

    def raises(context: Any) -> None:
        raise GeneratorExit("gone")

    for node, call in ((leaves, "sys.exit(7)"), (gone, "os._exit(9)"), (raises, "GeneratorExit")):
        graph = Graph("exits", (GraphNode("mine", node, f"{__name__}:{node.__name__}", (), (), "sink", 0),))
        with raises_code("function-exit") as caught:
            walked(graph)
        assert call in str(caught.value) and f"{__name__}:{node.__name__}" in str(caught.value)
        assert "in node 'mine'" in str(caught.value)

    def child(context: Any) -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(5)  # of a process of its own, such as multiprocessing's
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    found: list[int] = []
    graph = Graph(
        "forks", (GraphNode("mine", lambda context: found.append(child(context)), "mine:child", (), (), "sink", 0),)
    )
    walked(graph)
    assert found == [5]
