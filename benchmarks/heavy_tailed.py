"""Has the chunks of the toy environment take heavy-tailed times; an extension, so that simulators import it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from slow_env import chunk_seconds

from embodrl.envs.toy.env import ToyVectorEnv


class _HeavyTailed:
    original_reset, original_step = ToyVectorEnv.reset, ToyVectorEnv.chunk_step
    random = np.random.default_rng()

    @staticmethod
    def reset(env: ToyVectorEnv, seeds: Any, *args: Any, **kwargs: Any) -> Any:
        """Draw the times from the seeds, so that all sides wait for the same."""
        _HeavyTailed.random = np.random.default_rng(np.asarray(seeds).tolist())
        return _HeavyTailed.original_reset(env, seeds, *args, **kwargs)

    @staticmethod
    def chunk_step(env: ToyVectorEnv, *args: Any, **kwargs: Any) -> Any:
        """Wait, then step."""
        time.sleep(chunk_seconds(_HeavyTailed.random))
        return _HeavyTailed.original_step(env, *args, **kwargs)


ToyVectorEnv.reset = _HeavyTailed.reset  # pyright: ignore[reportAttributeAccessIssue]
ToyVectorEnv.chunk_step = _HeavyTailed.chunk_step  # pyright: ignore[reportAttributeAccessIssue]
