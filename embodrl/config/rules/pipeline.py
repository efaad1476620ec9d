"""The graph that an iteration walks: which one, and whether it can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from embodrl.config.rules.base import Context, Finding, rule
from embodrl.errors import PipelineProblem
from embodrl.registry import ADVANTAGES, PIPELINES, import_object, nearest

# By name, as models are: the graph is built from layers above this one.
FIND_PROBLEMS = "embodrl.pipelines.select:find_problems"


@rule("pipeline")
def name_or_function(context: Context) -> Iterator[Finding]:
    """A built-in pipeline and one of yours exclude each other."""
    pipeline = context.config.pipeline
    if pipeline.name is not None and pipeline.fn is not None:
        message = f"'{pipeline.fn}' and the built-in pipeline '{pipeline.name}' exclude each other"
        yield Finding("pipeline.fn", message, "leave one of the two out", "null", others=("pipeline.name",))


@rule("pipeline.name")
def pipeline_is_registered(context: Context) -> Iterator[Finding]:
    """The pipeline's name is in the registry."""
    name = context.config.pipeline.name
    if name is not None and name not in PIPELINES:
        hint = nearest(name, PIPELINES.names())
        remedy = f"write pipeline={hint}" if hint else "see `embodrl list pipelines`"
        yield Finding("pipeline.name", f"there is no pipeline '{name}'", remedy, ", ".join(PIPELINES), hint)


@rule("pipeline.name", "algorithm")
def name_fits_the_algorithm(context: Context) -> Iterator[Finding]:
    """A pipeline named after an algorithm has that algorithm's settings."""
    name = context.config.pipeline.name
    if name is None or name not in PIPELINES:
        return
    key, value = PIPELINES.entry(name).facts.get("setting", ("", None))
    if not key:
        return
    found: Any = context.config
    for part in key.split("."):
        found = getattr(found, part)
    if found != value and not (key == "algorithm.adv_type" and ":" in found):
        wanted, shown = (str(x).lower() if isinstance(x, bool) else x for x in (value, found))
        message = f"the pipeline '{name}' belongs to {key}={wanted}, and it is {shown}"
        remedy = f"choose algorithm={name}, which pipeline={name} does by itself, or leave the pipeline out"
        yield Finding("pipeline.name", message, remedy, others=(key,))


@rule("pipeline", "algorithm", "reward")
def graph_is_sound(context: Context) -> Iterator[Finding]:
    """The graph can be built, and has the nodes that the other settings need."""
    config = context.config
    pipeline = config.pipeline
    if (pipeline.name is not None and pipeline.fn is not None) or config.algorithm.adv_type not in ADVANTAGES:
        return  # have rules of their own
    if pipeline.name is not None and pipeline.name not in PIPELINES:
        return
    key = "pipeline.name" if pipeline.fn is None else "pipeline.fn"
    problems: list[PipelineProblem] = import_object(FIND_PROBLEMS)(config)
    for problem in problems:
        yield Finding(key, str(problem), problem.remedy)
