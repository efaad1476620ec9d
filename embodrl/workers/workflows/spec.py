"""Workflows as coroutines."""

from __future__ import annotations

from embodrl.specs import WorkflowRunnerSpec

RUNNER = WorkflowRunnerSpec(
    name="coroutines",
    target="embodrl.workers.workflows.runner:WorkflowRunner",
    description="all episodes of a group concurrently, as coroutines",
    collector="embodrl.workers.workflows.runner:WorkflowCollector",
    evaluator="embodrl.workers.workflows.evaluator:WorkflowEvaluator",
)
