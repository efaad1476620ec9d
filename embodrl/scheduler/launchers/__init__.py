"""Ways to bring up the workers of a group, by name."""

from __future__ import annotations

from embodrl.registry import Entry, Registry

LAUNCHERS = Registry("launcher", Entry, "embodrl.launchers")
LAUNCHERS.add(
    "inline", "embodrl.scheduler.launchers.inline:InlineLauncher", "all in this process, one after the other; to debug"
)
LAUNCHERS.add(
    "process", "embodrl.scheduler.launchers.process:ProcessLauncher", "a process each on this machine, shared memory"
)
