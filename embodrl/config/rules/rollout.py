"""Rollouts: workflows and backends."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, rule
from embodrl.errors import EmbodrlError
from embodrl.names import import_workflow
from embodrl.rule_set import Finding

KEY = "rollout.workflow"
BACKEND = "rollout.backend"
NATIVE = "set rollout.backend=native"


@rule(KEY)
def workflow_exists(context: Context) -> Iterator[Finding]:
    """The workflow can be imported and constructed."""
    path = context.config.rollout.workflow
    if path is not None:
        try:
            import_workflow(path)
        except EmbodrlError as error:
            hint = error.hint or "put the module's directory on PYTHONPATH, or correct the name"
            yield Finding(KEY, error.message, hint, "module:Class, or null")


@rule(KEY, "env.train.auto_reset", "rollout.pipeline_stages", "runner.max_staleness")
def workflows_play_single_episodes(context: Context) -> Iterator[Finding]:
    """A workflow starts and ends episodes itself, each in a waiting environment."""
    config = context.config
    if config.rollout.workflow is None or context.verb == "eval":  # which starts all episodes itself
        return
    if config.env.train.auto_reset:
        message = "a workflow starts episodes itself, but the environments would start the next ones on their own"
        yield Finding("env.train.auto_reset", message, "set env.train.auto_reset=false", "false", others=(KEY,))
    if config.rollout.pipeline_stages > 1 and config.runner.max_staleness == 0:
        message = f"{config.rollout.pipeline_stages} stages have no effect on workflow episodes without staleness"
        hint = "set rollout.pipeline_stages=1, or runner.max_staleness to 1 or more"
        yield Finding("rollout.pipeline_stages", message, hint, "1", others=(KEY, "runner.max_staleness"))
