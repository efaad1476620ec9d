"""`embodrl model token`: RLT's first stage, training an RL token on a frozen policy.

Shapes: N frames, P prefix tokens, G policy width, Z token size.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from embodrl.config.schema import Config, SftConfig
from embodrl.data.demos import Demos
from embodrl.data.imitation import load_checked_demos
from embodrl.errors import EmbodrlError, NonFiniteError
from embodrl.models.base import VLAPolicy
from embodrl.models.common import checkpoint
from embodrl.models.common.value_head import keep_prefix
from embodrl.models.small_actors.on_frozen import GREEDY, PREFIX_INPUTS, OnFrozenPolicy, prefix_input
from embodrl.models.small_actors.rl_token import RLToken, RLTokenSpec
from embodrl.reporting.progress import Progress
from embodrl.runs.policies import find_policy
from embodrl.types import Observation
from embodrl.workers.policy import build_policy

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 32
GB = 10**9


@dataclass(frozen=True)
class TokenTraining:
    """Training settings of an RL token.

    Attributes:
        size: token size, Z.
        layers: layers of encoder and decoder.
        steps: optimizer steps.
        batch_size: frames per step.
        lr: initial learning rate, decayed to 0 by a cosine.
        context_dropout: fraction of the states before the predicted one that the decoder does not see; the paper uses
            0.
        held_out: fraction of the episodes held out for the reported error.
        memory_gb: memory of the prefix states in GB, which are computed once; excess frames are dropped at random.
        seed: seed of weights, batches and the held-out split.
    """

    size: int = 64
    layers: int = 2
    steps: int = 1000
    batch_size: int = 64
    lr: float = 1e-3
    context_dropout: float = 0.0
    held_out: float = 0.1
    memory_gb: float = 2.0
    seed: int = 0


@dataclass(frozen=True)
class TokenResult:
    """Result of the token training.

    Attributes:
        path: policy directory with the token.
        frames: frames used.
        of_frames: frames in the dataset.
        width: policy width, G.
        tokens: prefix tokens P, padding included.
        error: reconstruction error of held-out frames relative to their variance; of all frames if none are held out.
        error_of_others: the same with the tokens of other frames; the difference is the token's own information.
    """

    path: Path
    frames: int
    of_frames: int
    width: int
    tokens: int
    error: float
    error_of_others: float


def train_token(
    source: Path, data: str, output: Path, settings: TokenTraining, overrides: list[str], console: str = "auto"
) -> TokenResult:
    """Train a token on a policy's prefix states for a dataset, and write the policy with the token to ``output``.

    The policy stays frozen (``alpha = 0`` in the paper's loss): fine-tune it with `embodrl sft` first.

    Raises:
        UsageError: there is no policy.
        EmbodrlError: the policy has no prefix states, or the dataset is not from its environment.
    """
    found = find_policy(source)
    config = found.load_config(overrides, verb="serve").config
    config = config.model_copy(update={"sft": SftConfig(data_dir=data)})
    kind = prefix_input(config.model)
    if kind not in PREFIX_INPUTS or config.model.small_actor.kind is not None:
        raise _no_prefix(config)
    demos = load_checked_demos(config)
    head = config.model.value_head.model_copy(update={"input": kind})
    model = config.model.model_copy(update={"add_value_head": True, "value_head": head})
    policy = build_policy(config.model_copy(update={"model": model}), None).eval().requires_grad_(False)
    if isinstance(policy, OnFrozenPolicy):
        raise _no_prefix(config)
    hidden, mask, used = prefix_states(policy, demos, settings)
    held = held_out(demos.episode[used], settings)
    token = fit_token(hidden, mask, torch.from_numpy(np.flatnonzero(~held)), settings, console)
    judged = torch.from_numpy(np.flatnonzero(held if held.any() else ~held))
    error, other = judge(token, hidden, mask, judged, settings)
    token.facts = {**asdict(settings), "policy": str(source), "data": data, "error": error, "error_of_others": other}
    policy.value_head = None  # pyright: ignore[reportArgumentType]  (random: not saved)
    with checkpoint.policy_directory(output) as staging:
        policy.save_pretrained(staging)
        token.save(staging)
    return TokenResult(output, len(used), len(demos.actions), hidden.shape[2], hidden.shape[1], error, other)


def _no_prefix(config: Config) -> EmbodrlError:
    return EmbodrlError(
        f"an RL token reads the prompt's hidden states, which this policy of {config.model.model_type} does not have",
        "give the policy of a VLA without a small actor",
        code="rl-token-no-prefix",
    )


@torch.no_grad()
def prefix_states(policy: VLAPolicy, demos: Demos, settings: TokenTraining) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return states ``float32[n,P,G]``, their mask ``bool[n,P]``, and their frame indices ``int64[n]``.

    Shorter prompts are padded at the end.
    """
    order = np.random.default_rng(settings.seed).permutation(len(demos.actions))
    parts: list[tuple[Tensor, Tensor]] = []
    taken = room = 0
    while taken < len(order) and (not parts or room + parts[-1][0].nbytes <= settings.memory_gb * GB):
        rows = order[taken : taken + ROWS_AT_ONCE]
        with keep_prefix() as kept:
            seen = Observation(demos.images[rows], demos.state[rows], demos.said(rows), np.zeros(len(rows), np.int32))
            policy.predict_action_batch(seen, "eval", GREEDY, compute_values=True)
        hidden, mask = kept[-1]
        there = torch.ones(hidden.shape[:2], dtype=torch.bool) if mask is None else (mask != 0).cpu()
        parts.append((hidden.float().cpu(), there))
        taken = taken + len(rows)
        room = room + parts[-1][0].nbytes
    if taken < len(order):
        logger.warning("%d of %d frames fit into --memory-gb %g", taken, len(order), settings.memory_gb)
    longest = max(there.shape[1] for _, there in parts)
    hidden = torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part, _ in parts])
    return hidden, torch.cat([F.pad(there, (0, longest - there.shape[1])) for _, there in parts]), order[:taken]


