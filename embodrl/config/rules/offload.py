"""Components that leave memory between the phases of a run."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, note, rule
from embodrl.rule_set import Finding

ACTOR = "actor.enable_offload"
ROLLOUT = "rollout.enable_offload"
ENV = "env.enable_offload"


@rule(ACTOR, ROLLOUT, ENV, "runner.max_staleness")
def offload_needs_turns(context: Context) -> Iterator[Finding]:
    """Offloading needs alternating phases."""
    config = context.config
    keys = {ACTOR: config.actor.enable_offload, ROLLOUT: config.rollout.enable_offload, ENV: config.env.enable_offload}
    if not config.runner.max_staleness:
        return
    for key in (key for key, wanted in keys.items() if wanted):
        yield Finding(
            key,
            f"is true, and with runner.max_staleness = {config.runner.max_staleness} rollouts run while the"
            " policy trains",
            "set it to false, or set runner.max_staleness=0",
            "false",
            others=("runner.max_staleness",),
        )


@rule(ACTOR, "actor.fsdp.cpu_offload")
def main_memory_has_no_offload(context: Context) -> Iterator[Finding]:
    """State that is already in main memory can't be offloaded."""
    actor = context.config.actor
    if actor.training_backend == "fsdp" and actor.enable_offload and actor.fsdp.cpu_offload:
        message = "is true, but with actor.fsdp.cpu_offload all training state is already in main memory"
        yield Finding(ACTOR, message, "set one of them to false", "false", others=("actor.fsdp.cpu_offload",))


@note(ROLLOUT, "rollout.backend", "rollout.own_process", "actor", "cluster", "env.num_processes")
def shared_weights_stay(context: Context) -> Iterator[Finding]:
    """Weights that both act and train are needed in every phase."""
    rollout = context.config.rollout
    deployment = context.deployment
    if not rollout.enable_offload or rollout.backend != "native" or deployment is None:
        return
    if not deployment.has_processes:
        message = "has no effect: the rollout acts with the training weights, which every phase needs"
        yield Finding(ROLLOUT, message, "leave it out, or set actor.own_process=true")
