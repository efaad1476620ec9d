"""Which graph an iteration walks; whether it can run is a rule of ``embodrl.pipelines``."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, Finding, rule, value_of
from embodrl.config.schema import Config
from embodrl.names import nearest
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
        hint = f"write pipeline={near}" if near else "see `embodrl list pipelines`"
        yield Finding("pipeline.name", f"there is no pipeline '{name}'", hint, ", ".join(PIPELINES), near)


def misnamed(config: Config) -> tuple[str, str, str] | None:
    """Return the key that is not what the pipeline's name says, what it would be, and what it is; None if it is."""
    name = config.pipeline.name
    setting = PIPELINES.entry(name).setting if name is not None and name in PIPELINES else None
    if setting is None:
        return None
    (key, value) = setting
    found = value_of(config, setting[0])
    # An estimator from elsewhere may stand in for a built-in one.
    settings = [spec.setting for spec in PIPELINES.all()]
    if found == value or (key == "algorithm.adv_type" and (key, found) not in settings):
        return None
    wanted, shown = (str(x).lower() if isinstance(x, bool) else str(x) for x in (value, found))
    return key, wanted, shown


@rule("pipeline.name", "algorithm")
def name_fits_the_algorithm(context: Context) -> Iterator[Finding]:
    """A pipeline named after an algorithm has that algorithm's settings."""
    name = context.config.pipeline.name
    wrong = misnamed(context.config)
    if wrong is not None:
        key, wanted, found = wrong
        message = f"the pipeline '{name}' belongs to {key}={wanted}, and it is {found}"
        hint = f"choose algorithm={name}, which pipeline={name} does by itself, or leave the pipeline out"
        yield Finding("pipeline.name", message, hint, others=(key,))
