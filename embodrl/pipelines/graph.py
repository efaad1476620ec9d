"""The training loop as a graph: nodes, and the assembly of pipelines.

Imports no torch, since pipelines are checked together with the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, cast

from embodrl.errors import EmbodrlError, PipelineError, PipelineProblem
from embodrl.names import import_function
from embodrl.pipelines.checks import NodeSpec, check_nodes, inputs_of, resolve, sorted_names, upstream


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

    def is_importable(self, name: str) -> bool:
        """Return whether the function of a node can be imported by its name."""
        try:
            fn, label = resolve(self._specs[name].fn)
            return import_function(label) is fn
        except EmbodrlError:
            return False

    def is_built_in(self, name: str) -> bool:
        """Return whether a node is one of embodrl's own."""
        try:
            return resolve(self._specs[name].fn)[1].startswith("embodrl.")
        except EmbodrlError:
            return False  # reported by the checks of nodes

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
    """A checked pipeline, made by ``Pipeline.build``; ``walk.Walk`` runs it.

    Attributes:
        nodes: nodes in execution order.
    """

    name: str
    nodes: tuple[GraphNode, ...]
