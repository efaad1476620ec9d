"""The execution of a graph: a walk over its nodes, all at once or step by step."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from embodrl.errors import EmbodrlError, PipelineError, user_location
from embodrl.pipelines.checks import BESIDE, CHANGES
from embodrl.pipelines.outcomes import Metrics, described, outcome_of, shared
from embodrl.processes.trace import record
from embodrl.user_code import guard_user_code

if TYPE_CHECKING:
    from embodrl.pipelines.context import PipelineContext
    from embodrl.pipelines.graph import Graph, GraphNode

logger = logging.getLogger(__name__)

RETRIES = "pipeline/retries"


class Walk:
    """One walk over a graph; leaving its block waits for the nodes in threads, also after an error.

    >>> with Walk(graph, context, on_node) as walk:                         # doctest: +SKIP
    ...     while (node := walk.next()) is not None:
    ...         walk.end(node, *walk.begin(node).call())

    Nodes with a role of ``BESIDE`` run in threads beside all others that do not depend on them. An output is kept
    until its last dependent node has begun.

    Args:
        graph: its nodes are run.
        context: passed to every node.
        on_node: called before each node, in the thread of the walk.
    """

    def __init__(self, graph: Graph, context: PipelineContext, on_node: Callable[[GraphNode], None]) -> None:
        self._graph = graph
        self._context = context
        self._on_node = on_node
        self._found: dict[str, Metrics] = {}
        self._outputs = _Outputs(graph.nodes)
        self._left = list(graph.nodes)
        self._running: dict[Future[None], GraphNode] = {}
        self._begun: dict[str, BegunNode] = {}
        self._results: dict[str, tuple[object, Metrics]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._may_stop = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def next(self) -> GraphNode | None:
        """Return the next node for this thread, once threads have those that may run beside it; None at the end.

        Raises:
            InterruptedError, EmbodrlError, PipelineError: as ``BegunNode.call``, of a node in a thread.
        """
        while True:
            self._collect()
            begun = [*self._running.values()]
            ready = [
                node for node in self._left if node not in begun and all(name in self._found for name in node.deps)
            ]
            if len(ready) + len(self._running) > 1:
                for node in (node for node in ready if node.role in BESIDE):
                    self._submit(node)
                ready = [node for node in ready if node.role not in BESIDE]
            if ready or not self._running:
                return ready[0] if ready else None
            wait(self._running, return_when=FIRST_COMPLETED)

    def begin(self, node: GraphNode, inputs: Sequence[object] | None = None) -> BegunNode:
        """Begin the node that ``next`` has returned.

        Args:
            node: the next node.
            inputs: in place of the outputs of the nodes that it depends on; None for those.
        """
        self._on_node(node)
        self._may_stop = self._may_stop and node.role not in CHANGES
        outputs = self._outputs.of(node)
        return BegunNode(self._graph.name, node, self._context, outputs if inputs is None else inputs, self._may_stop)

    def end(self, node: GraphNode, value: object, metrics: Metrics) -> None:
        """Keep what a node has returned; until then it may begin again, with inputs of the caller's."""
        self._left.remove(node)
        self._outputs.add(node, value)
        self._found[node.name] = metrics

    def skip(self, node: GraphNode) -> None:
        """Leave out the node that ``next`` has returned; ``begin`` is given the inputs of its dependents."""
        self._left.remove(node)
        self._outputs.of(node)
        self._found[node.name] = {}

    def metrics(self) -> Metrics:
        """Return the metrics of the nodes so far, in their order (for duplicates, the last).

        With ``time/<node>_s`` of each, and the number of retries if any node may be retried.
        """
        metrics: Metrics = {}
        retries = 0.0
        for node in self._graph.nodes:
            found = dict(self._found.get(node.name, {}))
            retries += found.pop(RETRIES, None) or 0.0
            metrics |= found
        return metrics | ({RETRIES: retries} if any(node.retries for node in self._graph.nodes) else {})

    def _submit(self, node: GraphNode) -> None:
        """Run a node in a thread."""
        self._threads = self._threads or ThreadPoolExecutor(len(self._graph.nodes), "node")
        self._begun[node.name] = self.begin(node)
        self._running[self._threads.submit(self._call, node.name)] = node

    def _call(self, name: str) -> None:
        # Neither inputs nor outputs pass through the future, in whose thread they would outlive their last reader.
        self._results[name] = self._begun.pop(name).call()

    def _collect(self) -> None:
        """End the nodes whose threads have ended; raises the error of one."""
        for future in [future for future in self._running if future.done()]:
            node = self._running.pop(future)
            future.result()
            self.end(node, *self._results.pop(node.name))


