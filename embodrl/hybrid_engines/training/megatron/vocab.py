"""Log-probs and entropy of action tokens whose logits are sharded over the tensor group by vocabulary.

The public model computes only the 256 rows of lm_head that are actions. Likewise here: every process computes its part
of them, in a window of the same width in all processes; together the windows form a small vocabulary. If a process
holds fewer rows, the rest of its window is -inf.

Shapes: K action bins, W width of a window, R processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.hybrid_engines.training.megatron.core import megatron, tensor_group
from embodrl.types import SamplingParams


@dataclass(frozen=True)
class Windows:
    """Location of the action ids.

    Attributes:
        rows: the action rows in this process's part of lm_head; may be empty.
        width: W, the maximum over the processes.
        places: ``int64[K]``: bin to id in the vocabulary of the windows, R * W in all.
    """

    rows: slice
    width: int
    places: Tensor


def action_windows(first_id: int, num_bins: int, vocab_size: int, rank: int, size: int) -> Windows:
    """Return the windows of action ids ``first_id`` to ``first_id + num_bins``; ``size`` divides ``vocab_size``."""
    part = vocab_size // size
    starts = [min(max(first_id - r * part, 0), part) for r in range(size)]
    stops = [min(max(first_id + num_bins - r * part, 0), part) for r in range(size)]
    width = max(stop - start for start, stop in zip(starts, stops, strict=True))
    places = [r * width + k for r in range(size) for k in range(stops[r] - starts[r])]
    return Windows(slice(starts[rank], stops[rank]), width, torch.tensor(places))


class ActionDistribution:
    """The distribution over action bins; every process gets the same numbers.

    Args:
        hidden: ``[...,D]``, identical in all processes.
        lm_head: this process's part, without bias.
        windows: see ``action_windows``.
        index: ``int64[...]``, chosen bins; they stay in the support even if they have left the top k since.
    """

    def __init__(
        self, hidden: Tensor, lm_head: nn.Module, windows: Windows, index: Tensor, sampling: SamplingParams
    ) -> None:
        self.windows = windows
        self.group = tensor_group()
        self.taken = windows.places.to(index.device)[index]
        logits = action_logits(hidden, lm_head, windows) / sampling.temperature
        if 0 < sampling.top_k < len(windows.places):
            logits = logits.masked_fill(~self._kept(logits.detach(), sampling.top_k), -torch.inf)
        self.logits = logits

    def _kept(self, logits: Tensor, top_k: int) -> Tensor:
        """Return ``bool[...,W]``: bins of this process in the global top k, or chosen."""
        parts = [torch.empty_like(logits) for _ in range(self.group.size())]
        dist.all_gather(parts, logits.contiguous(), group=self.group)
        everywhere = torch.cat(parts, dim=-1)
        keep = torch.zeros_like(everywhere, dtype=torch.bool)
        keep.scatter_(-1, everywhere.topk(top_k, dim=-1).indices, True)
        keep.scatter_(-1, self.taken[..., None], True)
        return keep.split(self.windows.width, dim=-1)[self.group.rank()]

    def log_probs(self) -> Tensor:
        """Return the log-probs ``float32[...]`` of the chosen bins."""
        # In place, on a tensor that entropy still needs.
        cross_entropy = megatron("tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
        return -cross_entropy(self.logits.clone(), self.taken)

    def entropy(self) -> Tensor:
        """Return the entropy ``float32[...]`` in nats: ``log Z - sum p z`` with the logits z, ``Z = sum exp z``."""
        reduce = megatron("tensor_parallel.mappings").reduce_from_tensor_model_parallel_region
        top = self.logits.detach().amax(dim=-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        outside = self.logits == -torch.inf
        shifted = (self.logits - top[..., None]).masked_fill(outside, 0.0)
        weights = shifted.exp().masked_fill(outside, 0.0)
        # The sums of all processes in one message.
        total, product = reduce(torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])).unbind()
        return total.log() - product / total


def action_logits(hidden: Tensor, lm_head: nn.Module, windows: Windows) -> Tensor:
    """Return this process's window ``float32[...,W]`` of the action logits."""
    copy = megatron("tensor_parallel.mappings").copy_to_tensor_model_parallel_region
    with torch.autocast(hidden.device.type, enabled=False):
        weight = lm_head.get_parameter("weight")[windows.rows].float()
        logits = F.linear(copy(hidden.float()), weight)
    return F.pad(logits, (0, windows.width - logits.shape[-1]), value=-torch.inf)
