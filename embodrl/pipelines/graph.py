"""The training loop as a graph: nodes, the assembly of pipelines, and their execution.

Imports no torch, since pipelines are checked together with the configuration.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from embodrl.errors import EmbodrlError, PipelineError, PipelineProblem, user_location
from embodrl.pipelines.checks import BESIDE, CHANGES, NodeSpec, check_nodes, inputs_of, resolve, sorted_names, upstream
from embodrl.pipelines.outcomes import Metrics, described, outcome_of, shared
from embodrl.processes.trace import record
from embodrl.user_code import guard_user_code

if TYPE_CHECKING:
    from embodrl.pipelines.context import PipelineContext

logger = logging.getLogger(__name__)

RETRIES = "pipeline/retries"


@dataclass(frozen=True)
class GraphNode:
    """A step of the training loop.

    Attributes:
        name: unique; its time is the metric ``time/<name>_s``.
        fn: ``fn(context, *outputs) -> value | (value, metrics) | None``, with an output for each of ``inputs``; for a
            node that stores or trains ``-> metrics | None``.
        label: its ``module:function``.
        deps: names of the nodes that must run before it.
        inputs: the dependencies whose outputs it receives, in this order.
        role: role in the loop, one of ``checks.ROLES``.
        retries: further attempts after it has raised.
    """

    name: str
    fn: Callable[..., object]
    label: str
    deps: tuple[str, ...]
    inputs: tuple[str, ...]
    role: str
    retries: int


class Pipeline:
    """Nodes to be built into a graph.

    >>> Pipeline("mine").add_node("rollout", "embodrl.pipelines.nodes:rollout", role="rollout").name
    'mine'

    Args:
        name: for messages and drawings.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._specs: dict[str, NodeSpec] = {}

    @property
    def roles(self) -> dict[str, str]:
        return {name: spec.role for name, spec in self._specs.items()}

    def upstream(self, name: str) -> set[str]:
        """Return a node and all its dependencies."""
        return upstream(name, {other: spec.deps for other, spec in self._specs.items()})

    def add_node(
        self,
        name: str,
        fn: Callable[..., object] | str,
        deps: Sequence[str] = (),
        role: str = "compute",
        retries: int = 0,
    ) -> Self:
        """Add a node; nodes may be added in any order.

        Args:
            name: lower-case letters, digits and ``_``.
            fn: a function, or ``module:function``. It gets the context and the outputs of ``deps``, and returns a
                value, a pair of a value and a dictionary of metrics, or None. Batches among its inputs are shallow
                copies: it may replace columns, but must not write into tensors.
            deps: nodes that run before. Nodes that store or train have no output and only run before.
            role: one of ``checks.ROLES``.
            retries: further attempts after it has raised. An attempt starts with fresh copies of the inputs, but
                changes to the context remain.

        Raises:
            PipelineError: the name is taken.
        """
        if name in self._specs:
            message = f"pipeline '{self.name}' has a node '{name}' already"
            raise PipelineError(
                message,
                "choose another name",
                (PipelineProblem(name, message, "rename one", code="pipeline-node-duplicate"),),
            )
        kept = deps if isinstance(deps, str) else tuple(deps)
        self._specs[name] = NodeSpec(name, fn, cast(tuple[str, ...], kept), role, retries)
        return self

    def problems(self) -> list[PipelineProblem]:
        """Return all problems of the nodes, in order of insertion."""
        return check_nodes(list(self._specs.values()))

    def build(self) -> Graph:
        """Return the graph: nodes after their dependencies, otherwise in order of insertion.

        Raises:
            PipelineError: lists every problem.
        """
        problems = self.problems()
        if problems:
            count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
            raise PipelineError(f"the pipeline '{self.name}' has {count}:", problems=tuple(problems))
        specs = [self._specs[name] for name in sorted_names(list(self._specs.values()))]
        roles = self.roles
        nodes = [GraphNode(s.name, *resolve(s.fn), s.deps, inputs_of(s.deps, roles), s.role, s.retries) for s in specs]
        return Graph(self.name, tuple(nodes))


