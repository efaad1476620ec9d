"""Updates from rollouts: the loss of a batch with advantages, and log-probs under the current weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

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
from embodrl.algorithms.losses import LossCounts, LossOutput, is_largest
from embodrl.algorithms.totals import WHOLE, Totals
from embodrl.config.schema import Config
from embodrl.data.batch import Batch, shuffled
from embodrl.data.imitation import DemoDraws
from embodrl.data.shared_inputs import INPUTS, ROW, RowInputs
from embodrl.data.shared_rows import read_by
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine
from embodrl.hybrid_engines.training.precision import autocast
from embodrl.hybrid_engines.training.remote import Sharing
from embodrl.hybrid_engines.training.schedule import learning_rates
from embodrl.learners.imitation_update import imitation_gradients
from embodrl.learners.objective import (
    chunk_weights,
    counts_of,
    flatten_chunks,
    given_loss,
    kl_weight_column,
    make_loss,
    solved_column,
    trained_chunks,
)
from embodrl.learners.update import Update
from embodrl.models.base import VLAPolicy
from embodrl.models.common.teacher import build_teacher, inputs_for
from embodrl.names import import_function
from embodrl.processes.liveness import report_work
from embodrl.processes.trace import span
from embodrl.specs import LOSSES, FunctionSpec
from embodrl.types import EvalOutput, SamplingParams
from embodrl.workers.policy import param_dtype

UPDATE = f"{__name__}:OnPolicyUpdate"


def num_steps(batch: TrajectoryBatch, advantages: Advantages, config: Config) -> int:
    """Return the number of optimizer steps of an update without early stopping."""
    algorithm = config.algorithm
    rows = int(trained_chunks(batch, advantages, algorithm.chunk_fraction).sum())
    return algorithm.update_epoch * -(-rows // config.actor.global_batch_size)


class OnPolicyUpdate(Update):
    """Trains the policy on rollouts; ``totals`` are over their parts in other processes."""

    totals: Totals = WHOLE

    def __init__(
        self, engine: PolicyTrainEngine, config: Config, on_step: Callable[[int, int], None] | None = None
    ) -> None:
        super().__init__(engine, config, on_step)
        self.algorithm = config.algorithm
        self._loss = LOSSES.entry(config.algorithm.loss_type)
        self._needs_values = self._loss.needs_values
        self._held: RowInputs | None = None
        self._teacher: VLAPolicy | None = None

    @classmethod
    def rows_of_shares(cls, sharing: Sharing, method: str, args: Sequence[Any]) -> list[Tensor] | None:
        if method not in ("update", "reference_logprobs", "proximal"):
            return None
        config, count = sharing.config, sharing.num_shares
        batch: TrajectoryBatch = args[0]
        if method == "update":
            advantages, generator = args[1], torch.Generator()
            generator.set_state(args[2].get_state())
            trained = trained_chunks(batch, advantages, config.algorithm.chunk_fraction)
            chosen = trained.flatten().nonzero().squeeze(-1)
            steps = shuffled(len(chosen), config.actor.global_batch_size, config.algorithm.update_epoch, generator)
            parts = [read_by(chosen[rows], count) for rows in steps]
            return [torch.cat([chosen[:0], *(part[share] for part in parts)]) for share in range(count)]
        if method == "reference_logprobs":
            wanted = batch.valid.any(-1)
        else:
            warmup = config.actor.optim.critic_warmup_iterations if sharing.has_critic else 0
            wanted = _evaluated(config, batch, sharing.version, warmup, *args[1:])[2]
        return read_by(wanted.flatten().nonzero().squeeze(-1), count)

    def hold(self, held: RowInputs | None) -> None:
        self._held = held

    def update(
        self,
        batch: TrajectoryBatch,
        advantages: Advantages,
        generator: torch.Generator,
        demos: Iterator[Batch] | list[Batch] | None = None,
        loss: Callable[..., object] | str | None = None,
    ) -> dict[str, float]:
        """Train on a rollout and increment the engine's version.

        Args:
            batch: rollout batch.
            advantages: advantages of its chunks.
            generator: shuffles the chunks, on the CPU.
            demos: inputs of ``sft_loss``, one batch per step: every step that trains the policy also imitates one, with
                the weight ``algorithm.bc_coef``.
            loss: in place of ``algorithm.loss_type``: a function, or its ``module:function``.

        Returns:
            metrics named ``train/...``, and ``staleness/...`` if chunks may come from older policies.

        Raises:
            NonFiniteError: several consecutive steps were not finite.
            EmbodrlError: a chunk has a version above the engine's, the batch lacks a column that the loss needs, or the
                run can't use the given loss (``loss-unusable``).
        """
        algorithm = self.algorithm
        function = import_function(loss) if isinstance(loss, str) else loss
        spec = self._loss if function is None else given_loss(function, self.config)
        self.engine.onload()
        needs_values = spec.needs_values
        critic_warmup = self.critic_warmup()
        rates = learning_rates(
            self.engine.config.optim, self.engine.version, self.engine.options.total_iterations, critic_warmup
        )
        self.engine.set_learning_rates(rates, train_policy=self.engine.version >= critic_warmup)
        imitated = iter(demos) if demos is not None and self.engine.version >= critic_warmup else None
        loss_fn = self._loss_of(spec)
        staleness = staleness_of(batch.policy_version, batch.valid, self.engine.version)
        # For the loss weights, in updates that changed the policy; the metrics count all updates.
        aged = self.policy_staleness(batch)
        columns = {STALENESS: aged} | proximal_columns(batch, algorithm, aged)
        columns |= solved_column(batch, algorithm) | kl_weight_column(batch, self.config)
        trained = trained_chunks(batch, advantages, algorithm.chunk_fraction)
        weights = chunk_weights(batch, trained, algorithm, self.totals)
        chunks = self.rows(batch.replace(**columns), advantages, trained, weights)
        totals: defaultdict[str, float] = defaultdict(float)
        num_updates = 0
        num_nonfinite = 0
        stopped = False
        first_kl: Tensor | float | None = None
        mismatch: dict[str, float] | None = None
        num_minibatches, minibatches = self.minibatches(chunks, generator)
        for _, minibatch in zip(self.steps(num_minibatches), minibatches, strict=True):
            counts = self.counts(minibatch)
            with span("forward and backward"):
                total, metrics = self.engine.forward_backward(minibatch, partial(loss_fn, counts))
            if imitated is not None:
                bc_loss, scalars = imitation_gradients(self.engine, next(imitated), weight=algorithm.bc_coef)
                total = total + bc_loss
                metrics = metrics | {f"bc_{name}": value for name, value in scalars.items()}
            terms = {name: metrics.pop(name) for name in MISMATCH_TERMS}
            mismatch = mismatch_metrics(terms) if mismatch is None else mismatch  # before the first step
            if first_kl is None and not bool(staleness.any()):
                first_kl = metrics.get("approx_kl")  # no step yet: 0 if rollout and training agree on log-probs
            if algorithm.target_kl is not None and float(metrics["approx_kl"]) > algorithm.target_kl:
                # Gradients of a minibatch that is not stepped must not reach the next update.
                self.engine.state.clear_gradients()
                stopped = True
                break
            with span("optimizer step"):
                step = self.engine.optimizer_step(total)
            if not step.applied:
                num_nonfinite += 1
                continue
            num_updates += 1
            totals["grad_norm"] += step.grad_norm
            for name, value in metrics.items():
                known = totals.get(name, -math.inf)
                totals[name] = max(known, float(value)) if is_largest(name) else totals[name] + float(value)
        self.engine.complete_update()
        result = {f"train/{name}": value if is_largest(name) else value / num_updates for name, value in totals.items()}
        if self.engine.options.may_be_stale or algorithm.decoupled.enabled or bool(staleness.any()):
            result |= staleness_metrics(staleness, batch.valid)
        if needs_values:
            result["train/explained_variance"] = explained_variance(
                batch["values"], advantages.returns, advantages.valid, self.totals
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

    def rows(
        self, batch: TrajectoryBatch, advantages: Advantages, trained: Tensor, weights: Tensor | None
    ) -> TrajectoryBatch:
        """Return the trained chunks of a rollout as rows; see ``flatten_chunks``."""
        return flatten_chunks(batch, advantages, trained, weights)

    def minibatches(self, chunks: TrajectoryBatch, generator: torch.Generator) -> tuple[int, Iterator[TrajectoryBatch]]:
        """Return the number of minibatches of an update, and the minibatches of its rows."""
        epochs = self.algorithm.update_epoch
        size = self.engine.config.global_batch_size
        return epochs * -(-len(chunks) // size), chunks.minibatches(size, epochs, generator)

    def counts(self, minibatch: TrajectoryBatch) -> LossCounts:
        """Return what the losses of a minibatch are divided by."""
        return counts_of(minibatch, self.algorithm, self.engine.device)

    def _loss_of(self, spec: FunctionSpec) -> Callable[[LossCounts, TrajectoryBatch], LossOutput]:
        loss_fn = make_loss(self.engine.evaluate, self.algorithm, spec)
        held = self._held
        if held is None:
            return loss_fn
        return lambda counts, micro: loss_fn(counts, held.fill(micro, self.engine.device))

    def critic_warmup(self) -> int:
        """Return the number of first updates that leave the policy unchanged."""
        has_values = self._needs_values and bool(self.engine.state.value_parameters)
        return self.engine.config.optim.critic_warmup_iterations if has_values else 0

    def policy_staleness(self, batch: TrajectoryBatch) -> Tensor:
        """Return ``int64[T,B]``, in updates that trained the policy: critic-only updates do not count."""
        return _policy_staleness(batch, self.engine.version, self.critic_warmup())

    def proximal(self, batch: TrajectoryBatch, every_chunk: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return log-probs of the actions ``float32[T,B,C,A]`` and values ``float32[T,B,K]`` under the current weights.

        Chunks acted with these weights keep the rollout's log-probs and values, bit-exact; with ``every_chunk`` only
        the values. Values are None for a loss without them or without ``algorithm.decoupled``.

        Raises:
            EmbodrlError: a chunk has a version above the engine's.
        """
        needs_values = self._needs_values and self.algorithm.decoupled.enabled
        changed, old, stale = _evaluated(self.config, batch, self.engine.version, self.critic_warmup(), every_chunk)
        known = batch.logprobs.flatten(2)
        if needs_values:
            known = torch.cat([known, batch["values"]], -1)
        # ``outputs`` writes into its argument.
        outputs = self._outputs(self.engine.evaluate, batch, stale, known.clone(), needs_values)
        num_tokens = math.prod(batch.logprobs.shape[2:])
        # In a critic warm-up the policy is unchanged: its log-probs stay bit-exact with the rollout's.
        logprobs = torch.where(changed[..., None], outputs[..., :num_tokens], known[..., :num_tokens])
        if not needs_values:
            return logprobs.view_as(batch.logprobs), None
        values = torch.where(old[..., None], outputs[..., num_tokens:], known[..., num_tokens:])
        return logprobs.view_as(batch.logprobs), values

    def reference_logprobs(self, batch: TrajectoryBatch) -> Tensor:
        """Return ``float32[T,B,C,A]``: log-probs of the actions under the reference policy.

        That is the engine's, or a teacher that is a network of its own. Chunks without a valid action get 0.

        Raises:
            EmbodrlError: the engine keeps no reference.
        """
        if self.algorithm.teacher is not None and not self.engine.options.keep_reference:
            if self._teacher is None:
                self._teacher = build_teacher(self.config, self.engine.device, param_dtype(self.config))
            teacher = self._teacher
            return self.logprobs(
                lambda inputs, *args, **wanted: teacher.evaluate_actions(inputs_for(teacher, inputs), *args, **wanted),
                batch,
            )
        with self.engine.reference_policy() as evaluate:
            return self.logprobs(evaluate, batch)

    def logprobs(self, evaluate: Callable[..., EvalOutput], batch: TrajectoryBatch) -> Tensor:
        """Return ``float32[T,B,C,A]``: log-probs of the chunks with a valid action, else 0."""
        zeros = torch.zeros_like(batch.logprobs).flatten(2)
        return self._outputs(evaluate, batch, batch.valid.any(-1), zeros, False).view_as(batch.logprobs)

    def _outputs(
        self, evaluate: Callable[..., EvalOutput], batch: TrajectoryBatch, wanted: Tensor, result: Tensor, values: bool
    ) -> Tensor:
        """Return ``result float32[T,B,C*A(+K)]`` filled with the log-probs, and values, of ``wanted bool[T,B]``."""
        self.engine.onload()
        sampling = SamplingParams(self.algorithm.sampling.temperature, self.algorithm.sampling.top_k)
        chosen = wanted.flatten().nonzero().squeeze(-1)
        chunks = batch.select(*(name for name in (INPUTS, ROW) if name in batch)).fold()
        held = self._held

        def compute(rows: Tensor) -> Tensor:
            micro = chunks[rows].to(self.engine.device, non_blocking=True)
            micro = micro if held is None else held.fill(micro, self.engine.device)
            with torch.no_grad(), autocast(self.engine.precision, self.engine.device):
                output = evaluate(micro.forward_inputs, sampling, compute_entropy=False, compute_values=values)
            report_work()
            parts = [output.logprobs.float().flatten(1)]
            if values:
                assert output.values is not None
                parts.append(output.values.float())
            return torch.cat(parts, -1).cpu()

        rows_of_result = result.flatten(0, 1)
        self.engine.evaluate_rows(compute, chosen, rows_of_result)
        return rows_of_result.view_as(result)


