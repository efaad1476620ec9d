"""For tests of one's own code."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from embodrl.api import ConfigLike, configured
from embodrl.session import started

if TYPE_CHECKING:
    from embodrl.pipelines.context import PipelineContext


@contextmanager
def context(config: ConfigLike = None, overrides: Sequence[str] = ()) -> Iterator[PipelineContext]:
    """Yield what the nodes of a pipeline get, with started simulators, rollouts and engine, to test a node by itself.

    >>> from embodrl import testing                                         # doctest: +SKIP
    >>> from embodrl.pipelines import nodes                                 # doctest: +SKIP
    >>> with testing.context(["env=toy", "model=mlp"]) as context:          # doctest: +SKIP
    ...     batch, metrics = nodes.rollout(context)
    ...     shaped, found = my_module.shape_rewards(context, batch)

    Args:
        config: as for ``embodrl.load_config``; ``runner.output_dir=auto`` is a temporary directory.
        overrides: as for ``embodrl.load_config``.

    Raises:
        EmbodrlError: the configuration is invalid, or a requirement is missing.
    """
    loaded = configured(config, overrides, "train").with_absolute_paths()
    with ExitStack() as closing:
        if loaded.config.runner.output_dir == "auto":
            directory = closing.enter_context(tempfile.TemporaryDirectory(prefix="embodrl-"))
            runner = loaded.config.runner.model_copy(update={"output_dir": directory})
            loaded = loaded.with_config(loaded.config.model_copy(update={"runner": runner}))
        yield closing.enter_context(started(loaded)).open_iteration(0)
