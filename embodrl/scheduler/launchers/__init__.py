"""Ways to bring up the workers of a group, by name."""

from __future__ import annotations

from embodrl.registry import Entry, Registry

INLINE = Entry(
    name="inline",
    target="embodrl.scheduler.launchers.inline:InlineLauncher",
    description="all in this process, one after the other; to debug",
)
PROCESS = Entry(
    name="process",
    target="embodrl.scheduler.launchers.process:ProcessLauncher",
    description="a process each on this machine, shared memory",
)
RAY = Entry(
    name="ray",
    target="embodrl.scheduler.launchers.ray.launcher:RayLauncher",
    description="Ray actors, on several machines",
)
BUILT_IN = {name: f"{__name__}:{name.upper()}" for name in ("inline", "process", "ray")}
LAUNCHERS = Registry("launcher", Entry, "embodrl.launchers", BUILT_IN)
