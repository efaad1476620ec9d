"""Nodes of a pipeline in processes of their own (``pipeline.placement``)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.deployment import Deployment, ProcessPlace
from embodrl.deployment.solver import node_component
from embodrl.errors import PipelineError, WorkerDied
from embodrl.names import import_function
from embodrl.pipelines.context import PipelineContext
from embodrl.pipelines.graph import Graph, GraphNode
from embodrl.pipelines.outcomes import Metrics, described, outcome_of
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.worker import Arguments, Worker, dispatch


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
    return [batch[start:end] for start, end in itertools.pairwise(_ends(len(batch), size))]


def _ends(rows: int, size: int) -> list[int]:
    """Return where the shares of ``size`` processes begin and end."""
    return [rows * rank // size for rank in range(size + 1)]


class NodeProcess(Worker):
    """Runs the function of a node on its share of the environments."""

    def __init__(self, config: Config, label: str, num_threads: int) -> None:
        self.config = config
        self.fn: Callable[..., object] = import_function(label)
        torch.set_num_threads(num_threads)

    @dispatch(shares)
    def run_node(self, iteration: int, *inputs: object) -> tuple[object, Metrics]:
        """Return the node's value and metrics; what it draws follows from seed, iteration and rank."""
        seed = int(np.random.SeedSequence([self.config.runner.seed, iteration, self.rank]).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)
        context = NodeContext(self.config, iteration, self.rank, self.world_size)
        return outcome_of(self.fn(context, *inputs))


class PlacedNode:
    """The function of a node that runs in processes, which start with its first call.

    A lost process fails the call; another attempt (``retries``) starts all of them again.

    Args:
        group: the processes, not launched yet.
        places: of the processes.
        log_dir: directory of their output.
    """

    def __init__(self, group: WorkerGroup, places: Sequence[ProcessPlace], log_dir: Path) -> None:
        self._group = group
        self._places = places
        self._log_dir = log_dir

    def __call__(self, context: PipelineContext, *inputs: object) -> tuple[object, Metrics]:
        """Return the joined value of all processes, and the means of their metrics, weighted by rows.

        Raises:
            PipelineError: an input can't be shared out, or the values can't be joined.
            WorkerError: the function raised in a process, or one has died.
        """
        name = self._group.name
        if strange := [
            value for value in inputs if not (value is None or isinstance(value, Batch | bool | int | float))
        ]:
            raise PipelineError(
                f"{name} gets {described(strange[0])}, which can't be shared out among processes",
                "take batches, numbers or None from the nodes before; run this node in the main process",
                code="pipeline-node-input",
            )
        if not self._group.world_size:
            self._group.launch(self._places, "process", log_dir=self._log_dir)
        try:
            found: list[tuple[object, Metrics]] = self._group.run_node(context.iteration, *inputs).result()
        except WorkerDied:
            self._group.kill()
            raise
        rows = next((len(value) for value in inputs if isinstance(value, Batch)), 0)
        weights = np.diff(_ends(rows, len(found))) if rows else np.ones(len(found))
        metrics = _means([metrics for _, metrics in found], weights.tolist())
        return _joined(name, [value for value, _ in found]), metrics

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
        f"the processes of {node} returned {', '.join(map(described, values))}",
        "return a batch, whose rows are joined, or None",
        code="pipeline-node-result",
    )


def _means(found: Sequence[Metrics], weights: Sequence[float]) -> Metrics:
    """Return the weighted mean of each metric over the processes that know it."""
    known: dict[str, list[tuple[float, float]]] = {}
    for metrics, weight in zip(found, weights, strict=True):
        for name, value in metrics.items():
            known.setdefault(name, []).extend([] if value is None else [(value, weight)])
    return {
        name: sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs) if pairs else None
        for name, pairs in known.items()
    }


def with_placed_nodes(graph: Graph, config: Config, deployment: Deployment, log_dir: Path, closing: ExitStack) -> Graph:
    """Return a graph whose nodes in ``pipeline.placement`` run in processes.

    Args:
        graph: graph of the run.
        config: run configuration.
        deployment: placement of the run.
        log_dir: directory of the processes' output.
        closing: ends them.
    """
    nodes: list[GraphNode] = []
    for node in graph.nodes:
        if places := deployment.of(node_component(node.name)):
            threads = config.cluster.num_threads or max(1, deployment.num_cpus // len(places))
            group = WorkerGroup(
                NodeProcess, node_component(node.name), config=config, label=node.label, num_threads=threads
            )
            placed = PlacedNode(group, places, log_dir)
            closing.callback(placed.close)
            node = replace(node, fn=placed)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
