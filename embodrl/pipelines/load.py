"""Load the configuration of a run: rules of the configuration and of the pipeline, in one report."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from embodrl.config import load as config_load
from embodrl.config.load import LoadedConfig
from embodrl.config.schema import Config
from embodrl.config.schema.readers import Verb
from embodrl.errors import EmbodrlError
from embodrl.pipelines.graph import Graph
from embodrl.pipelines.select import PipelineCheck, build_graph

GRAPH_SECTIONS = ("pipeline", "algorithm", "reward")
"""Sections that a pipeline depends on."""
LEAST_ADDRESS_SPACE = 2 * 2**30
"""Bytes that the smallest run needs, measured with env=toy: 1.5 GB are too few, 2.0 GB are enough. With less, native
code ends the process on a failed allocation, before Python can report it.
"""


@dataclass
class LoadedRun(LoadedConfig):
    """A valid configuration with the graph that was built to check it.

    Attributes:
        graph: None if the verb runs none.
    """

    graph: Graph | None = None

    def with_config(self, config: Config) -> Self:
        """As in ``LoadedConfig``; the graph is kept while the settings it depends on are unchanged."""
        loaded = super().with_config(config)
        if any(getattr(config, name) != getattr(self.config, name) for name in GRAPH_SECTIONS):
            loaded.graph = None
        return loaded


def load_config(
    overrides: list[str],
    config_file: Path | Mapping[str, object] | None = None,
    verb: Verb | None = None,
    trust: bool = False,
    made_before: tuple[str, ...] = (),
) -> LoadedRun:
    """Like ``embodrl.config.load_config``, and build the pipeline; imports no torch.

    Raises:
        ConfigError: lists every problem.
        EmbodrlError: the shell limits memory to less than any run needs.
    """
    _check_address_space(verb)
    check = PipelineCheck()
    loaded = config_load.load_config(overrides, config_file, verb, (check.rule,), trust, made_before)
    return _with_graph(loaded, check)


def load_run(
    path: Path,
    overrides: list[str] | None = None,
    verb: Verb | None = None,
    resuming: bool = False,
    trust: bool = False,
    text: str | None = None,
) -> LoadedRun:
    """Like ``embodrl.config.load_run``, and build the pipeline.

    Raises:
        ConfigError: lists every problem.
        EmbodrlError: the shell limits memory to less than any run needs.
    """
    _check_address_space(verb)
    check = PipelineCheck()
    return _with_graph(config_load.load_run(path, overrides, verb, resuming, (check.rule,), trust, text), check)


def _check_address_space(verb: Verb | None) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if verb in (None, "plan") or limit == resource.RLIM_INFINITY or limit >= LEAST_ADDRESS_SPACE:
        return
    raise EmbodrlError(
        f"the shell limits virtual memory to {limit / 2**30:.2f} GiB; a run needs {LEAST_ADDRESS_SPACE / 2**30:.0f} GiB"
        " at least",
        "raise the limit: ulimit -v unlimited",
        code="memory-limit",
    )


def _with_graph(loaded: LoadedConfig, check: PipelineCheck) -> LoadedRun:
    return LoadedRun(**{each.name: getattr(loaded, each.name) for each in fields(loaded)}, graph=check.graph)


def graph_of(loaded: LoadedConfig) -> Graph:
    """Return the graph built when the configuration was checked; built now if there is none.

    Raises:
        PipelineError: lists every problem.
    """
    graph = loaded.graph if isinstance(loaded, LoadedRun) else None
    return build_graph(loaded.config) if graph is None else graph
