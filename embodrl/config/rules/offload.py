"""What leaves memory between the phases of a run."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, note, rule
from embodrl.rule_set import Finding

ACTOR = "actor.enable_offload"
ROLLOUT = "rollout.enable_offload"
ENV = "env.enable_offload"
LEVEL = "env.offload_level"


@rule(ACTOR, ROLLOUT, ENV, "runner.max_staleness")
def offload_needs_turns(context: Context) -> Iterator[Finding]:
    """What a phase does not need can leave only where phases take turns."""
    config = context.config
    keys = {ACTOR: config.actor.enable_offload, ROLLOUT: config.rollout.enable_offload, ENV: config.env.enable_offload}
    if not config.runner.max_staleness:
        return
    for key in (key for key, wanted in keys.items() if wanted):
        yield Finding(
            key,
            f"is true, and with runner.max_staleness = {config.runner.max_staleness} rollouts are run while the"
            " policy trains",
            "set it to false, or runner.max_staleness to 0",
            "false",
            others=("runner.max_staleness",),
        )


@rule(ACTOR, "actor.fsdp.cpu_offload")
def main_memory_has_no_offload(context: Context) -> Iterator[Finding]:
    """What is in main memory already has nowhere to go."""
    actor = context.config.actor
    if actor.training_backend == "fsdp" and actor.enable_offload and actor.fsdp.cpu_offload:
        message = "is true, and with actor.fsdp.cpu_offload all that trains is in main memory already"
        yield Finding(ACTOR, message, "set one of the two to false", "false", others=("actor.fsdp.cpu_offload",))


@note(ROLLOUT, "rollout.backend", "rollout.own_process", "actor", "cluster", "env.num_processes")
def shared_weights_stay(context: Context) -> Iterator[Finding]:
    """Weights that both act and train are needed in every phase."""
    rollout = context.config.rollout
    deployment = context.deployment
    if not rollout.enable_offload or rollout.backend != "native" or deployment is None:
        return
    if not deployment.has_processes:
        message = "has no effect: the rollout acts with the weights that train, which every phase needs"
        yield Finding(ROLLOUT, message, "leave it out, or set actor.own_process=true")
