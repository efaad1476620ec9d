"""Workflows: how episodes are played."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, Finding, rule
from embodrl.errors import EmbodrlError
from embodrl.registry import import_workflow

KEY = "rollout.workflow"


@rule(KEY)
def workflow_exists(context: Context) -> Iterator[Finding]:
    """The workflow can be imported and made."""
    path = context.config.rollout.workflow
    if path is not None:
        try:
            import_workflow(path)
        except EmbodrlError as error:
            remedy = error.remedy or "put its directory on PYTHONPATH, or correct the name"
            yield Finding(KEY, error.message, remedy, "module:Class, or null")


@rule(KEY, "env.train.auto_reset", "env.sim_backend", "env.env_type", "rollout.pipeline_stages", "runner.max_staleness")
def workflows_play_single_episodes(context: Context) -> Iterator[Finding]:
    """A workflow begins and ends episodes itself, each in an environment that waits for it."""
    config = context.config
    if config.rollout.workflow is None:
        return
    if config.env.train.auto_reset:
        message = "a workflow begins episodes itself, but the environments would begin the next ones on their own"
        yield Finding("env.train.auto_reset", message, "set env.train.auto_reset=false", "false", others=(KEY,))
    if config.env.env_type == "maniskill" and config.env.sim_backend == "physx_cuda":
        message = "physx_cuda steps all its environments at once, but the episodes of a workflow go their own ways"
        yield Finding("env.sim_backend", message, "set env.sim_backend=physx_cpu", "auto, physx_cpu", others=(KEY,))
    if config.rollout.pipeline_stages > 1 and config.runner.max_staleness == 0:
        message = f"{config.rollout.pipeline_stages} stages have no effect on the episodes of a workflow in turns"
        remedy = "set rollout.pipeline_stages=1, or runner.max_staleness to 1 or more"
        yield Finding("rollout.pipeline_stages", message, remedy, "1", others=(KEY, "runner.max_staleness"))