@dataclass(frozen=True)
class Graph:
    """A checked pipeline, made by ``Pipeline.build``.

    Attributes:
        nodes: nodes in execution order.
    """

    name: str
    nodes: tuple[GraphNode, ...]

    def run(self, context: PipelineContext, on_node: Callable[[GraphNode], None] | None = None) -> Metrics:
        """Run every node once, after those that it depends on; otherwise in order.

        Nodes with a role of ``BESIDE`` run in threads beside all others that do not depend on them. An output is kept
        until its last dependent node has begun.

        Args:
            context: passed to every node.
            on_node: called before each node, in this thread.

        Returns:
            the metrics of all nodes in their order (for duplicates, the last), ``time/<node>_s``, and the number of
            retries if any node may be retried.

        Raises:
            InterruptedError: a node before the training one was interrupted; nothing has been learned.
            EmbodrlError: a node raised it in every attempt; the message names the node and its inputs.
            PipelineError: a node raised anything else, was interrupted after training had begun, or returned invalid
                metrics.
        """
        with _Walk(self, context, on_node or (lambda _: None)) as walk:
            while (node := walk.next()) is not None:
                walk.end(node, *self.call(*walk.begin(node)))
        found = walk.found
        metrics: Metrics = {}
        retries = 0.0
        for node in self.nodes:
            retries += found[node.name].pop(RETRIES, None) or 0.0
            metrics |= found[node.name]
        return metrics | ({RETRIES: retries} if any(node.retries for node in self.nodes) else {})

    def call(
        self, node: GraphNode, context: PipelineContext, inputs: Sequence[object], may_stop: bool
    ) -> tuple[object, Metrics]:
        """Run a node with its retries.

        Args:
            node: one of this graph's.
            context: passed to it.
            inputs: outputs of the nodes that it depends on.
            may_stop: nothing has been learned yet, so that it may be interrupted.

        Returns:
            its output, and its metrics with ``time/<node>_s`` and, if it may be retried, the number of retries.

        Raises:
            InterruptedError, EmbodrlError, PipelineError: as ``run``.
        """
        clock = time.perf_counter()
        attempts = 0
        while True:
            try:
                with _guarded(node):
                    result = node.fn(context, *map(shared, inputs))
                break
            except Exception as error:  # noqa: BLE001  a user's node may raise anything
                attempts += 1
                self._tried(node, inputs, error, attempts, may_stop)
        value, found = self._outcome(node, result)
        now = time.perf_counter()
        record(node.name, clock, now)
        found |= {f"time/{node.name}_s": now - clock}
        return value, found | ({RETRIES: float(attempts)} if node.retries else {})

    def _tried(
        self, node: GraphNode, inputs: Sequence[object], error: Exception, attempts: int, may_stop: bool
    ) -> None:
        """Return if a node that has raised may be retried."""
        interrupted = isinstance(error, InterruptedError)
        if interrupted and may_stop:
            raise error
        if interrupted or attempts > node.retries:
            raise self._failure(node, inputs, error, attempts) from error
        of = f"attempt {attempts} of {node.retries + 1}"
        logger.warning("node '%s' failed (%s): %s: %s", node.name, of, type(error).__name__, error)

    def _failure(self, node: GraphNode, inputs: Sequence[object], error: Exception, attempts: int) -> EmbodrlError:
        """Return the error of a node with its name, its inputs, and the cause."""
        where = f"in node '{node.name}' ({node.label}) of the pipeline '{self.name}'"
        where += f", after {attempts} attempts" if attempts > 1 else ""
        pairs = [f"\n    {name}: {described(value)}" for name, value in zip(node.inputs, inputs, strict=True)]
        text = f"{where}{', which got' if pairs else ''}{''.join(pairs)}"
        place = user_location(error)
        if isinstance(error, EmbodrlError):
            error.add(text)
            return error
        if isinstance(error, InterruptedError):
            hint = "a node that can be interrupted, such as a rollout, comes before the one that trains"
            return PipelineError(f"interrupted once training had begun, {text}", hint, code="pipeline-interrupted")
        hint = "fix the function; rerun with --debug for the traceback"
        hint += f"; its inputs were{''.join(pairs)}" if pairs else ""
        at = f"\n  at {place}" if place else ""
        return PipelineError(f"{type(error).__name__}: {error}{at}\n  {where}", hint, code="pipeline-node-raised")

    def _outcome(self, node: GraphNode, result: object) -> tuple[object, Metrics]:
        if node.role in CHANGES and isinstance(result, dict):
            result = None, cast(dict[str, object], result)
        try:
            return outcome_of(result)
        except TypeError as error:
            message = f"node '{node.name}' ({node.label}) of the pipeline '{self.name}' returned {error}"
            raise PipelineError(
                message, "return value, (value, {name: number}) or None", code="pipeline-node-result"
            ) from error


