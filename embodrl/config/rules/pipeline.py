"""The graph of an iteration; whether it can run is a rule of ``embodrl.pipelines``."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.presets import of_algorithm
from embodrl.config.rules.base import Context, rule
from embodrl.deployment import PlacementError
from embodrl.deployment.solver import node_places
from embodrl.names import is_misspelt, nearest
from embodrl.rule_set import Finding
from embodrl.specs import PIPELINES


@rule("pipeline")
def name_or_function(context: Context) -> Iterator[Finding]:
    """A built-in and a custom pipeline exclude each other."""
    pipeline = context.config.pipeline
    if pipeline.name is not None and pipeline.fn is not None:
        message = f"'{pipeline.fn}' and the built-in pipeline '{pipeline.name}' exclude each other"
        yield Finding("pipeline.fn", message, "remove one of them", "null", others=("pipeline.name",))


@rule("pipeline.name")
def pipeline_is_registered(context: Context) -> Iterator[Finding]:
    """The pipeline's name is registered."""
    name = context.config.pipeline.name
    if name is not None and name not in PIPELINES:
        near = nearest(name, PIPELINES.names())
        hint = f"write pipeline={near}" if is_misspelt(name, near) else "see `embodrl list pipelines`"
        near, hint = of_algorithm(name) or (near, hint)
        yield Finding("pipeline.name", f"no pipeline '{name}'", hint, ", ".join(PIPELINES), near)


@rule("pipeline.placement", "cluster", "env.train.total_num_envs", machine_specific=True)
def placed_nodes_have_devices(context: Context) -> Iterator[Finding]:
    """Nodes are placed on devices that are there, and each of their processes has environments."""
    config = context.config
    deployment = context.deployment
    if deployment is None:
        return
    gpus = [min(len(machine.gpus), deployment.gpus_per_node) for machine in deployment.machines]
    for name in config.pipeline.placement:
        key = f"pipeline.placement.{name}"
        try:
            count = len(node_places(config, name, gpus))
        except PlacementError as error:
            yield Finding(key, str(error), error.hint, error.allowed)
            continue
        if count > config.env.train.total_num_envs:
            message = f"gives {count} processes, and there are {config.env.train.total_num_envs} environments to share"
            yield Finding(key, message, "place fewer", others=("env.train.total_num_envs",))
    if config.pipeline.placement and config.cluster.launcher != "process":
        message = f"the launcher '{config.cluster.launcher}' starts training and rollouts, and no nodes of pipelines"
        hint = "leave pipeline.placement out, or set cluster.launcher=process"
        yield Finding("pipeline.placement", message, hint, others=("cluster.launcher",))
