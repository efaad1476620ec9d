"""The graph that an iteration walks: which one, and whether it can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from embodrl.config.rules.base import Context, Finding, rule
from embodrl.config.schema import Config
from embodrl.errors import PipelineProblem
from embodrl.names import import_object, nearest
from embodrl.registry import ADVANTAGES, PIPELINES

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
        near = nearest(name, PIPELINES.names())
        hint = f"write pipeline={near}" if near else "see `embodrl list pipelines`"
        yield Finding("pipeline.name", f"there is no pipeline '{name}'", hint, ", ".join(PIPELINES), near)


def misnamed(config: Config) -> tuple[str, str, str] | None:
    """Return the key that is not what the pipeline's name says, what it would be, and what it is; None if it is."""
    name = config.pipeline.name
    key, value = (
        PIPELINES.entry(name).facts.get("setting", ("", None)) if name is not None and name in PIPELINES else ("", None)
    )
    if not key:
        return None
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    # An estimator from elsewhere may stand in for a built-in one.
    settings = [PIPELINES.entry(known).facts.get("setting") for known in PIPELINES]
    if found == value or (key == "algorithm.adv_type" and (key, found) not in settings):
        return None
    wanted, shown = (str(x).lower() if isinstance(x, bool) else str(x) for x in (value, found))
    return key, wanted, shown


@rule("pipeline.name", "algorithm")
def name_fits_the_algorithm(context: Context) -> Iterator[Finding]:
    """A pipeline named after an algorithm has that algorithm's settings."""
    name, wrong = context.config.pipeline.name, misnamed(context.config)
    if wrong is not None:
        key, wanted, found = wrong
        message = f"the pipeline '{name}' belongs to {key}={wanted}, and it is {found}"
        hint = f"choose algorithm={name}, which pipeline={name} does by itself, or leave the pipeline out"
        yield Finding("pipeline.name", message, hint, others=(key,))


@rule("pipeline", "algorithm", "reward")
def graph_is_sound(context: Context) -> Iterator[Finding]:
    """The graph can be built, and has the nodes that the other settings need."""
    config = context.config
    pipeline = config.pipeline
    both = pipeline.name is not None and pipeline.fn is not None
    unknown = pipeline.name is not None and pipeline.name not in PIPELINES
    if both or unknown or misnamed(config) is not None or config.algorithm.adv_type not in ADVANTAGES:
        return  # have rules of their own
    key = "pipeline.name" if pipeline.fn is None else "pipeline.fn"
    problems: list[PipelineProblem] = import_object(FIND_PROBLEMS)(config)
    for problem in problems:
        yield Finding(key, str(problem), problem.hint, code=problem.code)
