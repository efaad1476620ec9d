"""Training in one process, on a CPU or one GPU."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from embodrl.algorithms.advantages import Advantages, explained_variance
from embodrl.algorithms.decoupled import proximal_columns, proximal_terms, staleness_metrics, staleness_of
from embodrl.algorithms.losses import LossCounts, LossOutput, count_elements
from embodrl.config.schema import ActorConfig, AlgorithmConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.hybrid_engines.base import EngineState, NonFiniteError, StepResult, TrainEngine
from embodrl.hybrid_engines.copies import frozen_copy
from embodrl.hybrid_engines.objective import checked_loss, chunk_weights, flatten_chunks, is_largest, loss_settings
from embodrl.hybrid_engines.parallel import add_gradients, on_threads
from embodrl.hybrid_engines.precision import Precision, autocast, resolve_precision
from embodrl.hybrid_engines.schedule import LearningRates, learning_rates
from embodrl.models.base import VLAPolicy
from embodrl.names import call_named
from embodrl.registry import LOSSES
from embodrl.types import SamplingParams

logger = logging.getLogger(__name__)

MAX_NONFINITE_IN_ROW = 5
VALUE_GROUP = "value_head"
# A chunk that waits for inference holds up simulators; a micro-batch that waits holds up nobody.
NICENESS_BESIDE_ROLLOUTS = 10
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


class NativeTrainEngine(TrainEngine):
    """AdamW on the policy's own weights; the rollout uses the same tensors.

    Args:
        policy: its ``trainable_groups`` train, the rest stays as it is; moved to the device.
        config: batch sizes, precision, optimizer.
        total_iterations: length of the run, for the learning-rate schedule.
        device: where the policy trains.
        num_threads: micro-batches computed at the same time on a CPU.
        keep_reference: keep a frozen copy of the policy as it is now. Only what trains is copied, the rest is shared,
            so that it costs as much memory again as the trained weights.
        may_be_stale: rollouts may come from older policies; every update then tells how old they are. Since they are
            played at the same time, on a CPU inference and simulators then go before training.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        config: ActorConfig,
        total_iterations: int,
        device: torch.device | str,
        num_threads: int = 1,
        keep_reference: bool = False,
        may_be_stale: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.policy = policy.to(self.device)
        self.config = config
        self.total_iterations = total_iterations
        self.num_threads = num_threads if self.device.type == "cpu" else 1
        self.precision: Precision = resolve_precision(config.precision, self.device)
        self.may_be_stale = may_be_stale
        self.niceness = NICENESS_BESIDE_ROLLOUTS if may_be_stale and self.device.type == "cpu" else 0
        self.version = 0
        self.nonfinite_in_row = 0
        groups = policy.trainable_groups()
        self.policy_parameters = [p for name, group in groups.items() if name != VALUE_GROUP for p in group]
        self.value_parameters = list(groups.get(VALUE_GROUP, []))
        self.optimizer = self._build_optimizer()
        self.reference = frozen_copy(self.policy, self.policy_parameters) if keep_reference else None

    def _build_optimizer(self) -> torch.optim.AdamW:
        optim = self.config.optim
        param_groups: list[dict[str, Any]] = []
        for role, parameters in (("policy", self.policy_parameters), ("value", self.value_parameters)):
            # Biases, norms and layer scales are vectors; decaying them only shrinks activations.
            for decay, chosen in (
                (optim.weight_decay, [p for p in parameters if p.ndim > 1]),
                (0.0, [p for p in parameters if p.ndim <= 1]),
            ):
                if chosen:
                    param_groups.append({"params": chosen, "weight_decay": decay, "role": role})
        return torch.optim.AdamW(param_groups, lr=0.0, betas=optim.betas, eps=optim.eps, fused=True)

    def update(
        self,
        batch: TrajectoryBatch,
        advantages: Advantages,
        algorithm: AlgorithmConfig,
        generator: torch.Generator,
    ) -> dict[str, float]:
        needs_values = bool(LOSSES.entry(algorithm.loss_type).facts.get("needs_values"))
        critic_warmup = self._critic_warmup(algorithm)
        rates = learning_rates(self.config.optim, self.version, self.total_iterations, critic_warmup)
        self._set_learning_rates(rates, train_policy=self.version >= critic_warmup)
        loss_fn = self._make_loss(algorithm, needs_values)
        staleness = staleness_of(batch.policy_version, batch.valid, self.version)
        proximal = proximal_columns(batch, algorithm, self._policy_staleness(batch, algorithm))
        chunks = flatten_chunks(batch.replace(**proximal), advantages, chunk_weights(batch, algorithm))
        totals: defaultdict[str, float] = defaultdict(float)
        num_updates, num_nonfinite, stopped = 0, 0, False
        for minibatch in chunks.minibatches(self.config.global_batch_size, algorithm.update_epoch, generator):
            counts = self._counts(minibatch, algorithm)
            loss, metrics = self.forward_backward(minibatch, lambda micro, counts=counts: loss_fn(micro, counts))
            if algorithm.target_kl is not None and float(metrics["approx_kl"]) > algorithm.target_kl:
                self.optimizer.zero_grad(set_to_none=True)
                stopped = True
                break
            step = self.optimizer_step(loss)
            if not step.applied:
                num_nonfinite += 1
                continue
            num_updates += 1
            totals["grad_norm"] += step.grad_norm
            for name, value in metrics.items():
                known = totals.get(name, -math.inf)
                totals[name] = max(known, float(value)) if is_largest(name) else totals[name] + float(value)
        self.version += 1
        result = {f"train/{name}": total if is_largest(name) else total / num_updates for name, total in totals.items()}
        if self.may_be_stale or algorithm.decoupled.enabled or bool(staleness.any()):
            result |= staleness_metrics(staleness, batch.valid)
        if needs_values:
            result["train/explained_variance"] = explained_variance(
                batch["values"], advantages.returns, advantages.valid
            )
        return result | {
            "train/lr": rates.policy,
            "train/value_lr": rates.value,
            "train/num_updates": float(num_updates),
            "train/num_nonfinite": float(num_nonfinite),
            "train/early_stop": float(stopped),
        }

    def _critic_warmup(self, algorithm: AlgorithmConfig) -> int:
        """Return how many of the first updates leave the policy as it is."""
        needs_values = bool(LOSSES.entry(algorithm.loss_type).facts.get("needs_values"))
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
        for parameter in self.policy_parameters:
            parameter.requires_grad_(train_policy)

    def _counts(self, minibatch: TrajectoryBatch, algorithm: AlgorithmConfig) -> LossCounts:
        return count_elements(
            minibatch.valid.to(self.device),
            action_dim=minibatch.logprobs.shape[-1],
            logprob_type=algorithm.logprob_type,
            entropy_type=algorithm.entropy_type,
            num_values=minibatch["advantages"].shape[-1],
        )

    def _make_loss(
        self, algorithm: AlgorithmConfig, needs_values: bool
    ) -> Callable[[TrajectoryBatch, LossCounts], LossOutput]:
        sampling = SamplingParams(algorithm.sampling.temperature, algorithm.sampling.top_k)
        loss_fn = LOSSES.get(algorithm.loss_type)
        settings = loss_settings(algorithm, needs_values)

        def compute(micro: TrajectoryBatch, counts: LossCounts) -> LossOutput:
            output = self.policy.evaluate_actions(micro.forward_inputs, sampling, compute_values=needs_values)
            critic: dict[str, Any] = {}
            if needs_values:
                if output.values is None:
                    raise EmbodrlError(
                        f"loss {algorithm.loss_type} needs values, which the policy does not give",
                        "set model.add_value_head to true",
                    )
                critic = {"values": output.values.float(), "old_values": micro["values"], "returns": micro["returns"]}
            logprobs = output.logprobs.float()
            proximal = proximal_terms(micro, logprobs.detach(), algorithm, counts)
            arguments: dict[str, Any] = {
                "logprobs": logprobs,
                "old_logprobs": micro.logprobs,
                "ref_logprobs": micro.ref_logprobs,
                "prox_logprobs": proximal.logprobs if proximal else None,
                "behavior_weights": proximal.weights if proximal else None,
                "advantages": micro["advantages"],
                "valid": micro.valid,
                "entropy": None if output.entropy is None else output.entropy.float(),
                "weights": micro.get("weights"),
                "counts": counts,
            }
            loss = checked_loss(call_named(loss_fn, arguments | critic | settings), algorithm.loss_type)
            return LossOutput(loss.loss, loss.metrics | proximal.metrics) if proximal else loss

        return compute

    def reference_logprobs(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
        if self.reference is None:
            raise EmbodrlError("the engine keeps no reference policy", "make it with keep_reference=True")
        return self._logprobs(self.reference, batch, batch.valid.any(-1), algorithm)

    def proximal(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor | None]:
        needs_values = bool(LOSSES.entry(algorithm.loss_type).facts.get("needs_values"))
        changed = self._policy_staleness(batch, algorithm) > 0
        stale = staleness_of(batch.policy_version, batch.valid, self.version) > 0 if needs_values else changed
        known = batch.logprobs.flatten(2)
        if needs_values:
            known = torch.cat([known, batch["values"]], -1)
        outputs = self._outputs(self.policy, batch, stale, known.clone(), algorithm, needs_values)
        num_tokens = math.prod(batch.logprobs.shape[2:])
        # In a warm-up of the critic the policy stays as it is: its log-probs then stay those of the rollout to the bit.
        logprobs = torch.where(changed[..., None], outputs[..., :num_tokens], known[..., :num_tokens])
        return logprobs.view_as(batch.logprobs), outputs[..., num_tokens:] if needs_values else None

    def _logprobs(
        self, policy: VLAPolicy, batch: TrajectoryBatch, wanted: Tensor, algorithm: AlgorithmConfig
    ) -> Tensor:
        """Return ``float32[T,B,C,A]``: a policy's log-probs of the chunks ``wanted bool[T,B]``, else 0."""
        zeros = torch.zeros_like(batch.logprobs).flatten(2)
        return self._outputs(policy, batch, wanted, zeros, algorithm, False).view_as(batch.logprobs)

    def _outputs(
        self,
        policy: VLAPolicy,
        batch: TrajectoryBatch,
        wanted: Tensor,
        result: Tensor,
        algorithm: AlgorithmConfig,
        with_values: bool,
    ) -> Tensor:
        """Return ``result float32[T,B,C*A(+K)]`` with a policy's log-probs, and values, of ``wanted bool[T,B]``."""
        sampling = SamplingParams(algorithm.sampling.temperature, algorithm.sampling.top_k)
        rows_of_result = result.flatten(0, 1)
        chosen = wanted.flatten().nonzero().squeeze(-1)
        inputs = batch.select("forward_inputs").fold()

        def compute(rows: Tensor) -> Tensor:
            micro = inputs[rows].to(self.device, non_blocking=True)
            with torch.no_grad(), autocast(self.precision, self.device):
                output = policy.evaluate_actions(
                    micro.forward_inputs, sampling, compute_entropy=False, compute_values=with_values
                )
            parts = [output.logprobs.float().flatten(1)]
            if with_values:
                assert output.values is not None
                parts.append(output.values.float())
            return torch.cat(parts, -1).cpu()

        parts = chosen.split(self.config.micro_batch_size) if len(chosen) else ()
        outputs = on_threads([lambda rows=rows: compute(rows) for rows in parts], self.num_threads, self.niceness)
        for rows, output in zip(parts, outputs, strict=True):
            rows_of_result[rows] = output
        return rows_of_result.view_as(result)

    def forward_backward(
        self, minibatch: TrajectoryBatch, loss_fn: Callable[[TrajectoryBatch], LossOutput]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        def compute(rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            micro = minibatch[rows].to(self.device, non_blocking=True)
            with autocast(self.precision, self.device):
                output = loss_fn(micro)
            return output.loss, output.metrics

        chosen = torch.arange(len(minibatch)).split(self.config.micro_batch_size)
        trained = [p for p in (*self.policy_parameters, *self.value_parameters) if p.requires_grad]
        total, outputs = add_gradients(
            [lambda rows=rows: compute(rows) for rows in chosen], trained, self.num_threads, self.niceness
        )
        metrics: dict[str, Tensor] = {}
        for output in outputs:
            for name, value in output.items():
                known = metrics.get(name)
                both = torch.maximum if is_largest(name) else torch.add
                metrics[name] = value if known is None else both(known, value)
        return total, metrics

    def optimizer_step(self, loss: Tensor) -> StepResult:
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        grad_norm = float(nn.utils.clip_grad_norm_(trained, self.config.optim.clip_grad))
        applied = math.isfinite(grad_norm) and math.isfinite(float(loss))
        if applied:
            self.optimizer.step()
            self.nonfinite_in_row = 0
        else:
            self.nonfinite_in_row += 1
            logger.warning("loss %s, gradient norm %s: no update", float(loss), grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        if self.nonfinite_in_row >= MAX_NONFINITE_IN_ROW:
            raise NonFiniteError(
                f"the loss or its gradient was not finite {self.nonfinite_in_row} times in a row; the weights are "
                "as they were before",
                "lower actor.optim.lr and actor.optim.value_lr, set actor.precision to fp32, and look for NaN in the "
                "observations and rewards",
            )
        return StepResult(applied, grad_norm)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.policy.state_dict().items()

    def _trained_names(self) -> dict[str, nn.Parameter]:
        trained = {id(p) for p in (*self.policy_parameters, *self.value_parameters)}
        return {name: p for name, p in self.policy.named_parameters() if id(p) in trained}

    def state_dict(self) -> EngineState:
        moments = {
            f"{key}.{name}": self.optimizer.state[parameter][key]
            for name, parameter in self._trained_names().items()
            if parameter in self.optimizer.state
            for key in ADAM_STATE
        }
        state = {"version": self.version, "nonfinite_in_row": self.nonfinite_in_row}
        tensors = {"policy": dict(self.policy.state_dict()), "optimizer": moments}
        if self.reference is not None:
            tensors["reference"] = self._reference_weights()
        return EngineState(tensors, state)

    def _reference_weights(self) -> dict[str, Tensor]:
        """Return the weights of the reference that are not the policy's own."""
        if self.reference is None:
            return {}
        trained = {id(p) for p in self.policy_parameters}
        names = [name for name, p in self.policy.named_parameters() if id(p) in trained]
        frozen = dict(self.reference.named_parameters())
        return {name: frozen[name].data for name in names}

    def load_state_dict(self, saved: EngineState) -> None:
        remedy = "resume with the model settings that the checkpoint was made with"
        try:
            self.policy.load_state_dict(saved.tensors["policy"], strict=True)
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint's weights do not fit the policy: {error}", remedy) from error
        self._load_reference(saved, remedy)
        parameters = self._trained_names()
        moments = dict(saved.tensors["optimizer"])
        self.optimizer.state.clear()
        for name, parameter in parameters.items():
            tensors = {key: moments.pop(f"{key}.{name}", None) for key in ADAM_STATE}
            found = {key: tensor for key, tensor in tensors.items() if tensor is not None}
            if not found:
                continue  # not trained yet when the checkpoint was made
            if len(found) < len(ADAM_STATE) or found["exp_avg"].shape != parameter.shape:
                raise CheckpointError(f"the checkpoint's optimizer state does not fit '{name}'", remedy)
            self.optimizer.state[parameter] = {key: t.to(self.device, copy=True) for key, t in found.items()}
        if moments:
            raise CheckpointError(f"the checkpoint's optimizer state has unknown names, e.g. '{min(moments)}'", remedy)
        self.version = int(saved.state["version"])
        self.nonfinite_in_row = int(saved.state["nonfinite_in_row"])

    def _load_reference(self, saved: EngineState, remedy: str) -> None:
        if self.reference is None:
            return
        weights, kept = self._reference_weights(), saved.tensors.get("reference")
        if kept is None or kept.keys() != weights.keys():
            raise CheckpointError("the checkpoint has no reference policy that fits", remedy)
        for name, tensor in weights.items():
            if kept[name].shape != tensor.shape:
                raise CheckpointError(f"the checkpoint's reference policy does not fit '{name}'", remedy)
            tensor.copy_(kept[name])

    def state_num_bytes(self) -> int:
        weights = sum(tensor.numel() * tensor.element_size() for _, tensor in self.weights())
        weights += sum(tensor.numel() * tensor.element_size() for tensor in self._reference_weights().values())
        return weights + 2 * sum(p.numel() * p.element_size() for p in self._trained_names().values())
