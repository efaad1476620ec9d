"""Updates by rollouts: the loss of a batch with advantages, and log-probs of the present weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodrl.algorithms.advantages import Advantages, explained_variance
from embodrl.algorithms.decoupled import (
    MISMATCH_TERMS,
    STALENESS,
    mismatch_metrics,
    proximal_columns,
    staleness_metrics,
    staleness_of,
)
from embodrl.config.schema import AlgorithmConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.hybrid_engines.training.objective import (
    chunk_weights,
    counts_of,
    flatten_chunks,
    is_largest,
    make_loss,
    trained_chunks,
)
from embodrl.hybrid_engines.training.precision import autocast
from embodrl.hybrid_engines.training.schedule import learning_rates
from embodrl.processes.liveness import report_work
from embodrl.processes.trace import span
from embodrl.specs import LOSSES
from embodrl.types import EvalOutput, SamplingParams

if TYPE_CHECKING:
    from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine


class OnPolicyUpdate:
    """Trains an engine's policy on rollouts.

    Args:
        engine: engine that holds the weights, and computes gradients and steps.
    """

    def __init__(self, engine: PolicyTrainEngine) -> None:
        self.engine = engine

    def update(
        self,
        batch: TrajectoryBatch,
        advantages: Advantages,
        algorithm: AlgorithmConfig,
        generator: torch.Generator,
    ) -> dict[str, float]:
        """See ``TrainEngine.update``."""
        self.engine.onload()
        needs_values = LOSSES.entry(algorithm.loss_type).needs_values
        critic_warmup = self.critic_warmup(algorithm)
        rates = learning_rates(
            self.engine.config.optim, self.engine.version, self.engine.options.total_iterations, critic_warmup
        )
        self.engine.set_learning_rates(rates, train_policy=self.engine.version >= critic_warmup)
        draw_demos = self.engine.draw_demos if self.engine.version >= critic_warmup else None
        loss_fn = make_loss(self.engine.evaluate, algorithm, needs_values)
        staleness = staleness_of(batch.policy_version, batch.valid, self.engine.version)
        # In updates that changed the policy, for the weights of the loss; the metrics count all updates.
        aged = self.policy_staleness(batch, algorithm)
        columns = {STALENESS: aged} | proximal_columns(batch, algorithm, aged)
        trained = trained_chunks(batch, advantages, algorithm.chunk_fraction)
        chunks = flatten_chunks(batch.replace(**columns), advantages, trained, chunk_weights(batch, trained, algorithm))
        totals: defaultdict[str, float] = defaultdict(float)
        num_updates = 0
        num_nonfinite = 0
        stopped = False
        first_kl: Tensor | float | None = None
        mismatch: dict[str, float] | None = None
        epochs = algorithm.update_epoch
        size = self.engine.config.global_batch_size
        minibatches = chunks.minibatches(size, epochs, generator)
        for _, minibatch in zip(self.engine.steps(epochs * -(-len(chunks) // size)), minibatches, strict=True):
            counts = counts_of(minibatch, algorithm, self.engine.device)
            with span("forward and backward"):
                loss, metrics = self.engine.forward_backward(
                    minibatch, lambda micro, counts=counts: loss_fn(micro, counts)
                )
            if draw_demos is not None:
                bc_loss, scalars = self.engine.imitation_gradients(draw_demos(), weight=algorithm.bc_coef)
                loss = loss + bc_loss
                metrics = metrics | {f"bc_{name}": value for name, value in scalars.items()}
            apart = {name: metrics.pop(name) for name in MISMATCH_TERMS}
            mismatch = mismatch_metrics(apart) if mismatch is None else mismatch  # before the first step
            if first_kl is None and not bool(staleness.any()):
                first_kl = metrics.get("approx_kl")  # no step yet: 0 if rollout and training agree on log-probs
            if algorithm.target_kl is not None and float(metrics["approx_kl"]) > algorithm.target_kl:
                # Gradients of the minibatch that is not stepped must not reach the next update.
                self.engine.clear_gradients()
                stopped = True
                break
            with span("optimizer step"):
                step = self.engine.optimizer_step(loss)
            if not step.applied:
                num_nonfinite += 1
                continue
            num_updates += 1
            totals["grad_norm"] += step.grad_norm
            for name, value in metrics.items():
                known = totals.get(name, -math.inf)
                totals[name] = max(known, float(value)) if is_largest(name) else totals[name] + float(value)
        self.engine.complete_update()
        result = {f"train/{name}": total if is_largest(name) else total / num_updates for name, total in totals.items()}
        if self.engine.options.may_be_stale or algorithm.decoupled.enabled or bool(staleness.any()):
            result |= staleness_metrics(staleness, batch.valid)
        if needs_values:
            result["train/explained_variance"] = explained_variance(
                batch["values"], advantages.returns, advantages.valid
            )
        result |= {f"train/{name}": value for name, value in (mismatch or {}).items()}
        if first_kl is not None:
            result["train/first_minibatch_kl"] = float(first_kl)
        return result | {
            "train/lr": rates.policy,
            "train/value_lr": rates.value,
            "train/num_updates": float(num_updates),
            "train/num_nonfinite": float(num_nonfinite),
            "train/early_stop": float(stopped),
        }

    def critic_warmup(self, algorithm: AlgorithmConfig) -> int:
        """Return how many of the first updates leave the policy as it is."""
        needs_values = LOSSES.entry(algorithm.loss_type).needs_values
        return self.engine.config.optim.critic_warmup_iterations if needs_values and self.engine.value_parameters else 0

    def policy_staleness(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
        """Return ``int64[T,B]``, in updates that trained the policy: those of the critic alone do not count."""
        warmup = self.critic_warmup(algorithm)
        versions = batch.policy_version.clamp_min(warmup)
        return staleness_of(versions, batch.valid, max(self.engine.version, warmup))

    def proximal(
        self, batch: TrajectoryBatch, algorithm: AlgorithmConfig, every_chunk: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See ``TrainEngine.proximal``."""
        needs_values = LOSSES.entry(algorithm.loss_type).needs_values and algorithm.decoupled.enabled
        changed = batch.valid.any(-1) if every_chunk else self.policy_staleness(batch, algorithm) > 0
        stale = old = changed
        if needs_values:
            # What comes before a lost chunk is bootstrapped from its value.
            ended = (batch.terminated | batch.truncated).any(-1)
            old = batch.policy_version < self.engine.version
            stale = changed | (old & (batch.valid.any(-1) | ended))
        known = batch.logprobs.flatten(2)
        if needs_values:
            known = torch.cat([known, batch["values"]], -1)
        # ``outputs`` writes into its argument.
        outputs = self.outputs(self.engine.evaluate, batch, stale, known.clone(), algorithm, needs_values)
        num_tokens = math.prod(batch.logprobs.shape[2:])
        # In a warm-up of the critic the policy stays as it is: its log-probs then stay bit-exact those of the rollout.
        logprobs = torch.where(changed[..., None], outputs[..., :num_tokens], known[..., :num_tokens])
        if not needs_values:
            return logprobs.view_as(batch.logprobs), None
        values = torch.where(old[..., None], outputs[..., num_tokens:], known[..., num_tokens:])
        return logprobs.view_as(batch.logprobs), values

    def logprobs(
        self, evaluate: Callable[..., EvalOutput], batch: TrajectoryBatch, algorithm: AlgorithmConfig
    ) -> Tensor:
        """Return ``float32[T,B,C,A]``: a policy's log-probs of the chunks with a valid action, else 0."""
        zeros = torch.zeros_like(batch.logprobs).flatten(2)
        return self.outputs(evaluate, batch, batch.valid.any(-1), zeros, algorithm, False).view_as(batch.logprobs)

    def outputs(
        self,
        evaluate: Callable[..., EvalOutput],
        batch: TrajectoryBatch,
        wanted: Tensor,
        result: Tensor,
        algorithm: AlgorithmConfig,
        with_values: bool,
    ) -> Tensor:
        """Return ``result float32[T,B,C*A(+K)]`` with a policy's log-probs, and values, of ``wanted bool[T,B]``."""
        self.engine.onload()
        sampling = SamplingParams(algorithm.sampling.temperature, algorithm.sampling.top_k)
        chosen = wanted.flatten().nonzero().squeeze(-1)
        inputs = batch.select("forward_inputs").fold()

        def compute(rows: Tensor) -> Tensor:
            micro = inputs[rows].to(self.engine.device, non_blocking=True)
            with torch.no_grad(), autocast(self.engine.precision, self.engine.device):
                output = evaluate(micro.forward_inputs, sampling, compute_entropy=False, compute_values=with_values)
            report_work()
            parts = [output.logprobs.float().flatten(1)]
            if with_values:
                assert output.values is not None
                parts.append(output.values.float())
            return torch.cat(parts, -1).cpu()

        rows_of_result = result.flatten(0, 1)
        if len(chosen):
            self.engine.evaluate_rows(compute, chosen, rows_of_result)
        return rows_of_result.view_as(result)