def _policy_staleness(batch: TrajectoryBatch, version: int, warmup: int) -> Tensor:
    """Return ``int64[T,B]``, in updates that trained the policy, of which the first ``warmup`` train critics alone."""
    return staleness_of(batch.policy_version.clamp_min(warmup), batch.valid, max(version, warmup))


def _evaluated(
    config: Config, batch: TrajectoryBatch, version: int, warmup: int, every_chunk: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``bool[T,B]`` each: whose log-probs and whose values have changed, and what has to be evaluated for both.

    For weights of a version, the first ``warmup`` of which are of critics; see ``OnPolicyUpdate.proximal``.
    """
    changed = batch.valid.any(-1) if every_chunk else _policy_staleness(batch, version, warmup) > 0
    if not (LOSSES.entry(config.algorithm.loss_type).needs_values and config.algorithm.decoupled.enabled):
        return changed, changed, changed
    # Chunks before a lost one are bootstrapped from its value.
    ended = (batch.terminated | batch.truncated).any(-1)
    old = batch.policy_version < version
    return changed, old, changed | (old & (batch.valid.any(-1) | ended))


class Demonstrations:
    """Demonstrations that on-policy updates imitate in addition to their loss (``algorithm.bc_coef``).

    The state of ``frames``, which draws frames, is part of checkpoints.
    """

    def __init__(self, config: Config, policy: VLAPolicy, frames: DemoDraws) -> None:
        self.config = config
        self.policy = policy
        self.frames = frames

    def draws(self, batch: TrajectoryBatch, advantages: Advantages) -> Iterator[Batch]:
        """Yield a batch for each optimizer step of an update."""
        for _ in range(num_steps(batch, advantages, self.config)):
            observation, actions, inside = self.frames.next()
            inputs = self.policy.sft_inputs(observation, actions) | {"action_mask": inside}
            yield Batch({name: tensor.cpu() for name, tensor in inputs.items()})