class _Walk:
    """The state of one walk over a graph; leaving its block waits for the nodes in threads, also after an error.

    Args:
        graph: its nodes are run.
        context: passed to every node.
        on_node: called before each node.

    Attributes:
        found: metrics of the nodes that have ended, by name.
    """

    def __init__(self, graph: Graph, context: PipelineContext, on_node: Callable[[GraphNode], None]) -> None:
        self.found: dict[str, Metrics] = {}
        self._graph = graph
        self._context = context
        self._on_node = on_node
        self._outputs = _Outputs(graph.nodes)
        self._left = list(graph.nodes)
        self._running: dict[Future[None], GraphNode] = {}
        self._begun: dict[str, tuple[GraphNode, PipelineContext, Sequence[object], bool]] = {}
        self._results: dict[str, tuple[object, Metrics]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._may_stop = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def next(self) -> GraphNode | None:
        """Return the next node for this thread, once threads have those that may run beside it; None at the end."""
        while True:
            self._collect()
            ready = [node for node in self._left if all(name in self.found for name in node.deps)]
            if len(ready) + len(self._running) > 1:
                for node in (node for node in ready if node.role in BESIDE):
                    self._submit(node)
                ready = [node for node in ready if node.role not in BESIDE]
            if ready or not self._running:
                return ready[0] if ready else None
            wait(self._running, return_when=FIRST_COMPLETED)

    def begin(self, node: GraphNode) -> tuple[GraphNode, PipelineContext, Sequence[object], bool]:
        """Take a node from those that are left; return the arguments of ``Graph.call``."""
        self._on_node(node)
        self._left.remove(node)
        self._may_stop = self._may_stop and node.role not in CHANGES
        return node, self._context, self._outputs.of(node), self._may_stop

    def end(self, node: GraphNode, value: object, found: Metrics) -> None:
        """Keep what a node has returned."""
        self._outputs.add(node, value)
        self.found[node.name] = found

    def _submit(self, node: GraphNode) -> None:
        """Run a node in a thread."""
        self._threads = self._threads or ThreadPoolExecutor(len(self._graph.nodes), "node")
        self._begun[node.name] = self.begin(node)
        self._running[self._threads.submit(self._call, node.name)] = node

    def _call(self, name: str) -> None:
        # Neither inputs nor outputs pass through the future, in whose thread they would outlive their last reader.
        self._results[name] = self._graph.call(*self._begun.pop(name))

    def _collect(self) -> None:
        """End the nodes whose threads have ended; raises the error of one."""
        for future in [future for future in self._running if future.done()]:
            node = self._running.pop(future)
            future.result()
            self.end(node, *self._results.pop(node.name))


class _Outputs:
    """Outputs of nodes, each kept until the last node that takes it as input has run.

    Args:
        nodes: nodes in execution order.
    """

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        self._waiting = Counter(name for node in nodes for name in node.inputs)
        self._kept: dict[str, object] = {}

    def of(self, node: GraphNode) -> list[object]:
        """Return the inputs of a node, and drop the ones that no later node needs."""
        found = [self._kept[name] for name in node.inputs]
        for name in node.inputs:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._kept[name]
        return found

    def add(self, node: GraphNode, value: object) -> None:
        """Keep the output of a node if another node needs it."""
        if self._waiting[node.name]:
            self._kept[node.name] = value


def _guarded(node: GraphNode) -> AbstractContextManager[object]:
    return nullcontext() if node.label.startswith("embodrl.") else guard_user_code(node.label)
