"""The interface between an update and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from embodrl.algorithms.advantages import Advantages, kl_weights
from embodrl.algorithms.decoupled import COLUMNS, STALENESS, mismatch_terms, proximal_terms
from embodrl.algorithms.episodes import element_weights, split_episodes
from embodrl.algorithms.losses import LossCounts, LossOutput, count_elements, element_counts
from embodrl.algorithms.totals import WHOLE, Totals
from embodrl.config.schema import AlgorithmConfig, Config
from embodrl.data.shared_inputs import ROW
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError
from embodrl.names import label_of, parameters_of
from embodrl.specs import LOSSES, FunctionSpec
from embodrl.types import EvalOutput, SamplingParams


def loss_settings(algorithm: AlgorithmConfig, needs_values: bool) -> dict[str, object]:
    """Return the settings available to a loss."""
    settings = algorithm.arguments_of("loss", needs_values) | {
        "kl_coef": algorithm.kl.coef if algorithm.kl_parameters else 0.0,
        "kl_estimator": algorithm.kl.estimator,
    }
    return settings


def given_loss(loss: Callable[..., object], config: Config) -> FunctionSpec:
    """Return the spec of a loss that takes the place of ``algorithm.loss_type``.

    Raises:
        EmbodrlError: the run can't use it (``loss-unusable``), or it has a parameter that nothing is passed for
            (``function-parameter-unknown``).
    """
    label, algorithm = label_of(loss), config.algorithm
    spec, configured = LOSSES.of(label, loss), LOSSES.entry(algorithm.loss_type)

    def missing(*names: str) -> list[str]:
        return [] if spec.parameters is None else [name for name in names if name not in spec.parameters]

    if configured.off_policy:
        raise unusable_loss(label, "is of rollouts, and the algorithm is off policy", "choose an algorithm such as ppo")
    if spec.needs_values and not configured.needs_values:
        hint = "choose an algorithm with one, such as ppo"
        raise unusable_loss(label, "reads values, and there is no critic", hint)
    if configured.needs_values and not spec.needs_values and config.actor.optim.critic_warmup_iterations:
        hint = "set actor.optim.critic_warmup_iterations=0"
        raise unusable_loss(label, "does not train the critic, which the first updates train alone", hint)
    if (algorithm.decoupled.enabled or config.recomputes_logprobs) and missing("prox_logprobs", "behavior_weights"):
        hint = "name both, or set algorithm.decoupled.enabled=false and algorithm.recompute_logprobs=false"
        raise unusable_loss(label, "does not name both prox_logprobs and behavior_weights", hint)
    if unread := missing(*algorithm.kl_parameters):
        hint = "name it, or set algorithm.kl.placement=reward or algorithm.kl.coef=0"
        raise unusable_loss(label, f"has no parameter {' or '.join(unread)} to add the KL with", hint)
    return spec


def unusable_loss(label: str, problem: str, hint: str) -> EmbodrlError:
    """Return the error of a given loss."""
    return EmbodrlError(f"the loss {label} {problem}", hint, code="loss-unusable")


def checked_loss(output: object, name: str) -> LossOutput:
    """Return the result of a loss, perhaps the user's, after validating it.

    Raises:
        EmbodrlError: it is not a valid LossOutput, or has no ``approx_kl``, which ``algorithm.target_kl`` and the
            console read.
    """
    if isinstance(output, LossOutput) and output.loss.ndim == 0 and "approx_kl" in output.metrics:
        return output
    raise EmbodrlError(
        f"loss '{name}' did not return a LossOutput with a scalar loss and the metric approx_kl",
        "return embodrl.LossOutput(loss, {'approx_kl': ..., ...}), the metrics detached",
        code="loss-result",
    )


def chunk_weights(
    batch: TrajectoryBatch, trained: Tensor, algorithm: AlgorithmConfig, totals: Totals = WHOLE
) -> Tensor | None:
    """Return ``float32[T,B]`` for ``algorithm.loss_agg``, given ``trained bool[T,B]``; None for equal weights."""
    if algorithm.loss_agg == "token_mean":
        return None
    episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
    drawn = batch.drawn
    num_elements = element_counts(drawn & trained.unsqueeze(-1), batch.logprobs.shape[-1], algorithm.logprob_type)
    whole = element_counts(torch.ones_like(drawn), batch.logprobs.shape[-1], algorithm.logprob_type)
    length = int(whole[:, 0].sum()) if whole.numel() else 0
    return element_weights(episodes, num_elements, length, algorithm.loss_agg == "episode_mean", totals)


SOLVED = "solved"
"""Column of chunks whose episode was solved, for losses with ``algorithm.positive_coef``."""


def solved_column(batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> dict[str, Tensor]:
    """Return the column ``solved bool[T,B]`` if the loss reads it.

    Raises:
        EmbodrlError: the environment does not report success.
    """
    if not algorithm.positive_coef:
        return {}
    if batch.success is None:
        raise EmbodrlError(
            "the likelihood of solved episodes needs to know which they are",
            "set algorithm.positive_coef=0, or let the environment report success",
            code="success-unknown",
        )
    episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
    solved = torch.zeros_like(batch.success)
    played = episodes.index >= 0
    solved[played] = episodes.of(batch.success)[episodes.index[played]]
    return {SOLVED: solved}


KL_WEIGHTS = "kl_weights"
"""Column of the factors of tasks on ``algorithm.kl.coef``, where they differ."""


def kl_weight_column(batch: TrajectoryBatch, config: Config) -> dict[str, Tensor]:
    """Return the column ``kl_weights float32[T,B]`` if the loss reads it."""
    if KL_WEIGHTS not in config.algorithm.kl_parameters:
        return {}
    return {KL_WEIGHTS: kl_weights(batch, config.algorithm, config.env.tasks)}


def trained_chunks(batch: TrajectoryBatch, advantages: Advantages, fraction: float = 1.0) -> Tensor:
    """Return ``bool[T,B]``: chunks with a valid action and an advantage.

    Critic-free estimators give no advantage to episodes that a fault ended; counting these would shrink the gradient of
    all others. Of these chunks ``fraction`` trains, rounded up: the largest by mean ``|A|``; of ties, the earlier.
    """
    trained = batch.valid.any(-1) & advantages.valid.any(-1)
    if fraction == 1.0:
        return trained
    size = (advantages.advantages.abs() * advantages.valid).sum(-1) / advantages.valid.sum(-1).clamp_min(1)
    # Below every mean of ``|A|``, so that untrained chunks come last.
    size = size.masked_fill(~trained, -1.0).flatten()
    kept = math.ceil(fraction * int(trained.sum()))
    chosen = torch.zeros_like(size, dtype=torch.bool)
    # Stable, so that the order of ties is the same on every machine.
    chosen[size.argsort(descending=True, stable=True)[:kept]] = True
    return chosen.view_as(trained)


def flatten_chunks(
    batch: TrajectoryBatch, advantages: Advantages, trained: Tensor, weights: Tensor | None = None
) -> TrajectoryBatch:
    """Return the trained chunks (``bool[T,B]``) of a rollout as rows: time and environments become one axis.

    The columns ``advantages``, ``returns`` and, if given, ``weights`` become available to the loss.
    """
    asked = ("forward_inputs", ROW, "logprobs", "values", "valid", "ref_logprobs", SOLVED, KL_WEIGHTS, *COLUMNS)
    rows = batch.select(*(name for name in asked if name in batch)).replace(
        advantages=advantages.advantages, returns=advantages.returns, weights=weights
    )
    chosen = trained.flatten().nonzero().squeeze(-1)
    flat = rows.fold()
    # Indexing copies; skipped in the usual case of all chunks.
    return flat if len(chosen) == len(flat) else flat[chosen]


def counts_of(minibatch: TrajectoryBatch, algorithm: AlgorithmConfig, device: torch.device) -> LossCounts:
    """Return the counts of a minibatch, on a device."""
    return count_elements(
        minibatch.drawn.to(device),
        action_dim=minibatch.logprobs.shape[-1],
        logprob_type=algorithm.logprob_type,
        entropy_type=algorithm.entropy_type,
        num_values=minibatch["advantages"].shape[-1],
        solved=minibatch[SOLVED].to(device) if SOLVED in minibatch else None,
    )


def _with_router_loss(
    loss: LossOutput, router_loss: Tensor, coef: float, micro: TrajectoryBatch, counts: LossCounts
) -> LossOutput:
    """Add ``coef`` times the load-balancing loss, a mean over micro-batches weighted by their written tokens."""
    share = micro.drawn.sum() * micro.logprobs.shape[-1] / counts.tokens
    term = router_loss * share
    return LossOutput(loss.loss + coef * term, loss.metrics | {"router_aux_loss": term.detach()})


def make_loss(
    evaluate: Callable[..., EvalOutput], algorithm: AlgorithmConfig, spec: FunctionSpec
) -> Callable[[LossCounts, TrajectoryBatch], LossOutput]:
    """Return the loss of a micro-batch, given the counts of its minibatch.

    ``evaluate`` is like ``VLAPolicy.evaluate_actions``; ``spec`` is of the loss.

    Raises:
        EmbodrlError: when called: the loss needs values that the policy lacks, or returns no ``LossOutput``.
    """
    sampling = SamplingParams(algorithm.sampling.temperature, algorithm.sampling.top_k)
    loss_fn = LOSSES.get(spec.name) if isinstance(spec.target, str) else spec.target
    needs_values = spec.needs_values
    settings = loss_settings(algorithm, needs_values)
    names, _, takes_rest = parameters_of(loss_fn)
    reads_errors = "errors" in (spec.parameters or ())
    router = algorithm.router_aux_loss_coef
    wanted_terms = {"compute_values": needs_values} | ({"compute_router_loss": True} if router else {})

    def compute(counts: LossCounts, micro: TrajectoryBatch) -> LossOutput:
        output = evaluate(micro.forward_inputs, sampling, **wanted_terms)
        critic: dict[str, object] = {}
        if needs_values:
            if output.values is None:
                raise EmbodrlError(
                    f"loss {spec.name} needs values, which the policy does not provide",
                    "set model.add_value_head to true",
                    code="value-head-missing",
                )
            critic = {"values": output.values.float(), "old_values": micro["values"], "returns": micro["returns"]}
        # float32: the ratio is an exponential of a difference of nearly equal numbers.
        logprobs = output.logprobs.float()
        proximal = proximal_terms(micro, logprobs.detach(), algorithm, counts)
        arguments: dict[str, object] = {
            "logprobs": logprobs,
            "old_logprobs": micro.logprobs,
            "ref_logprobs": micro.ref_logprobs,
            "prox_logprobs": proximal.logprobs if proximal else None,
            "behavior_weights": proximal.weights if proximal else None,
            "advantages": micro["advantages"],
            "valid": micro.drawn,
            "entropy": None if output.entropy is None else output.entropy.float(),
            "weights": micro.get("weights"),
            "solved": micro.get(SOLVED),
            "kl_weights": micro.get(KL_WEIGHTS),
            "counts": counts,
        }
        if reads_errors and output.errors is not None:
            arguments |= {"errors": output.errors.float(), "old_errors": micro.forward_inputs["flow_error"]}
        arguments |= critic | settings
        wanted = {name: value for name, value in arguments.items() if takes_rest or name in names}
        loss = checked_loss(loss_fn(**wanted), spec.name)
        if output.router_loss is not None:
            loss = _with_router_loss(loss, output.router_loss, router, micro, counts)
        # Computed with this step's weights; only the first minibatch, before any step, is reported.
        mismatch = mismatch_terms(logprobs.detach(), micro.logprobs, micro.drawn, micro[STALENESS])
        return LossOutput(loss.loss, loss.metrics | mismatch | (proximal.metrics if proximal else {}))

    return compute
