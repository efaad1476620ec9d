"""What plays the episodes of workflows."""

from __future__ import annotations

WORKFLOW_RUNNERS = {"coroutines": "embodrl.workers.workflows.spec:RUNNER"}
