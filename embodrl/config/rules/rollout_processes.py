"""Rollouts in processes of their own."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from embodrl.config.placement import PlacementError
from embodrl.config.rules.actor import has_own_process
from embodrl.config.rules.base import Context, Finding, note, rule
from embodrl.config.rules.cluster import KEY, place_all
from embodrl.config.schema import Config

SYNC = "rollout.weight_sync"


def has_rollout_processes(config: Config) -> bool:
    """Tell whether a valid configuration plays in other processes than the main one."""
    return needs_rollout_processes(config) if config.rollout.own_process is None else config.rollout.own_process


def needs_rollout_processes(config: Config) -> bool:
    """Tell whether the main process can't play by itself."""
    places = place_all(config)["rollout"]
    return config.cluster.launcher == "ray" or len(places) > 1 or places[0].node > 0


def main_component(config: Config) -> Literal["actor", "rollout"] | None:
    """Return what the main process of a valid configuration does besides driving the others; None if nothing."""
    if not has_rollout_processes(config):
        return "rollout"
    return None if has_own_process(config) else "actor"


def _knows_places(config: Config) -> bool:
    try:
        place_all(config)
    except (PlacementError, KeyError):
        return False  # told by others
    return True


@rule("cluster.launcher")
def ray_is_installed(context: Context) -> Iterator[Finding]:
    """Ray is an extra."""
    wanted = context.config.cluster.launcher == "ray" and not context.planning
    if wanted and importlib.util.find_spec("ray") is None:
        message = "'ray' needs the package ray, which is not installed"
        yield Finding("cluster.launcher", message, "pip install 'embodrl[ray]', or set it to process", "process")


@rule("cluster.ray_address", "cluster.launcher", "cluster.num_nodes")
def several_machines_are_there(context: Context) -> Iterator[Finding]:
    """A Ray that a run starts has one machine."""
    cluster = context.config.cluster
    if cluster.launcher == "ray" and cluster.num_nodes > 1 and cluster.ray_address is None and not context.planning:
        yield Finding(
            "cluster.ray_address",
            f"is null, which starts Ray on this machine alone, and cluster.num_nodes is {cluster.num_nodes}",
            "start Ray on all machines (`ray start`), and set it to auto",
            "auto, or HOST:PORT of a Ray that runs",
            others=("cluster.num_nodes",),
        )


@rule("rollout.own_process", KEY, "cluster", "env.num_processes", "actor.training_backend", "rollout.backend")
def several_rollouts_are_processes(context: Context) -> Iterator[Finding]:
    """The main process is one, on machine 0, and no actor of Ray's."""
    config = context.config
    if config.rollout.own_process is not False or not _knows_places(config) or not needs_rollout_processes(config):
        return
    count = len(place_all(config)["rollout"])
    reason = "cluster.launcher is ray" if config.cluster.launcher == "ray" else f"{KEY} has {count} of them"
    yield Finding(
        "rollout.own_process",
        f"is false, and the main process can't play: {reason}",
        "leave it out",
        "null, true",
        others=("cluster.launcher", KEY),
    )


@rule(KEY, "cluster", "env.num_processes", "rollout.own_process", "actor.training_backend", "rollout.backend")
def simulators_are_beside_their_rollout(context: Context) -> Iterator[Finding]:
    """A rollout process drives simulators of its own machine."""
    config = context.config
    if not _knows_places(config) or not has_rollout_processes(config):
        return
    places = place_all(config)
    rollouts, envs = places["rollout"], places["env"]
    if len(envs) % len(rollouts):
        return  # told by others
    size = len(envs) // len(rollouts)
    for rollout in rollouts:
        mine = envs[rollout.rank * size : (rollout.rank + 1) * size]
        far = Counter(env.node for env in mine if env.node != rollout.node)
        if far:
            node, count = far.most_common(1)[0]
            yield Finding(
                KEY,
                f"rollout process {rollout.rank} is on machine {rollout.node}, and {count} of its {size} simulator"
                f" process(es) on machine {node}",
                "place env as rollout, with as many processes on each machine for each rollout process",
                "simulators on the machine of their rollout process",
                others=("env.num_processes",),
            )
            return


@rule(SYNC, KEY, "cluster", "rollout.own_process", "env.num_processes", "actor.training_backend", "rollout.backend")
def weights_get_there(context: Context) -> Iterator[Finding]:
    """Sharing is for one process, memory for one machine, the others for several processes."""
    config = context.config
    kind = config.rollout.weight_sync
    if kind == "auto" or not _knows_places(config):
        return
    own = has_rollout_processes(config)
    far = {place.node for place in place_all(config)["rollout"]} - {0}
    if kind == "shared" and own:
        message = "is 'shared', and rollout processes of their own share no memory with the main process"
        yield Finding(SYNC, message, "leave it at auto", "auto, memory, collective, disk", others=(KEY,))
    elif kind == "memory" and far:
        machines = ", ".join(map(str, sorted(far)))
        message = f"is 'memory', and there are rollout processes on machine {machines}"
        yield Finding(SYNC, message, "leave it at auto", "auto, collective, disk", others=(KEY,))
    elif kind != "shared" and not own:
        message = f"is '{kind}', and the main process plays itself: it has nobody to send weights to"
        yield Finding(SYNC, message, "leave it at auto, or set rollout.own_process=true", "auto, shared")


@note("rollout.max_restarts", "rollout.own_process", KEY, "cluster.launcher")
def restarts_are_of_processes(context: Context) -> Iterator[Finding]:
    """The main process can't be brought up anew."""
    config, key = context.config, "rollout.max_restarts"
    if context.by_user(key) and _knows_places(config) and not has_rollout_processes(config):
        yield Finding(key, "has no effect: rollouts are played by the main process", "leave it out")


@note("rollout.pipeline_stages", "runner.max_staleness", "rollout.own_process", KEY, "cluster.launcher")
def stages_are_of_the_main_process(context: Context) -> Iterator[Finding]:
    """A rollout process of an asynchronous run plays with all its simulators at once."""
    config, key = context.config, "rollout.pipeline_stages"
    ahead = config.runner.max_staleness > 0 and config.rollout.pipeline_stages > 1
    if ahead and _knows_places(config) and has_rollout_processes(config):
        message = "has no effect: a rollout process that plays ahead of training uses all its simulators at once"
        yield Finding(key, message, "use more rollout processes")


@note("cluster.ray_address", "cluster.launcher")
def addresses_are_of_ray(context: Context) -> Iterator[Finding]:
    """Without Ray there is nothing to join."""
    if context.config.cluster.ray_address is not None and context.config.cluster.launcher != "ray":
        yield Finding("cluster.ray_address", "has no effect: cluster.launcher is not ray", "set cluster.launcher=ray")
