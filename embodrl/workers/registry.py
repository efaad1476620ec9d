"""Registered runners of workflow episodes."""

from __future__ import annotations

WORKFLOW_RUNNERS = {"coroutines": "embodrl.workers.workflows.spec:RUNNER"}
