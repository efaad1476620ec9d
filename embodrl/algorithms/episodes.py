"""Episodes within a rollout. Shapes: T policy steps (chunks), B environments, C actions in a chunk, E episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from embodrl.algorithms.totals import WHOLE, Totals


@dataclass(frozen=True)
class Episodes:
    """Assignment of chunks to episodes.

    Attributes:
        index: ``int64[T,B]``, 0 to E - 1; -1 where a chunk has no valid action.
        column: ``int64[E]``, the environment.
        start: ``int64[E]``, the first chunk.
        end: ``int64[E]``, the last chunk with a valid action.
        lost: ``bool[E]``, a fault ended it, so that its return is unknown.
    """

    index: Tensor
    column: Tensor
    start: Tensor
    end: Tensor
    lost: Tensor

    def __len__(self) -> int:
        return len(self.column)

    def of(self, per_chunk: Tensor) -> Tensor:
        """Return the entries of ``[T,B]`` at the last chunk of each episode, ``[E]``."""
        return per_chunk[self.end, self.column]

    def groups(self, group_id: Tensor) -> Tensor:
        """Return ``int64[E]``, equal for the episodes of a group that began together; ``group_id int64[T,B]``."""
        first = group_id[self.start, self.column]
        return unique_inverse(torch.stack([first, self.start]), dim=1)[1]


def unique_inverse(x: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the sorted unique entries, and for each entry of ``x`` its index among them."""
    # torch does not annotate the return type of Tensor.unique
    return cast("Any", x).unique(return_inverse=True, dim=dim)


def split_episodes(valid: Tensor, terminated: Tensor, truncated: Tensor) -> Episodes:
    """Split a rollout into episodes; an episode that continues after the rollout counts as far as it got.

    Arguments are ``bool[T,B,C]``; ``truncated`` at the first action of a chunk without valid actions marks a lost
    episode.
    """
    num_steps, num_envs, _ = valid.shape
    live = valid.any(-1)
    lost = ~live & truncated[..., 0]
    done = ((terminated | truncated) & valid).any(-1) | lost
    # Index of the episode within its environment: the number of episodes ended before this chunk.
    ordinal = torch.cat([torch.zeros(1, num_envs, dtype=torch.int64, device=valid.device), done.long().cumsum(0)[:-1]])
    # Unique keys across all environments.
    key = ordinal * num_envs + torch.arange(num_envs, device=valid.device)
    names, position = unique_inverse(key[live])
    index = torch.full_like(key, -1)
    index[live] = position
    steps = torch.arange(num_steps, device=valid.device).unsqueeze(1).expand_as(key)[live]
    start = torch.full((len(names),), num_steps, dtype=torch.int64, device=valid.device)
    end = torch.zeros_like(start)
    start.scatter_reduce_(0, position, steps, "amin")
    end.scatter_reduce_(0, position, steps, "amax")
    # The chunk of the fault has the key of the episode it ended.
    return Episodes(index, names % num_envs if num_envs else names, start, end, torch.isin(names, key[lost]))


def element_weights(
    episodes: Episodes, num_elements: Tensor, rollout_length: int, by_episode: bool, totals: Totals = WHOLE
) -> Tensor:
    """Return per-chunk weights ``float32[T,B]`` that turn a mean over ratios into a mean over episodes.

    ``sum(w * x) / N`` over the N elements (ratios) of a rollout then is, with ``by_episode``, the mean over episodes of
    the mean within each (DeepSeekMath, arXiv 2402.03300, eq. 3: ``1/G sum 1/|o|``); otherwise the mean over episodes of
    sums divided by a fixed length, so that long episodes are not weighted down (Dr. GRPO, arXiv 2503.20783, sec. 3.2).

    ``num_elements int64[T,B]`` counts the training elements of each chunk; an episode without any does not count.
    ``rollout_length`` is that of an environment that is never idle; ``totals`` counts the other parts of the rollout.
    """
    index = episodes.index
    live = (index >= 0) & (num_elements > 0)
    total = float(totals.sum(num_elements[live].sum().double()))
    weights = torch.zeros(index.shape, device=index.device)
    if not total:
        return weights
    length = torch.zeros(len(episodes), device=index.device)
    length.index_add_(0, index[live], num_elements[live].float())
    num_episodes = float(totals.sum((length > 0).sum().double()))
    per_chunk = length[index[live]] if by_episode else float(rollout_length)
    # Cancels the 1/N of the loss.
    weights[live] = total / (num_episodes * per_chunk)
    return weights
