"""Scripted experts: privileged controllers that demonstrate tasks."""

from __future__ import annotations

from embodrl.envs.experts.base import Expert
from embodrl.envs.maniskill import experts, tool_experts
from embodrl.errors import EnvError

EXPERTS = {**experts.EXPERTS, **tool_experts.EXPERTS}


def make_expert(task: str) -> Expert:
    """Return a new expert for one episode of a task; EnvError if the task has none."""
    if task not in EXPERTS:
        raise EnvError(
            f"there is no scripted expert for '{task}'", f"choose one of {', '.join(EXPERTS)}", code="expert-missing"
        )
    return EXPERTS[task]()


__all__ = ["EXPERTS", "Expert", "make_expert"]
