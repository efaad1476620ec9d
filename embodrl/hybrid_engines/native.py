"""Training in one process, on a CPU or one GPU."""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from embodrl.algorithms.advantages import Advantages, explained_variance
from embodrl.algorithms.episodes import element_weights, split_episodes
from embodrl.algorithms.losses import LossCounts, LossOutput, count_elements, element_counts
from embodrl.config.schema import ActorConfig, AlgorithmConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.hybrid_engines.base import EngineState, NonFiniteError, StepResult, TrainEngine
from embodrl.hybrid_engines.parallel import add_gradients, on_threads
from embodrl.hybrid_engines.precision import Precision, autocast, resolve_precision
from embodrl.hybrid_engines.schedule import LearningRates, learning_rates
from embodrl.models.base import VLAPolicy
from embodrl.registry import LOSSES, call_named
from embodrl.types import SamplingParams

logger = logging.getLogger(__name__)

MAX_NONFINITE_IN_ROW = 5
VALUE_GROUP = "value_head"
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
    """

    def __init__(
        self,
        policy: VLAPolicy,
        config: ActorConfig,
        total_iterations: int,
        device: torch.device | str,
        num_threads: int = 1,
        keep_reference: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.policy = policy.to(self.device)
        self.config = config
        self.total_iterations = total_iterations
        self.num_threads = num_threads if self.device.type == "cpu" else 1
        self.precision: Precision = resolve_precision(config.precision, self.device)
        self.version = 0
        self.nonfinite_in_row = 0
        groups = policy.trainable_groups()
        self.policy_parameters = [p for name, group in groups.items() if name != VALUE_GROUP for p in group]
        self.value_parameters = list(groups.get(VALUE_GROUP, []))
        self.optimizer = self._build_optimizer()
        self.reference = self._frozen_copy() if keep_reference else None

    def _frozen_copy(self) -> VLAPolicy:
        trained = {id(p) for p in self.policy_parameters}
        shared = {id(p): p for p in self.policy.parameters() if id(p) not in trained}
        reference = copy.deepcopy(self.policy, shared)
        for parameter in reference.parameters():
            if id(parameter) not in shared:
                parameter.requires_grad_(False)
        return reference

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
        critic_warmup = self.config.optim.critic_warmup_iterations if needs_values and self.value_parameters else 0
        rates = learning_rates(self.config.optim, self.version, self.total_iterations, critic_warmup)
        self._set_learning_rates(rates, train_policy=self.version >= critic_warmup)
        loss_fn = self._make_loss(algorithm, needs_values)
        chunks = flatten_chunks(batch, advantages, chunk_weights(batch, algorithm))
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
                totals[name] += float(value)
        self.version += 1
        result = {f"train/{name}": total / num_updates for name, total in totals.items()}
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
            arguments: dict[str, Any] = {
                "logprobs": output.logprobs.float(),
                "old_logprobs": micro.logprobs,
                "ref_logprobs": micro.ref_logprobs,
                "advantages": micro["advantages"],
                "valid": micro.valid,
                "entropy": None if output.entropy is None else output.entropy.float(),
                "weights": micro.get("weights"),
                "counts": counts,
            }
            return checked_loss(call_named(loss_fn, arguments | critic | settings), algorithm.loss_type)

        return compute

    def reference_logprobs(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
        if self.reference is None:
            raise EmbodrlError("the engine keeps no reference policy", "make it with keep_reference=True")
        reference = self.reference
        sampling = SamplingParams(algorithm.sampling.temperature, algorithm.sampling.top_k)
        result = torch.zeros_like(batch.logprobs).flatten(0, 1)
        chosen = batch.valid.any(-1).flatten().nonzero().squeeze(-1)
        inputs = batch.select("forward_inputs").fold()

        def compute(rows: Tensor) -> Tensor:
            micro = inputs[rows].to(self.device, non_blocking=True)
            with torch.no_grad(), autocast(self.precision, self.device):
                output = reference.evaluate_actions(
                    micro.forward_inputs, sampling, compute_entropy=False, compute_values=False
                )
            return output.logprobs.float().cpu()

        parts = chosen.split(self.config.micro_batch_size) if len(chosen) else ()
        outputs = on_threads([lambda rows=rows: compute(rows) for rows in parts], self.num_threads)
        for rows, logprobs in zip(parts, outputs, strict=True):
            result[rows] = logprobs
        return result.view_as(batch.logprobs)

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
        total, outputs = add_gradients([lambda rows=rows: compute(rows) for rows in chosen], trained, self.num_threads)
        metrics: dict[str, Tensor] = {}
        for output in outputs:
            for name, value in output.items():
                metrics[name] = metrics[name] + value if name in metrics else value
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


def loss_settings(algorithm: AlgorithmConfig, needs_values: bool) -> dict[str, Any]:
    """Return the settings that a loss may ask for."""
    settings: dict[str, Any] = {
        "logprob_type": algorithm.logprob_type,
        "length_normalized_ratio": algorithm.length_normalized_ratio,
        "surrogate": algorithm.surrogate,
        "clip_ratio_low": algorithm.clip_ratio_low,
        "clip_ratio_high": algorithm.clip_ratio_high,
        "clip_ratio_dual": algorithm.clip_ratio_dual,
        "drift_coef": algorithm.drift_coef,
        "entropy_type": algorithm.entropy_type,
        "entropy_bonus": algorithm.entropy_bonus,
        "kl_coef": algorithm.kl.coef if algorithm.kl.placement == "loss" else 0.0,
        "kl_estimator": algorithm.kl.estimator,
    }
    if needs_values:
        settings |= {
            "value_clip": algorithm.value_clip,
            "value_loss_coef": algorithm.value_loss_coef,
            "huber_delta": algorithm.huber_delta,
        }
    return settings


def checked_loss(output: object, name: str) -> LossOutput:
    """Return what a loss, perhaps the user's, returned, if it is one.

    Raises:
        EmbodrlError: it is none, or has no ``approx_kl``, which ``algorithm.target_kl`` and the console read.
    """
    if isinstance(output, LossOutput) and output.loss.ndim == 0 and "approx_kl" in output.metrics:
        return output
    raise EmbodrlError(
        f"loss_type '{name}' did not return a LossOutput with a scalar loss and the metric approx_kl",
        "return embodrl.algorithms.losses.LossOutput(loss, {'approx_kl': ..., ...}), the metrics detached",
    )


def chunk_weights(batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor | None:
    """Return ``float32[T,B]`` for ``algorithm.loss_agg``; None where every ratio counts the same."""
    if algorithm.loss_agg == "token_mean":
        return None
    episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
    num_elements = element_counts(batch.valid, batch.logprobs.shape[-1], algorithm.logprob_type)
    whole = element_counts(torch.ones_like(batch.valid), batch.logprobs.shape[-1], algorithm.logprob_type)
    length = int(whole[:, 0].sum()) if whole.numel() else 0
    return element_weights(episodes, num_elements, length, algorithm.loss_agg == "episode_mean")


def flatten_chunks(batch: TrajectoryBatch, advantages: Advantages, weights: Tensor | None = None) -> TrajectoryBatch:
    """Return the chunks of a rollout that have a valid action, as rows: time and environments become one axis.

    The columns ``advantages``, ``returns`` and, if given, ``weights`` are added to what a loss may ask for.
    """
    asked = ("forward_inputs", "logprobs", "values", "valid", "ref_logprobs")
    rows = batch.select(*(name for name in asked if name in batch)).replace(
        advantages=advantages.advantages, returns=advantages.returns, weights=weights
    )
    chosen = batch.valid.any(-1).flatten().nonzero().squeeze(-1)
    flat = rows.fold()
    return flat if len(chosen) == len(flat) else flat[chosen]
