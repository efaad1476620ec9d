"""Critic-free advantages: the return of an episode relative to the returns of its group.

Shapes: T policy steps (chunks), B environments, C actions in a chunk, K values per chunk (1 or C), E episodes, S reward
steps (T at chunk level, T*C at action level).
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodrl.algorithms.advantages import ROUNDING, Advantages, RewardType, from_reward_steps, to_reward_steps
from embodrl.algorithms.episodes import Episodes, split_episodes


def grpo(
    *,
    rewards: Tensor,
    valid: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    group_id: Tensor,
    gamma: float,
    reward_type: RewardType = "chunk_level",
) -> Advantages:
    """Group relative advantages (DeepSeekMath, arXiv 2402.03300, sec. 4.1.2): ``A = R - mean(R of the group)``.

    Every step of an episode gets the same advantage. Division by the group's standard deviation is normalisation with
    scope ``group``; without it this is the estimator of Dr. GRPO (arXiv 2503.20783). Episodes form a group if they
    share a ``group_id int64[T,B]`` and began at the same chunk. Lost episodes are excluded and get 0.

    Other tensors are ``[T,B,C]``. ``gamma`` discounts reward steps (chunks or actions, ``reward_type``) from the start
    of the episode; 1 is the plain sum.
    """
    return _against_group(rewards, valid, terminated, truncated, group_id, gamma, reward_type, leave_one_out=False)


def rloo(
    *,
    rewards: Tensor,
    valid: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    group_id: Tensor,
    gamma: float,
    reward_type: RewardType = "chunk_level",
) -> Advantages:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740, eq. 7): less the mean of the other returns.

    An episode alone in its group has no baseline and gets 0. Arguments as in ``grpo``.
    """
    return _against_group(rewards, valid, terminated, truncated, group_id, gamma, reward_type, leave_one_out=True)


def reinforce_pp(
    *,
    rewards: Tensor,
    valid: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    reward_type: RewardType = "chunk_level",
) -> Advantages:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): discounted rewards-to-go, to be normalised over the batch.

    Its KL penalty is ``algorithm.kl`` with placement ``reward``. Lost episodes get 0. Arguments as in ``grpo``.
    """
    episodes = split_episodes(valid, terminated, truncated)
    reward, live, index = _known_steps(rewards, valid, episodes, reward_type)
    result = torch.zeros_like(reward)
    to_come = torch.zeros_like(reward[0]) if len(reward) else reward.new_zeros(reward.shape[1:])
    follower = torch.full_like(index[0], -1) if len(index) else index.new_zeros(index.shape[1:])
    for s in reversed(range(len(reward))):
        # R_s = r_s + gamma R_(s+1), where the next valid step is of the same episode.
        here = reward[s] + gamma * torch.where(index[s] == follower, to_come, 0.0)
        result[s] = torch.where(live[s], here, 0.0)
        to_come = torch.where(live[s], here, to_come)
        follower = torch.where(live[s], index[s], follower)
    return _per_chunk(result.float(), result.float(), live, rewards, reward_type)


def episode_returns(
    rewards: Tensor, valid: Tensor, episodes: Episodes, gamma: float, reward_type: RewardType
) -> Tensor:
    """Return ``float64[E]``: the sum of ``gamma^k`` times the k-th valid reward step of each episode, k from 0."""
    reward, live, index = _reward_steps(rewards, valid, episodes, reward_type)
    before = live.long().cumsum(0) - 1
    first = torch.full((len(episodes),), live.numel(), dtype=torch.int64, device=rewards.device)
    first.scatter_reduce_(0, index[live], before[live], "amin")
    # k of the k-th valid step of its episode.
    position = before[live] - first[index[live]]
    discount = torch.tensor(gamma, dtype=torch.float64, device=rewards.device) ** position
    total = torch.zeros(len(episodes), dtype=torch.float64, device=rewards.device)
    return total.index_add_(0, index[live], discount * reward[live])


def _reward_steps(
    rewards: Tensor, valid: Tensor, episodes: Episodes, reward_type: RewardType
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards ``float64[S,B]``, their mask ``bool[S,B]``, and their episode ``int64[S,B]``."""
    reward, live = to_reward_steps(rewards, valid, reward_type)
    index = episodes.index
    if reward_type == "action_level":
        index = index.repeat_interleave(rewards.shape[-1], dim=0)
    return reward, live, index


def _known_steps(
    rewards: Tensor, valid: Tensor, episodes: Episodes, reward_type: RewardType
) -> tuple[Tensor, Tensor, Tensor]:
    """Like ``_reward_steps``, with the steps of lost episodes masked."""
    reward, live, index = _reward_steps(rewards, valid, episodes, reward_type)
    lost = torch.cat([episodes.lost, episodes.lost.new_ones(1)])  # the last entry serves the index -1
    return reward, live & ~lost[index], index


def _against_group(
    rewards: Tensor,
    valid: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    group_id: Tensor,
    gamma: float,
    reward_type: RewardType,
    leave_one_out: bool,
) -> Advantages:
    episodes = split_episodes(valid, terminated, truncated)
    returns = episode_returns(rewards, valid, episodes, gamma, reward_type)
    known = ~episodes.lost
    group = episodes.groups(group_id)
    num_groups = int(group.max()) + 1 if len(episodes) else 0
    zeros = returns.new_zeros(num_groups)
    count = zeros.clone().index_add_(0, group[known], torch.ones_like(returns[known]))
    # Relative to the group's minimum: returns above it by no more than the rounding error of their rewards equal it and
    # give 0, instead of an error that normalisation would magnify.
    least = torch.full_like(zeros, torch.inf).scatter_reduce_(0, group[known], returns[known], "amin")
    magnitude = episode_returns(rewards.abs(), valid, episodes, gamma, reward_type)
    size = zeros.clone().scatter_reduce_(0, group[known], magnitude[known], "amax")
    above = torch.where(known, returns - least[group], 0.0)
    above = torch.where(above > ROUNDING * size[group], above, 0.0)
    mean = zeros.clone().index_add_(0, group[known], above[known]) / count.clamp_min(1)
    # A = R - mean(R of the group), both relative to the minimum.
    advantage = above - mean[group]
    if leave_one_out:
        # R - (n mean - R) / (n - 1) = n / (n - 1) * (R - mean)
        advantage = advantage * (count / (count - 1).clamp_min(1))[group]
    advantage = torch.where(known, advantage, 0.0)
    _, live, index = _known_steps(rewards, valid, episodes, reward_type)
    per_step = torch.zeros(live.shape, device=rewards.device)
    per_step[live] = advantage[index[live]].float()
    goal = torch.zeros_like(per_step)
    goal[live] = returns[index[live]].float()
    return _per_chunk(per_step, goal, live, rewards, reward_type)


def _per_chunk(
    advantages: Tensor, returns: Tensor, live: Tensor, rewards: Tensor, reward_type: RewardType
) -> Advantages:
    shape = (rewards.shape[0], rewards.shape[1], 1 if reward_type == "chunk_level" else rewards.shape[2])
    return Advantages(*(from_reward_steps(x, shape) for x in (advantages, returns, live)))
