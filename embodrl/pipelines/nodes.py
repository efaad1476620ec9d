"""The built-in nodes: thin wrappers of workers, engines and algorithms.

Validating a configuration imports this module, so torch is only imported by the calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embodrl.pipelines.context import PipelineContext
from embodrl.pipelines.outcomes import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from embodrl.algorithms.advantages import Advantages
    from embodrl.data.trajectory import TrajectoryBatch


def rollout(context: PipelineContext) -> tuple[TrajectoryBatch, Metrics]:
    """Gather experience with the current policy; ``env_steps`` counts the simulated steps."""
    batch, metrics = context.rollout.gather(context.iteration)
    return batch, metrics | {"env_steps": batch.meta["env_steps"]}


def dynamic_sampling(context: PipelineContext, batch: TrajectoryBatch) -> tuple[TrajectoryBatch, Metrics]:
    """Keep groups with both successes and failures, and replace the others through further rollouts (DAPO)."""
    from embodrl.workers.dynamic_sampling import sample_mixed_groups

    batch, metrics = sample_mixed_groups(context.rollout, batch, context.iteration)
    return batch, metrics | {"env_steps": batch.meta["env_steps"]}


def reward(context: PipelineContext, batch: TrajectoryBatch) -> tuple[TrajectoryBatch, Metrics]:
    """Replace the environment's rewards with ``reward.fn``'s, ``reward.model``'s or SRPO's, if configured."""
    metrics: Metrics = {**context.rewards.apply(batch)}
    return batch, metrics


def reference(context: PipelineContext, batch: TrajectoryBatch) -> TrajectoryBatch:
    """Add the log-probs under the reference policy: the run's initial one, or ``algorithm.teacher``."""
    batch.ref_logprobs = context.updates.reference_logprobs(batch)
    return batch


def proximal(context: PipelineContext, batch: TrajectoryBatch) -> TrajectoryBatch:
    """Add the log-probs and, with decoupled PPO, replace the values, under the weights at the start of this update."""
    from embodrl.algorithms.decoupled import set_proximal

    set_proximal(batch, *context.updates.proximal(batch, context.config.recomputes_logprobs))
    return batch


def advantage(context: PipelineContext, batch: TrajectoryBatch) -> tuple[Advantages, Metrics]:
    """Estimate advantages and returns with ``algorithm.adv_type``, and of single tasks with ``algorithm.by_task``."""
    from embodrl.algorithms.by_task import advantages_by_task

    totals = {} if context.totals is None else {"totals": context.totals}
    return advantages_by_task(batch, context.config.algorithm, context.config.env.tasks, **totals)


def train(
    context: PipelineContext,
    batch: TrajectoryBatch,
    advantages: Advantages,
    *,
    loss: Callable[..., object] | str | None = None,
) -> Metrics:
    """Update the weights; with ``loss``, a function or its ``module:function``, in place of ``algorithm.loss_type``."""
    algorithm, seed = context.config.algorithm, context.config.runner.seed
    if algorithm.pf_ppo.method is not None:
        from embodrl.algorithms.filtration import filtered

        batch, advantages = filtered(batch, advantages, algorithm, (seed, context.iteration))
    demos = None if context.imitated is None else context.imitated.draws(batch, advantages)
    return {**context.updates.update(batch, advantages, context.shuffle, demos, loss)}


def store(context: PipelineContext, batch: TrajectoryBatch) -> Metrics:
    """Add the chunks of a rollout to the replay buffer, and an expert's or a person's to the demonstrations."""
    from embodrl.data.replay import POLICY

    stores = context.stores
    added = stores.add(batch)
    online = stores.online
    metrics: Metrics = {"replay/added": added, "replay/size": len(online), "replay/mb": online.num_bytes / 2**20}
    if stores.interventions and stores.demos is not None:
        by_expert = batch["source"][batch.valid.any(-1)] != POLICY
        metrics |= {"replay/expert_share": float(by_expert.float().mean()), "replay/demos": len(stores.demos)}
    return metrics


def store_labels(context: PipelineContext, batch: TrajectoryBatch) -> Metrics:
    """Add the experts' labels of a rollout to the replay buffer."""
    from embodrl.data.replay import EXPERT, labelled_frames

    online = context.stores.online
    frames = labelled_frames(batch)
    online.add_frames(frames)
    acts = batch["expert"]["source"] == EXPERT
    valid = batch.valid.any(-1)
    return {
        "dagger/labels": online.stored,
        "dagger/expert_share": float(acts[valid].float().mean()),
        "replay/size": len(online),
        "replay/mb": online.num_bytes / 2**20,
    }


def train_off_policy(context: PipelineContext) -> Metrics:
    """Update the policy, and its critics if any, on batches drawn from the replay buffer."""
    return context.learn()


def train_offline(context: PipelineContext) -> Metrics:
    """Update the policy, and critics if any, on batches drawn from the dataset; nothing is simulated."""
    return {"env_steps": 0} | context.learn()


def sync(context: PipelineContext) -> None:
    """Send the new weights, and their version, to the rollout."""
    context.rollout.update_weights(context.engine.weights(), context.engine.version)
