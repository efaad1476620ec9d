"""The contract of every policy, as checks: used by `embodrl model check` and the tests of all families.

PPO and related algorithms are correct only if training computes the rollout's log-probs, whatever the batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodrl.hybrid_engines.training.precision import autocast
from embodrl.models.base import IMITATION, VLAPolicy, lacking
from embodrl.types import Observation, PolicyOutput, SamplingParams

SFT_STEPS = 10


@dataclass(frozen=True)
class Subject:
    """A policy under test.

    Attributes:
        policy: policy in evaluation mode; its weights change.
        load: loads a new policy from the directory of ``save_pretrained``.
        tolerance: largest difference of log-probs, values and actions that counts as rounding.
    """

    policy: VLAPolicy
    observation: Observation
    sampling: SamplingParams
    load: Callable[[Path], VLAPolicy]
    tolerance: float = 1e-5
    sft_lr: float = 1e-3

    def act(self, seed: int = 0, mode: str = "train") -> PolicyOutput:
        generator = torch.Generator().manual_seed(seed)
        return self.policy.predict_action_batch(
            self.observation, "train" if mode == "train" else "eval", self.sampling, generator
        )


def stir(policy: VLAPolicy, std: float = 0.02) -> None:
    """Perturb every parameter, so that zero-initialised layers hide nothing."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * std).to(parameter))


def shape_problems(subject: Subject) -> Iterator[str]:
    """Actions are ``float32[B,C,A]`` and finite; log-probs and values are finite float32, batch first."""
    output = subject.act()
    policy = subject.policy
    wanted = (subject.observation.batch_size, policy.num_action_chunks, policy.action_dim)
    if output.actions.shape != wanted or output.actions.dtype != np.float32:
        yield f"actions are {output.actions.dtype}{list(output.actions.shape)}, not float32{list(wanted)}"
    if not np.isfinite(output.actions).all():
        yield "actions are not finite"
    for name, tensor in (("log-probs", output.logprobs), ("values", output.values)):
        if tensor is not None and (tensor.dtype != torch.float32 or len(tensor) != wanted[0]):
            yield f"{name} are {str(tensor.dtype)[6:]}{list(tensor.shape)}, not float32 with {wanted[0]} rows"
        if tensor is not None and not bool(tensor.isfinite().all()):
            yield f"{name} are not finite"


def ratio_problems(subject: Subject) -> Iterator[str]:
    """Before the first update every probability ratio is 1, and training reads the rollout's values."""
    output = subject.act()
    again = subject.policy.evaluate_actions(output.forward_inputs, subject.sampling)
    yield from _difference("log-probs of rollout and training", output.logprobs, again.logprobs, subject)
    yield from _difference("values of rollout and training", output.values, again.values, subject)


def row_problems(subject: Subject) -> Iterator[str]:
    """A row does not depend on the other rows of its batch, in training and in acting."""
    output = subject.act()
    greedy = subject.act(mode="eval").actions
    for row in range(subject.observation.batch_size):
        part = {name: value[row : row + 1] for name, value in output.forward_inputs.items()}
        alone = subject.policy.evaluate_actions(part, subject.sampling)
        yield from _difference(f"log-probs of row {row} alone", output.logprobs[row : row + 1], alone.logprobs, subject)
        if output.values is not None:
            yield from _difference(f"values of row {row} alone", output.values[row : row + 1], alone.values, subject)
        seen = subject.observation.select(np.array([row]))
        acted = subject.policy.predict_action_batch(seen, "eval", subject.sampling).actions
        found = torch.from_numpy(acted)
        wanted = torch.from_numpy(greedy[row : row + 1])
        yield from _difference(f"greedy actions of row {row} alone", wanted, found, subject)


def seed_problems(subject: Subject) -> Iterator[str]:
    """Sampling depends on the generator and nothing else; greedy actions need none."""
    first = subject.act(1)
    again = subject.act(1)
    other = subject.act(2)
    if not np.array_equal(first.actions, again.actions) or not torch.equal(first.logprobs, again.logprobs):
        yield "the same generator gives other actions or log-probs: draw from the generator that is passed"
    # Log-probs of a family that writes text, which has no actions.
    one, two = (output.actions if output.actions.size else output.logprobs.numpy() for output in (first, other))
    if np.array_equal(one, two):
        yield "another generator gives the same actions: sample in mode 'train'"
    if not np.array_equal(subject.act(1, "eval").actions, subject.act(2, "eval").actions):
        yield "greedy actions depend on the generator"


def gradient_problems(subject: Subject) -> Iterator[str]:
    """The RL loss reaches every trained group, and nothing else."""
    policy = subject.policy
    policy.zero_grad(set_to_none=True)
    result = policy.evaluate_actions(subject.act().forward_inputs, subject.sampling)
    loss = result.logprobs.sum()
    for part in (result.entropy, result.values):
        loss = loss + part.sum() if part is not None else loss
    loss.backward()
    yield from stray_gradients(policy)
    for name in sorted(policy.trainable_groups().keys() - reached_groups(policy)):
        yield f"no gradient reaches '{name}', which trains"
    policy.zero_grad(set_to_none=True)