def held_out(episode: np.ndarray, settings: TokenTraining) -> np.ndarray:
    """Return a mask ``bool[n]`` of the frames in held-out episodes."""
    numbers = np.unique(episode)
    count = min(len(numbers) - 1, round(settings.held_out * len(numbers)))
    return np.isin(episode, np.random.default_rng(settings.seed).permutation(numbers)[:count])


def fit_token(hidden: Tensor, mask: Tensor, frames: Tensor, settings: TokenTraining, console: str) -> RLToken:
    """Return a token trained on the frames ``int64[m]``.

    Raises:
        NonFiniteError: the loss is not finite.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        token = RLToken(RLTokenSpec(hidden.shape[2], hidden.shape[1], settings.size, settings.layers))
    token.standardize(hidden[frames], mask[frames])
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(token.parameters(), lr=settings.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    with Progress("token", settings.steps, "steps", console) as progress:
        for step in range(1, settings.steps + 1):
            rows = frames[torch.randint(len(frames), (settings.batch_size,), generator=generator)]
            kept = torch.rand(mask[rows].shape, generator=generator) >= settings.context_dropout
            loss = token.reconstruction_loss(hidden[rows], mask[rows], kept)
            if not bool(torch.isfinite(loss)):
                raise NonFiniteError(f"the loss of step {step} is {loss.item()}", "lower --lr")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(token.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.update(step, f"loss {loss.item():.3f}")
    return token.eval()


@torch.no_grad()
def judge(token: RLToken, hidden: Tensor, mask: Tensor, frames: Tensor, settings: TokenTraining) -> tuple[float, float]:
    """Return the mean reconstruction error of frames ``int64[m]``, with their own and with other frames' tokens."""
    generator = torch.Generator().manual_seed(settings.seed)
    totals = [0.0, 0.0]
    count = 0
    for rows in frames.split(256):
        part = hidden[rows]
        there = mask[rows]
        kept = torch.rand(there.shape, generator=generator) >= settings.context_dropout
        z = token.encode(part, there)
        for index, of in enumerate((z, z.roll(1, 0))):
            totals[index] += float(token.decoding_loss(of, part, there, kept)) * len(rows)
        count += len(rows)
    return totals[0] / count, totals[1] / count
