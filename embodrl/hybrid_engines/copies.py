"""Copies of a policy that stay fixed while the policy trains."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn

from embodrl.hybrid_engines.training.sharding import whole
from embodrl.models.base import VLAPolicy


def frozen_copy(policy: VLAPolicy, trained: Iterable[nn.Parameter]) -> VLAPolicy:
    """Return a policy with gradient-free copies of the trained weights; all other weights are shared."""
    copied = {id(p) for p in trained}
    shared = {id(p): p for p in policy.parameters() if id(p) not in copied}
    twin = copy.deepcopy(policy, shared)
    for parameter in twin.parameters():
        if id(parameter) not in shared:
            parameter.requires_grad_(False)
    return twin


def whole_copy(policy: VLAPolicy) -> VLAPolicy:
    """Return a policy with gradient-free, whole copies of all weights; a collective call if they are sharded."""
    return copy.deepcopy(
        policy, {id(p): nn.Parameter(whole(p).clone(), requires_grad=False) for p in policy.parameters()}
    )