def stray_gradients(policy: VLAPolicy) -> Iterator[str]:
    """Yield gradient problems: not finite, in frozen parameters, or in parameters of no group."""
    trained = {id(parameter) for group in policy.trainable_groups().values() for parameter in group}
    unused = {id(parameter) for parameter in policy.unused_parameters()}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            yield f"{name} trains, and is in no group of parts()"
        if parameter.requires_grad and id(parameter) in unused:
            yield f"{name} is one of unused_parameters(), and trains"
        if parameter.grad is not None and not parameter.requires_grad:
            yield f"{name} is frozen, and got a gradient"
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            yield f"the gradient of {name} is not finite"


def reached_groups(policy: VLAPolicy) -> set[str]:
    """Return the trainable groups with a nonzero gradient."""
    return {name for name, group in policy.trainable_groups().items() if any(map(_has_gradient, group))}


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool((parameter.grad != 0).any())


def file_problems(subject: Subject) -> Iterator[str]:
    """A saved policy comes back with the same weights, and its actions are bit-identical."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "policy"
        subject.policy.save_pretrained(directory)
        again = subject.load(directory).eval()
    before = subject.policy.state_dict()
    after = again.state_dict()
    for name in sorted(before.keys() ^ after.keys()):
        yield f"{name} is {'not saved' if name in before else 'new'} after save_pretrained and loading"
    for name in sorted(before.keys() & after.keys()):
        if not torch.equal(before[name], after[name]):
            yield f"{name} has other values after save_pretrained and loading"
            return
    outputs = [subject.act(3), Subject(again, subject.observation, subject.sampling, subject.load).act(3)]
    if not np.array_equal(outputs[0].actions, outputs[1].actions):
        yield "the loaded policy acts differently"


def imitation_problems(subject: Subject) -> Iterator[str]:
    """The imitation loss is finite, reaches only trainable parameters, falls on one batch, and changes the weights."""
    policy = subject.policy
    batch = _demonstrations(subject)
    trained = [parameter for group in policy.trainable_groups().values() for parameter in group]
    optimizer = torch.optim.AdamW(trained, lr=subject.sft_lr, weight_decay=0.0)
    losses = list[float]()
    for step in range(SFT_STEPS + 1):
        loss, scalars = policy.sft_loss(batch)
        if loss.ndim or not bool(loss.isfinite()) or any(value.ndim for value in scalars.values()):
            yield f"sft_loss returned {loss.detach().tolist()} and {sorted(scalars)}, not finite scalars"
            return
        losses.append(float(loss.detach()))
        if step == SFT_STEPS:
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if step == 0:
            yield from stray_gradients(policy)
            if not reached_groups(policy) - {"value_head"}:
                yield "sft_loss gives no part of the network a gradient"
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if losses[-1] >= losses[0]:
        yield f"sft_loss did not fall in {SFT_STEPS} steps on one batch: {losses[0]:.4g}, then {losses[-1]:.4g}"


def _demonstrations(subject: Subject) -> dict[str, Tensor]:
    policy = subject.policy
    rows = subject.observation.batch_size
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(rows, policy.action_horizon, policy.action_dim, generator=generator) * 1.8 - 0.9
    mask = torch.ones(rows, policy.action_horizon, dtype=torch.bool, device=policy.device)
    return policy.sft_inputs(subject.observation, actions) | {"action_mask": mask}


def half_precision_problems(subject: Subject) -> Iterator[str]:
    """Acting, RL and imitation work under bfloat16 autocast, in which training computes here."""
    policy = subject.policy
    with autocast("bf16", policy.device):
        yield from [*shape_problems(subject), *gradient_problems(subject)]
    if lacking(policy, IMITATION):
        return
    with autocast("bf16", policy.device):
        loss, _ = policy.sft_loss(_demonstrations(subject))
    loss.backward()
    yield from stray_gradients(policy)
    policy.zero_grad(set_to_none=True)


def _difference(what: str, wanted: Tensor | None, found: Tensor | None, subject: Subject) -> Iterator[str]:
    if wanted is None or found is None:
        if (wanted is None) != (found is None):
            yield f"{what}: one of both has none"
        return
    if wanted.shape != found.shape:
        yield f"{what}: shapes {list(wanted.shape)} and {list(found.shape)}"
        return
    if not wanted.numel():  # the actions of a family that writes text
        return
    largest = float((wanted.detach().cpu() - found.detach().cpu()).abs().max())
    if not largest <= subject.tolerance:
        yield f"{what} differ by up to {largest:.2g}"


CHECKS: dict[str, Callable[[Subject], Iterator[str]]] = {
    "shapes": shape_problems,
    "ratio-is-one": ratio_problems,
    "rows-are-independent": row_problems,
    "seeds-decide": seed_problems,
    "gradients": gradient_problems,
    "save-and-load": file_problems,
    "imitation": imitation_problems,
}
"""Checks by stable name, in running order, in float32: the last one changes the weights."""
HALF_PRECISION = {"half-precision": half_precision_problems}
"""As ``CHECKS``, if training computes in bfloat16: the other checks do not test rounding."""
