"""Nodes of a pipeline in processes of their own (``pipeline.placement``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.deployment import Deployment, ProcessPlace
from embodrl.deployment.nodes import node_places
from embodrl.errors import PipelineError, WorkerDied
from embodrl.names import import_function
from embodrl.pipelines.context import PipelineContext
from embodrl.pipelines.graph import Graph, GraphNode
from embodrl.pipelines.outcomes import Metrics, described, outcome_of
from embodrl.processes.liveness import Limits
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.launchers.base import Launcher
from embodrl.scheduler.worker import Arguments, Worker, dispatch
from embodrl.specs import LAUNCHERS


@dataclass(frozen=True)
class NodeContext:
    """What a node in a process of its own gets in place of a ``PipelineContext``.

    Attributes:
        config: run configuration.
        iteration: updates done so far.
        rank: number of the process, from 0.
        world_size: number of the node's processes.
    """

    config: Config
    iteration: int
    rank: int
    world_size: int


def shares(size: int, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Arguments | None]:
    """Split batches by environments, as evenly as possible, for ``size`` processes; other arguments go to all."""
    split = [_slices(value, size) if isinstance(value, Batch) else [value] * size for value in args]
    return [(tuple(parts[rank] for parts in split), kwargs) for rank in range(size)]


def _slices(batch: Batch, size: int) -> list[Batch]:
    ends = [len(batch) * rank // size for rank in range(size + 1)]
    return [batch[start:end] for start, end in itertools.pairwise(ends)]


class NodeProcess(Worker):
    """Runs the function of a node on its share of the environments."""

    def __init__(self, config: Config, label: str) -> None:
        self.config = config
        self.fn: Callable[..., object] = import_function(label)

    @dispatch(shares)
    def run_node(self, iteration: int, *inputs: object) -> tuple[object, Metrics]:
        """Return the node's value and metrics."""
        context = NodeContext(self.config, iteration, self.rank, self.world_size)
        return outcome_of(self.fn(context, *inputs))


class PlacedNode:
    """The function of a node that runs in processes, which start with its first call.

    A lost process fails the call; another attempt (``retries``) starts all of them again.
    """

    def __init__(
        self, config: Config, label: str, places: Sequence[ProcessPlace], launcher: Launcher, log_dir: Path
    ) -> None:
        self._name = places[0].component
        self._places = places
        self._launcher = launcher
        self._log_dir = log_dir
        self._group = WorkerGroup(NodeProcess, f"node_{self._name}", config=config, label=label)

    def __call__(self, context: PipelineContext, *inputs: object) -> tuple[object, Metrics]:
        """Return the joined value of all processes, and the means of their metrics.

        Raises:
            PipelineError: the values can't be joined.
            WorkerError: the function raised in a process, or one has died.
        """
        if not self._group.world_size:
            self._group.launch(self._places, self._launcher, log_dir=self._log_dir)
        try:
            found: list[tuple[object, Metrics]] = self._group.run_node(context.iteration, *inputs).result()
        except WorkerDied:
            self._group.kill()
            raise
        return _joined(self._name, [value for value, _ in found]), _means([metrics for _, metrics in found])

    def close(self) -> None:
        """End the processes."""
        self._group.close()


def _joined(node: str, values: Sequence[object]) -> object:
    if all(value is None for value in values):
        return None
    batches = [value for value in values if isinstance(value, Batch)]
    if len(batches) == len(values):
        return type(batches[0]).concat(batches)
    raise PipelineError(
        f"the processes of node '{node}' returned {', '.join(map(described, values))}",
        "return a batch, whose rows are joined, or None",
        code="pipeline-node-result",
    )


def _means(found: Sequence[Metrics]) -> Metrics:
    """Return the mean of each metric over the processes that know it."""
    known: dict[str, list[float]] = {}
    for metrics in found:
        for name, value in metrics.items():
            known.setdefault(name, []).extend([] if value is None else [value])
    return {name: sum(values) / len(values) if values else None for name, values in known.items()}


def with_placed_nodes(graph: Graph, config: Config, deployment: Deployment, log_dir: Path, closing: ExitStack) -> Graph:
    """Return a graph whose nodes in ``pipeline.placement`` run in processes.

    Args:
        graph: graph of the run.
        config: run configuration.
        deployment: placement of the run.
        log_dir: directory of the processes' output.
        closing: ends them.

    Raises:
        EmbodrlError: the launcher lacks a requirement or a resource.
    """
    names = [node.name for node in graph.nodes if node.name in config.pipeline.placement]
    places = {name: node_places(config, name, deployment) for name in names}
    limits = Limits(config.cluster.heartbeat_timeout_s, config.cluster.stall_timeout_s)
    start = cast("type[Launcher]", LAUNCHERS.get(config.cluster.launcher))
    launcher = start.for_run([place for found in places.values() for place in found], None, config.cluster, limits)
    closing.callback(launcher.close)
    nodes: list[GraphNode] = []
    for node in graph.nodes:
        if node.name in places:
            placed = PlacedNode(config, node.label, places[node.name], launcher, log_dir)
            closing.callback(placed.close)
            node = replace(node, fn=placed)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
