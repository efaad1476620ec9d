"""Workflows as coroutines."""

from __future__ import annotations

from embodrl.specs import WorkflowRunnerSpec

RUNNER = WorkflowRunnerSpec(
    name="coroutines",
    target="embodrl.extras.workflows.runner:WorkflowRunner",
    description="all episodes of a group at the same time, as coroutines",
    collector="embodrl.extras.workflows.runner:WorkflowCollector",
)
