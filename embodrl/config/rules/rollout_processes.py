"""Rollouts in separate processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from embodrl.config.rules.base import Context, note, rule
from embodrl.config.rules.cluster import KEY
from embodrl.deployment.solver import driver_cannot_act
from embodrl.rule_set import Finding

SYNC = "rollout.weight_sync"
PATCHES = "rollout.weight_patches"


@rule("rollout.own_process", KEY, "cluster", "env.num_processes", "actor.training_backend", "rollout.backend")
def several_rollouts_are_processes(context: Context) -> Iterator[Finding]:
    """The main process is a single one, on machine 0, and not a Ray actor."""
    config = context.config
    deployment = context.deployment
    if config.rollout.own_process is not False or deployment is None:
        return
    if not driver_cannot_act(config, deployment.of("rollout")):
        return
    count = len(deployment.of("rollout"))
    launcher = config.cluster.launcher
    reason = f"cluster.launcher is {launcher}" if context.launcher.starts_everything else f"{KEY} has {count} of them"
    yield Finding(
        "rollout.own_process",
        f"is false, and rollouts can't run in the main process: {reason}",
        "leave it out",
        "null, true",
        others=("cluster.launcher", KEY),
    )


@rule(KEY, "cluster", "env.num_processes", "rollout.own_process", "actor.training_backend", "rollout.backend")
def simulators_are_beside_their_rollout(context: Context) -> Iterator[Finding]:
    """Simulators are on the machine of their rollout process, or all of them on machines without rollouts."""
    deployment = context.deployment
    if deployment is None or not deployment.rolls_out_in_processes:
        return
    rollouts = deployment.of("rollout")
    if len(deployment.of("env")) % len(rollouts):
        return  # another rule reports it
    far: Counter[tuple[int, int, int]] = Counter()
    for rollout in rollouts:
        nodes = [env.node for env in deployment.simulators_of(rollout)]
        far.update((rollout.rank, rollout.node, node) for node in nodes if node != rollout.node)
    if not far:
        return
    config = context.config
    if {place.node for place in deployment.of("env")} & {place.node for place in rollouts}:
        (rank, machine, node), count = far.most_common(1)[0]
        yield Finding(
            KEY,
            f"rollout process {rank} is on machine {machine}, and {count} of its simulator process(es) on machine"
            f" {node}, and there are simulators on machines of rollout processes",
            "place env like rollout, with equally many simulator processes per rollout process on each machine, or on"
            " machines without rollouts",
            "all simulators on the machines of their rollout processes, or none",
            others=("env.num_processes",),
        )
        return
    if config.env.python not in (None, "auto"):
        message = "is an interpreter of this machine, but the simulators run on machines without rollouts"
        yield Finding("env.python", message, "leave it out, or set it to auto", "null, auto", others=(KEY,))


@rule(SYNC, KEY, "cluster", "rollout.own_process", "env.num_processes", "actor.training_backend", "rollout.backend")
def weights_get_there(context: Context) -> Iterator[Finding]:
    """Shared weights need one process, memory one machine, and the others several processes."""
    kind = context.config.rollout.weight_sync
    deployment = context.deployment
    if kind == "auto" or deployment is None:
        return
    own = deployment.rolls_out_in_processes
    far = {place.node for place in deployment.of("rollout")} - {0}
    if kind == "shared" and own:
        message = "is 'shared', but separate rollout processes share no memory with the main process"
        yield Finding(SYNC, message, "leave it at auto", "auto, memory, collective, disk", others=(KEY,))
    elif kind == "memory" and far:
        machines = ", ".join(map(str, sorted(far)))
        message = f"is 'memory', but there are rollout processes on machine {machines}"
        yield Finding(SYNC, message, "leave it at auto", "auto, collective, disk", others=(KEY,))
    elif kind != "shared" and not own:
        message = f"is '{kind}', and rollouts run in the main process, so there are no weights to synchronise"
        yield Finding(SYNC, message, "leave it at auto, or set rollout.own_process=true", "auto, shared")


@rule(
    PATCHES,
    SYNC,
    KEY,
    "cluster",
    "rollout.own_process",
    "env.num_processes",
    "actor.training_backend",
    "rollout.backend",
)
def patches_have_a_receiver(context: Context) -> Iterator[Finding]:
    """Receivers of patches follow every version, which readers of a directory need not."""
    if not context.config.rollout.weight_patches or context.deployment is None:
        return
    if not context.deployment.rolls_out_in_processes:
        message = "is true, and rollouts run in the main process, so there are no weights to send"
        yield Finding(PATCHES, message, "leave it out, or set rollout.own_process=true", "false")
    elif context.config.rollout.weight_sync == "disk":
        message = "is true, but a version on disk must not depend on all earlier ones"
        yield Finding(
            PATCHES, message, "set rollout.weight_sync to auto, memory or collective", "false", others=(SYNC,)
        )


@note(KEY, "cluster")
def rollouts_of_one_process(context: Context) -> Iterator[Finding]:
    """Evaluations on the way of imitation, and servers, act in the main process."""
    found = context.deployment
    if context.verb not in ("sft", "serve") or found is None or not context.by_user(KEY):
        return
    if (count := len(found.of("rollout"))) > 1 or found.of("rollout")[0].node:
        message = f"{count} rollout process(es) are placed, but this command acts only in the main process"
        yield Finding(KEY, message, "leave rollout at all, or place it on one device of this machine")


@note("rollout.pipeline_stages", "runner.max_staleness", "rollout.own_process", KEY, "cluster.launcher")
def stages_are_of_the_main_process(context: Context) -> Iterator[Finding]:
    """A rollout process of an asynchronous run uses all its simulators at once."""
    config = context.config
    deployment = context.deployment
    key = "rollout.pipeline_stages"
    ahead = config.runner.max_staleness > 0 and config.rollout.pipeline_stages > 1
    if ahead and deployment is not None and deployment.rolls_out_in_processes:
        message = "has no effect: a rollout process of an asynchronous run uses all its simulators at once"
        yield Finding(key, message, "use more rollout processes")
