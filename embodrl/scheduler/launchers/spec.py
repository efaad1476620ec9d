"""The built-in launchers. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from embodrl.config.rules.base import Context
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import LauncherSpec

RAY_RULES = RuleSet()


@RAY_RULES.rule("cluster.launcher", machine_specific=True)
def ray_is_installed(context: Context) -> Iterator[Finding]:
    """Ray is an optional extra."""
    if importlib.util.find_spec("ray") is None:
        message = "'ray' needs the package ray, which is not installed"
        yield Finding("cluster.launcher", message, "pip install 'embodrl[ray]', or set it to process", "process")


@RAY_RULES.rule("cluster.ray_address", "cluster.launcher", "cluster.num_nodes", machine_specific=True)
def several_machines_are_there(context: Context) -> Iterator[Finding]:
    """A Ray started by the run has one machine."""
    cluster = context.config.cluster
    if cluster.num_nodes > 1 and cluster.ray_address is None:
        yield Finding(
            "cluster.ray_address",
            f"is null, which starts Ray on this machine alone, and cluster.num_nodes is {cluster.num_nodes}",
            "start Ray on all machines (`ray start`), and set it to auto",
            "auto, or HOST:PORT of a running Ray",
            others=("cluster.num_nodes",),
        )


INLINE = LauncherSpec(
    name="inline",
    target="embodrl.scheduler.launchers.inline:InlineLauncher",
    description="all in this process, one after the other; for debugging",
    for_runs=False,
)
PROCESS = LauncherSpec(
    name="process",
    target="embodrl.scheduler.launchers.process:ProcessLauncher",
    description="one process each on this machine, shared memory",
)
RAY = LauncherSpec(
    name="ray",
    target="embodrl.scheduler.launchers.ray.launcher:RayLauncher",
    description="Ray actors, on several machines",
    rules=(RAY_RULES,),
    starts_everything=True,
    many_machines=True,
)
LAUNCHERS = {name: f"{__name__}:{name.upper()}" for name in ("inline", "process", "ray")}
