"""Replay buffers of random frames, as the tiny Gaussian policy sees them."""

from __future__ import annotations

import torch

from embodrl.data.replay import ReplayBuffer


def buffer_of(count: int, seed: int = 0) -> ReplayBuffer:
    """Episodes of five chunks, with a last observation for which there is no action."""
    random = torch.Generator().manual_seed(seed)
    acted = torch.arange(count) % 6 < 5
    buffer = ReplayBuffer(10_000, 10**9)
    buffer.add_frames(
        {
            "inputs.state": torch.randn(count, 8, generator=random),
            "inputs.images": torch.randint(0, 256, (count, 1, 8, 8, 3), generator=random, dtype=torch.uint8),
            "actions": torch.rand(count, 2, 7, generator=random) * 2 - 1,
            "labels": torch.rand(count, 2, 7, generator=random) * 2 - 1,
            "rewards": torch.randn(count, 2, generator=random) * acted[:, None],
            "valid": acted[:, None].expand(count, 2),
            "terminated": torch.zeros(count, dtype=torch.bool),
            "acted": acted,
            "source": torch.zeros(count, dtype=torch.int8),
        }
    )
    return buffer
