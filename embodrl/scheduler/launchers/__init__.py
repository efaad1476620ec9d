"""Ways to bring up the workers of a group, by name."""

from __future__ import annotations

from embodrl.registry import Registry

LAUNCHERS = Registry("launcher")
LAUNCHERS.register(
    "inline", "embodrl.scheduler.launchers.inline:InlineLauncher", "all in this process, one after the other; to debug"
)
LAUNCHERS.register(
    "process", "embodrl.scheduler.launchers.process:ProcessLauncher", "a process each on this machine, shared memory"
)
LAUNCHERS.register("ray", "embodrl.scheduler.launchers.ray:RayLauncher", "Ray actors, on several machines")
