"""What training backends with AdamW share; each says how weights are held and how gradients come about."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from embodrl.algorithms.advantages import Advantages, explained_variance
from embodrl.algorithms.decoupled import (
    MISMATCH_TERMS,
    STALENESS,
    mismatch_metrics,
    proximal_columns,
    staleness_metrics,
    staleness_of,
)
from embodrl.algorithms.losses import LossOutput
from embodrl.config.schema import ActorConfig, AlgorithmConfig, Config
from embodrl.data.batch import Batch
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import NonFiniteError
from embodrl.hybrid_engines.base import Counters, EngineState, FileFacts, StepResult, TrainEngine
from embodrl.hybrid_engines.offload import Offload, OffloadReport, optimizer_tensors
from embodrl.hybrid_engines.training.adamw import fused_adamw
from embodrl.hybrid_engines.training.engine_state import ADAM_STATE, MASTER, StateShapes, check_fit
from embodrl.hybrid_engines.training.objective import (
    chunk_weights,
    counts_of,
    flatten_chunks,
    is_largest,
    make_imitation_loss,
    make_loss,
    make_weighted_loss,
    trained_chunks,
)
from embodrl.hybrid_engines.training.precision import Precision, autocast, not_finite, resolve_precision
from embodrl.hybrid_engines.training.schedule import LearningRates, learning_rates
from embodrl.hybrid_engines.training.sharding import held, whole
from embodrl.models.base import VLAPolicy
from embodrl.processes.liveness import report_work
from embodrl.processes.trace import span
from embodrl.specs import LOSSES
from embodrl.types import EvalOutput, SamplingParams

logger = logging.getLogger(__name__)

MAX_NONFINITE_IN_ROW = 5
VALUE_GROUP = "value_head"
RowsT = TypeVar("RowsT", bound=Batch)
"""A minibatch: a flat ``TrajectoryBatch``, or the frames of supervised fine-tuning."""


@dataclass(frozen=True)
class EngineOptions:
    """What a run asks of its train engine.

    Attributes:
        config: precision, optimizer, and batch sizes over all processes but ``micro_batch_size``, which is that of one.
        total_iterations: length of the run, for the learning-rate schedule.
        keep_reference: keep the weights that train as they are now; a process keeps its part.
        may_be_stale: rollouts may come from older policies; every update then reports how old they are.
    """

    config: ActorConfig
    total_iterations: int
    keep_reference: bool = False
    may_be_stale: bool = False

    @classmethod
    def of(cls, config: Config) -> EngineOptions:
        """Return the options of a run."""
        kept, stale = config.algorithm.kl.coef > 0, config.runner.max_staleness > 0
        return cls(config.actor, config.runner.max_iterations, kept, stale)


class PolicyTrainEngine(TrainEngine):
    """AdamW on the weights of a policy.

    Args:
        policy: its ``trainable_groups`` train, the rest stays as it is; on the device, and already sharded if it is
            to be.
        options: what the run asks for.
        device: where the policy trains.

    Attributes:
        memory: what ``offload`` takes off the device.
        shares_weights: what acts uses the weights themselves, so that they stay on the device.
        is_shared: other processes of the default group have the rest of the state.
        draw_demos: returns inputs of ``sft_loss``; every step of ``update`` that trains the policy then imitates some,
            too, with the weight ``algorithm.bc_coef``.
    """

    shares_weights = False
    is_shared = False
    draw_demos: Callable[[], Batch] | None = None

    def __init__(self, policy: VLAPolicy, options: EngineOptions, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.policy, self.options, self.config = policy, options, options.config
        self.precision: Precision = resolve_precision(self.config.precision, self.device)
        self.version = self.nonfinite_in_row = 0
        groups = policy.trainable_groups()
        self.policy_parameters = [p for name, group in groups.items() if name != VALUE_GROUP for p in group]
        self.value_parameters = list(groups.get(VALUE_GROUP, []))
        self.leaves = self._make_leaves()
        self.masters = self._make_masters()
        self.leaves |= self.masters
        self.optimizer = self._build_optimizer()
        self.memory = Offload(self.offloadable)

    # -- what a backend defines ---------------------------------------------------------------------------------------

    def _make_leaves(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return, for every parameter that trains, what the optimizer changes: the same memory."""
        return {p: p for p in (*self.policy_parameters, *self.value_parameters)}

    def _make_masters(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return float32 copies of what trains in half precision: the optimizer changes these.

        Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, section 3.1: an update below 2^-9 of a
        bf16 weight rounds to none. The weights are rounded from their copies after every step.
        """
        if self.config.optim.master_weights is False:
            return {}
        halves = [p for p in self.leaves if p.dtype.itemsize < torch.float32.itemsize]
        return {p: nn.Parameter(held(p).detach().float()) for p in halves}

    @torch.no_grad()
    def _round_masters(self) -> None:
        for parameter, master in self.masters.items():
            held(parameter).copy_(master)

    @torch.no_grad()
    def _take_masters(self, names: Container[str]) -> None:
        """Let the copies of weights that were loaded be these."""
        for name, parameter in self.trained().items():
            if name in names and parameter in self.masters:
                self.masters[parameter].copy_(held(parameter))

    def evaluate(self, forward_inputs: dict[str, Tensor], sampling: SamplingParams, **wanted: bool) -> EvalOutput:
        """Return what ``VLAPolicy.evaluate_actions`` does."""
        return self.policy.evaluate_actions(forward_inputs, sampling, **wanted)

    @abstractmethod
    def forward_backward(
        self, minibatch: RowsT, loss_fn: Callable[[RowsT], LossOutput]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of a minibatch, micro-batch by micro-batch.

        Args:
            minibatch: flat; its rows are chunks.
            loss_fn: loss of a micro-batch; those of a minibatch must add up to its loss.

        Returns:
            the loss and metrics, summed over the micro-batches; of metrics named ``..._max`` the largest.
        """

    @abstractmethod
    def _clip_gradients(self) -> float:
        """Scale the gradients of the leaves to ``optim.clip_grad``; return their L2 norm before."""

    @abstractmethod
    def _evaluate_rows(self, compute: Callable[[Tensor], Tensor], chosen: Tensor, result: Tensor) -> None:
        """Write ``compute(rows)`` to ``result[rows]`` for the rows ``chosen``, a micro-batch at a time."""

    # -- the update ---------------------------------------------------------------------------------------------------

    def _build_optimizer(self) -> torch.optim.AdamW:
        optim = self.config.optim
        param_groups: list[dict[str, object]] = []
        for role, parameters in (("policy", self.policy_parameters), ("value", self.value_parameters)):
            # Biases, norms and layer scales are vectors; decaying them only shrinks activations.
            for decay, chosen in (
                (optim.weight_decay, [self.leaves[p] for p in parameters if p.ndim > 1]),
                (0.0, [self.leaves[p] for p in parameters if p.ndim <= 1]),
            ):
                if chosen:
                    param_groups.append({"params": chosen, "weight_decay": decay, "role": role})
        return fused_adamw(param_groups, optim.betas, optim.eps)

    def update(
        self,
        batch: TrajectoryBatch,
        advantages: Advantages,
        algorithm: AlgorithmConfig,
        generator: torch.Generator,
    ) -> dict[str, float]:
        self.onload()
        needs_values = LOSSES.entry(algorithm.loss_type).needs_values
        critic_warmup = self._critic_warmup(algorithm)
        rates = learning_rates(self.config.optim, self.version, self.options.total_iterations, critic_warmup)
        self._set_learning_rates(rates, train_policy=self.version >= critic_warmup)
        draw_demos = self.draw_demos if self.version >= critic_warmup else None
        loss_fn = make_loss(self.evaluate, algorithm, needs_values)
        staleness = staleness_of(batch.policy_version, batch.valid, self.version)
        aged = self._policy_staleness(batch, algorithm)
        columns = {STALENESS: aged} | proximal_columns(batch, algorithm, aged)
        trained = trained_chunks(batch, advantages, algorithm.chunk_fraction)
        chunks = flatten_chunks(batch.replace(**columns), advantages, trained, chunk_weights(batch, trained, algorithm))
        totals: defaultdict[str, float] = defaultdict(float)
        num_updates, num_nonfinite, stopped = 0, 0, False
        first_kl: Tensor | float | None = None
        mismatch: dict[str, float] | None = None
        epochs, size = algorithm.update_epoch, self.config.global_batch_size
        minibatches = chunks.minibatches(size, epochs, generator)
        for _, minibatch in zip(self.steps(epochs * -(-len(chunks) // size)), minibatches, strict=True):
            counts = counts_of(minibatch, algorithm, self.device)
            with span("forward and backward"):
                loss, metrics = self.forward_backward(minibatch, lambda micro, counts=counts: loss_fn(micro, counts))
            if draw_demos is not None:
                bc_loss, scalars = self._imitation_gradients(draw_demos(), weight=algorithm.bc_coef)
                loss, metrics = loss + bc_loss, metrics | {f"bc_{name}": value for name, value in scalars.items()}
            apart = {name: metrics.pop(name) for name in MISMATCH_TERMS}
            mismatch = mismatch_metrics(apart) if mismatch is None else mismatch  # before the first step
            if first_kl is None and not bool(staleness.any()):
                first_kl = metrics.get("approx_kl")  # no step yet: 0 if rollout and training agree on log-probs
            if algorithm.target_kl is not None and float(metrics["approx_kl"]) > algorithm.target_kl:
                self._clear_gradients()
                stopped = True
                break
            with span("optimizer step"):
                step = self.optimizer_step(loss)
            if not step.applied:
                num_nonfinite += 1
                continue
            num_updates += 1
            totals["grad_norm"] += step.grad_norm
            for name, value in metrics.items():
                known = totals.get(name, -math.inf)
                totals[name] = max(known, float(value)) if is_largest(name) else totals[name] + float(value)
        self.complete_update()
        result = {f"train/{name}": total if is_largest(name) else total / num_updates for name, total in totals.items()}
        if self.options.may_be_stale or algorithm.decoupled.enabled or bool(staleness.any()):
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

    def sft_loss(self, inputs: dict[str, Tensor], label_smoothing_bins: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what ``VLAPolicy.sft_loss`` does."""
        return self.policy.sft_loss(inputs, label_smoothing_bins)

    def imitate(self, batch: Batch, learning_rate: float, label_smoothing_bins: float) -> dict[str, float]:
        metrics = self.imitation_step(batch, learning_rate, label_smoothing_bins)
        self.complete_update()
        return metrics | {"lr": learning_rate}

    def imitation_step(
        self, batch: Batch, learning_rate: float, label_smoothing_bins: float, num_actions: float | None = None
    ) -> dict[str, float]:
        self.onload()
        self._set_learning_rates(LearningRates(policy=learning_rate, value=0.0), train_policy=True)
        if num_actions is None:
            loss, scalars = self._imitation_gradients(batch, label_smoothing_bins)
        else:
            loss_fn = make_weighted_loss(self.sft_loss, num_actions, label_smoothing_bins)
            loss, scalars = self.forward_backward(batch, loss_fn)
            scalars = {"loss": loss, **scalars}
        step = self.optimizer_step(loss)
        return {name: float(value) for name, value in scalars.items()} | {"grad_norm": step.grad_norm}

    def _imitation_gradients(
        self, batch: Batch, label_smoothing_bins: float = 0.0, weight: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of ``weight`` times the imitation loss; return that loss and, without weight, scalars."""
        total = batch["action_mask"].sum().to(self.device)
        loss_fn = make_imitation_loss(self.sft_loss, total, label_smoothing_bins, weight)
        loss, scalars = self.forward_backward(batch, loss_fn)
        return loss, {"loss": loss / weight, **scalars}

    def _critic_warmup(self, algorithm: AlgorithmConfig) -> int:
        """Return how many of the first updates leave the policy as it is."""
        needs_values = LOSSES.entry(algorithm.loss_type).needs_values
        return self.config.optim.critic_warmup_iterations if needs_values and self.value_parameters else 0

    def _policy_staleness(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
        """Return ``int64[T,B]``, in updates that trained the policy: those of the critic alone do not count."""
        warmup = self._critic_warmup(algorithm)
        versions = batch.policy_version.clamp_min(warmup)
        return staleness_of(versions, batch.valid, max(self.version, warmup))

    def _set_learning_rates(self, rates: LearningRates, train_policy: bool) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rates.policy if group["role"] == "policy" else rates.value
        # Without gradients AdamW passes the policy over: neither its weights nor its moments move.
        self._let_policy_train(train_policy)

    def _let_policy_train(self, train_policy: bool) -> None:
        """Give the policy gradients, or leave it without."""
        for parameter in self.policy_parameters:
            parameter.requires_grad_(train_policy)

    def optimizer_step(self, loss: Tensor) -> StepResult:
        """Clip the gradients, update the weights unless something is not finite, and clear the gradients.

        Args:
            loss: scalar; not finite means no update.

        Raises:
            NonFiniteError: the last steps were all not finite.
        """
        grad_norm, where = self._clip_gradients(), ""
        applied = math.isfinite(grad_norm) and math.isfinite(float(loss))
        if applied:
            self.optimizer.step()
            self._round_masters()
            self.nonfinite_in_row = 0
        else:
            self.nonfinite_in_row += 1
            leaves = {name: self.leaves.get(parameter) for name, parameter in self.trained().items()}
            where = not_finite((name, leaf.grad) for name, leaf in leaves.items() if leaf is not None)
            where = f"the gradients of {where}" if where else "the loss alone"
            logger.warning("loss %s, gradient norm %s: no update; not finite: %s", float(loss), grad_norm, where)
        self._clear_gradients()
        report_work()
        if self.nonfinite_in_row >= MAX_NONFINITE_IN_ROW:
            raise NonFiniteError(
                f"the loss or its gradient was not finite {self.nonfinite_in_row} times in a row, the last time"
                f" {where}; the weights are as they were before",
                "lower actor.optim.lr and actor.optim.value_lr, set actor.precision to fp32, and look for NaN in the "
                "observations and rewards",
            )
        return StepResult(applied, grad_norm)

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def complete_update(self) -> None:
        self.version += 1
        # Before a rollout or a checkpoint gets them.
        where = not_finite((name, held(parameter)) for name, parameter in self.trained().items())
        if where:
            raise NonFiniteError(
                f"update {self.version} made weights NaN or infinite: {where}",
                "resume from the last checkpoint with a lower actor.optim.lr, or with actor.precision=fp32",
                code="weights-not-finite",
            )

    # -- memory -------------------------------------------------------------------------------------------------------

    def offloadable(self) -> Iterator[Tensor]:
        """Yield what only training needs: moments, gradients, the reference and, unless it is what acts, weights."""
        yield from optimizer_tensors(self.optimizer)
        yield from self._kept_of_reference()
        yield from self.masters.values()
        if not self.shares_weights:
            yield from self.policy.parameters()
            yield from self.policy.buffers()
            yield from self.leaves.values()

    def _kept_of_reference(self) -> Iterable[Tensor]:
        """Return the memory of ``reference_weights``."""
        return self.reference_weights().values()

    def offload(self) -> OffloadReport | None:
        return self.memory.offload()

    def present(self) -> AbstractContextManager[None]:
        return self.memory.present()

    def onload(self) -> None:
        """Bring back what ``offload`` took off the device."""
        self.memory.onload()

    def proximal(
        self, batch: TrajectoryBatch, algorithm: AlgorithmConfig, every_chunk: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        needs_values = LOSSES.entry(algorithm.loss_type).needs_values and algorithm.decoupled.enabled
        changed = batch.valid.any(-1) if every_chunk else self._policy_staleness(batch, algorithm) > 0
        stale = old = changed
        if needs_values:
            # What comes before a lost chunk is bootstrapped from its value.
            ended = (batch.terminated | batch.truncated).any(-1)
            old = batch.policy_version < self.version
            stale = changed | (old & (batch.valid.any(-1) | ended))
        known = batch.logprobs.flatten(2)
        if needs_values:
            known = torch.cat([known, batch["values"]], -1)
        outputs = self._outputs(self.evaluate, batch, stale, known.clone(), algorithm, needs_values)
        num_tokens = math.prod(batch.logprobs.shape[2:])
        # In a warm-up of the critic the policy stays as it is: its log-probs then stay bit-exact those of the rollout.
        logprobs = torch.where(changed[..., None], outputs[..., :num_tokens], known[..., :num_tokens])
        if not needs_values:
            return logprobs.view_as(batch.logprobs), None
        values = torch.where(old[..., None], outputs[..., num_tokens:], known[..., num_tokens:])
        return logprobs.view_as(batch.logprobs), values

    def _logprobs(
        self, evaluate: Callable[..., EvalOutput], batch: TrajectoryBatch, algorithm: AlgorithmConfig
    ) -> Tensor:
        """Return ``float32[T,B,C,A]``: a policy's log-probs of the chunks with a valid action, else 0."""
        zeros = torch.zeros_like(batch.logprobs).flatten(2)
        return self._outputs(evaluate, batch, batch.valid.any(-1), zeros, algorithm, False).view_as(batch.logprobs)

    def _outputs(
        self,
        evaluate: Callable[..., EvalOutput],
        batch: TrajectoryBatch,
        wanted: Tensor,
        result: Tensor,
        algorithm: AlgorithmConfig,
        with_values: bool,
    ) -> Tensor:
        """Return ``result float32[T,B,C*A(+K)]`` with a policy's log-probs, and values, of ``wanted bool[T,B]``."""
        self.onload()
        sampling = SamplingParams(algorithm.sampling.temperature, algorithm.sampling.top_k)
        chosen = wanted.flatten().nonzero().squeeze(-1)
        inputs = batch.select("forward_inputs").fold()

        def compute(rows: Tensor) -> Tensor:
            micro = inputs[rows].to(self.device, non_blocking=True)
            with torch.no_grad(), autocast(self.precision, self.device):
                output = evaluate(micro.forward_inputs, sampling, compute_entropy=False, compute_values=with_values)
            report_work()
            parts = [output.logprobs.float().flatten(1)]
            if with_values:
                assert output.values is not None
                parts.append(output.values.float())
            return torch.cat(parts, -1).cpu()

        rows_of_result = result.flatten(0, 1)
        if len(chosen):
            self._evaluate_rows(compute, chosen, rows_of_result)
        return rows_of_result.view_as(result)

    # -- state --------------------------------------------------------------------------------------------------------

    def weights(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Those of the wanted names, or all."""
        self.onload()
        yield from (named for named in self.policy.state_dict().items() if wanted is None or named[0] in wanted)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that train, by name."""
        return {name: p for name, p in self.policy.named_parameters() if p in self.leaves}

    @abstractmethod
    def reference_weights(self) -> dict[str, Tensor]:
        """Return the weights of the reference that are not the policy's own; {} without a reference."""

    def _kept_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return (*ADAM_STATE, MASTER) if parameter in self.masters else ADAM_STATE

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        if key == MASTER:
            return self.masters[parameter].detach()
        return self.optimizer.state[self.leaves[parameter]][key]

    def shards(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the state as they are held, without copies."""
        self.onload()
        moments = {
            f"{key}.{name}": self._moment(parameter, key)
            for name, parameter in self.trained().items()
            if self.leaves[parameter] in self.optimizer.state
            for key in self._kept_of(parameter)
        }
        found = {"policy": dict(self.policy.state_dict()), "optimizer": moments}
        reference = self.reference_weights()
        return found | ({"reference": reference} if reference else {})

    def counters(self) -> Counters:
        """Return the part of the state that can be written as JSON."""
        return {"version": self.version, "nonfinite_in_row": self.nonfinite_in_row}

    def inventory(self) -> dict[str, dict[str, int]]:
        """Return the bytes of every tensor of the state, in one piece; may be a collective call."""
        return {
            section: {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
            for section, tensors in self.shards().items()
        }

    def parts(self, section: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors of the state as they are held, without copies; {} of a section that does not exist."""
        self.onload()
        if section == "optimizer":
            trained = self.trained()
            places = {name: name.partition(".") for name in names}
            return {name: self._moment(trained[owner], key) for name, (key, _, owner) in places.items()}
        held = dict(self.policy.state_dict()) if section == "policy" else self.reference_weights()
        return {name: held[name] for name in names if name in held}

    def gather(self, section: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors of the state: a collective call where they are sharded."""
        return {name: whole(part) for name, part in self.parts(section, names).items()}

    def state_dict(self) -> EngineState:
        return EngineState(self.shards(), self.counters())

    def state_shapes(self) -> StateShapes:
        """Return what a saved state must have."""
        trained = self.trained()
        masters = [name for name, parameter in trained.items() if parameter in self.masters]
        return StateShapes.of(self.policy, trained, self.reference_weights(), masters)

    def load_state_dict(self, saved: EngineState) -> None:
        check_fit(saved.tensors, self.state_shapes())
        self.start_load()
        for section, tensors in saved.tensors.items():
            self.put(section, tensors)
        self.set_counters(saved.state)

    def start_load(self) -> None:
        """Forget the moments."""
        self.onload()
        self.optimizer.state.clear()

    @torch.no_grad()
    def put(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors of a checked state, the policy first; what the engine has no use for is skipped."""
        if section == "optimizer":
            trained = self.trained()
            for name, tensor in tensors.items():
                key, _, owner = name.partition(".")
                parameter = trained[owner]
                leaf = self.leaves[parameter]
                part = tensor if key == "step" else self._part(tensor, parameter)
                if key != MASTER:
                    dtype = part.dtype if key == "step" else leaf.dtype
                    self.optimizer.state[leaf][key] = part.to(leaf.device, dtype, copy=True)
                elif parameter in self.masters:
                    leaf.copy_(part)
            return
        targets = dict(self.policy.state_dict()) if section == "policy" else self.reference_weights()
        for name in targets.keys() & tensors.keys():
            self._assign(targets[name], tensors[name])
        if section == "policy":
            self._take_masters(tensors)

    def room(self, section: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return where this process's parts of a checked state are to be written; see ``load_parts``.

        Args:
            section: of the state.
            saved: shapes and dtypes of whole tensors.
        """
        if section == "optimizer":
            trained = self.trained()
            saved = {name: tensor for name, tensor in saved.items() if self._reads(name, trained)}
            for name, tensor in saved.items():
                key, _, owner = name.partition(".")
                if key == MASTER:
                    continue
                leaf = self.leaves[trained[owner]]
                shape = tensor.shape if key == "step" else leaf.shape
                self.optimizer.state[leaf][key] = torch.zeros(shape, dtype=tensor.dtype, device=leaf.device)
        return self.parts(section, saved)

    def _reads(self, name: str, trained: Mapping[str, nn.Parameter]) -> bool:
        key, _, owner = name.partition(".")
        return key != MASTER or trained[owner] in self.masters

    def load_parts(self, section: str, parts: Mapping[str, Tensor]) -> None:
        """Use what was written into the tensors of ``room``; here they are the state itself."""
        if section == "policy":
            self._take_masters(parts)
        elif section == "optimizer":  # moments that were saved without float32 copies are in half precision
            for leaf, state in self.optimizer.state.items():
                state |= {key: moment.to(leaf.dtype) for key, moment in state.items() if key != "step"}

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return the part of a whole tensor that this process holds of ``like``."""
        return whole

    def _assign(self, target: Tensor, whole: Tensor) -> None:
        target.copy_(whole)

    def set_counters(self, state: Mapping[str, int]) -> None:
        """Continue counting from a saved state."""
        self.version = int(state["version"])
        self.nonfinite_in_row = int(state["nonfinite_in_row"])

    def save_shards(self, directory: Path) -> FileFacts:
        from embodrl.hybrid_engines.training.sharded_checkpoint import save_state  # imports torch's compiler

        return save_state(self, directory)

    def load_shards(self, directory: Path, counters: Mapping[str, int]) -> None:
        from embodrl.hybrid_engines.training.sharded_checkpoint import load_state

        load_state(self, directory, counters)

    def state_num_bytes(self) -> int:
        return self.state_shapes().num_bytes
