"""A reward function from outside the package, as one that asks a service would be written.

PYTHONPATH=examples/custom_reward embodrl train --config examples/custom_reward/config.yaml
"""

from __future__ import annotations

import asyncio

from embodrl import Episode


async def score(frames_mean: float) -> float:
    """Stand in for a reward model behind a network: the brighter, the better."""
    await asyncio.sleep(0)
    return frames_mean / 255.0


async def quick_success(episode: Episode) -> float:
    """Return 1 for a success, a little more for a quick one, and what the service says for a failure.

    Args:
        episode: its rewards, frames and outcome; an exception here is retried, and counted if it stays.
    """
    if episode.success:
        return 1.0 + 0.5 / len(episode.rewards)
    return 0.1 * await score(float(episode.frames[-1].float().mean()))
