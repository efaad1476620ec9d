"""Which graph an iteration walks; whether it can run is a rule of ``embodrl.pipelines``."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.presets import of_algorithm
from embodrl.config.rules.base import Context, rule
from embodrl.names import is_misspelt, nearest
from embodrl.rule_set import Finding
from embodrl.specs import PIPELINES


@rule("pipeline")
def name_or_function(context: Context) -> Iterator[Finding]:
    """A built-in pipeline and a custom one exclude each other."""
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
        hint = f"write pipeline={near}" if is_misspelt(name, near) else "see `embodrl list pipelines`"
        near, hint = of_algorithm(name) or (near, hint)
        yield Finding("pipeline.name", f"there is no pipeline '{name}'", hint, ", ".join(PIPELINES), near)