@dataclass(frozen=True)
class BegunNode:
    """A node whose turn it is, and its inputs.

    Attributes:
        pipeline: name of its pipeline, for messages.
        may_stop: nothing has been learned yet, so that it may be interrupted.
    """

    pipeline: str
    node: GraphNode
    context: PipelineContext
    inputs: Sequence[object]
    may_stop: bool

    def call(self) -> tuple[object, Metrics]:
        """Run the node with its retries; return its output, and its metrics.

        Raises:
            InterruptedError: it was interrupted before the training node; nothing has been learned.
            EmbodrlError: the node raised it in every attempt; the message names the node and its inputs.
            PipelineError: the node raised anything else, was interrupted after training had begun, or returned
                invalid metrics.
        """
        node = self.node
        clock = time.perf_counter()
        attempts = 0
        while True:
            try:
                with _guarded(node):
                    result = node.fn(self.context, *map(shared, self.inputs))
                break
            except Exception as error:  # noqa: BLE001  a user's node may raise anything
                attempts += 1
                self._tried(error, attempts)
        value, found = _outcome(node, self.pipeline, result)
        now = time.perf_counter()
        record(node.name, clock, now)
        found |= {f"time/{node.name}_s": now - clock}
        return value, found | ({RETRIES: float(attempts)} if node.retries else {})

    def _tried(self, error: Exception, attempts: int) -> None:
        """Return if the node, which has raised, may be retried."""
        node = self.node
        interrupted = isinstance(error, InterruptedError)
        if interrupted and self.may_stop:
            raise error
        if interrupted or attempts > node.retries:
            raise self._failure(error, attempts) from error
        of = f"attempt {attempts} of {node.retries + 1}"
        logger.warning("node '%s' failed (%s): %s: %s", node.name, of, type(error).__name__, error)

    def _failure(self, error: Exception, attempts: int) -> EmbodrlError:
        """Return the error of the node with its name, its inputs, and the cause."""
        node = self.node
        where = f"in node '{node.name}' ({node.label}) of the pipeline '{self.pipeline}'"
        where += f", after {attempts} attempts" if attempts > 1 else ""
        pairs = [f"\n    {name}: {described(value)}" for name, value in zip(node.inputs, self.inputs, strict=True)]
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


def _outcome(node: GraphNode, pipeline: str, result: object) -> tuple[object, Metrics]:
    if node.role in CHANGES and isinstance(result, dict):
        result = None, cast(dict[str, object], result)
    try:
        return outcome_of(result)
    except TypeError as error:
        message = f"node '{node.name}' ({node.label}) of the pipeline '{pipeline}' returned {error}"
        raise PipelineError(
            message, "return value, (value, {name: number}) or None", code="pipeline-node-result"
        ) from error


def _guarded(node: GraphNode) -> AbstractContextManager[object]:
    return nullcontext() if node.label.startswith("embodrl.") else guard_user_code(node.label)


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
        found = [self._kept.get(name) for name in node.inputs]
        for name in node.inputs:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                self._kept.pop(name, None)
        return found

    def add(self, node: GraphNode, value: object) -> None:
        """Keep the output of a node if another node needs it."""
        if self._waiting[node.name]:
            self._kept[node.name] = value
