"""``POST /rollout``: batches of a training run, sampled with its seeds and returned with everything an update needs.

Shapes: B batch, V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from embodrl.data.rng import RandomSource
from embodrl.errors import ServingError, WireError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.serving.wire.keys import MAX_TEXT
from embodrl.types import MODES, ActMode, Observation, PolicyOutput

HINT = "`embodrl train rollout=remote` of the same version sends it"
MAX_ROWS = 4096


def _refused(problem: str) -> WireError:
    return WireError(f"the batch {problem}", HINT, code="wire-observation")


def batch_of(message: Mapping[str, Any]) -> tuple[Observation, list[int], ActMode, bool]:
    """Return the observation ``[B]``, seeds, mode, and whether values are requested.

    Raises:
        WireError: the message is malformed.
    """
    images = message.get("images")
    state = message.get("state")
    texts = message.get("instructions")
    seeds = message.get("seeds")
    mode = message.get("mode")
    compute_values = message.get("compute_values")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 5 or images.shape[-1] != 3:
        raise _refused("has no images uint8[B,V,H,W,3]")
    rows = len(images)
    if not 0 < rows <= MAX_ROWS or 0 in images.shape:
        raise _refused(f"has {rows} rows, or empty images")
    if not isinstance(state, np.ndarray) or state.dtype != np.float32 or state.ndim != 2 or len(state) != rows:
        raise _refused("has no state float32[B,S]")
    if not np.isfinite(state).all():
        raise _refused("has a non-finite state")
    if not isinstance(texts, list) or len(texts) != rows or not all(isinstance(t, str) for t in texts):
        raise _refused("has no instruction for each row")
    if max(map(len, texts)) > MAX_TEXT:
        raise _refused(f"has an instruction of more than {MAX_TEXT} characters")
    if not isinstance(seeds, list) or len(seeds) != rows or not all(type(s) is int and 0 <= s < 2**63 for s in seeds):
        raise _refused("has no seed for each row")
    if mode not in MODES.values() or type(compute_values) is not bool:
        raise _refused("has no valid mode or compute_values")
    observation = Observation(images.copy(), state.copy(), texts, np.zeros(rows, np.int32))
    return observation, seeds, cast(ActMode, mode), compute_values


def computation(engine: RolloutEngine, message: Mapping[str, Any]) -> Callable[[], PolicyOutput]:
    """Return a function that computes the response to a message; raises as ``batch_of``."""
    observation, seeds, mode, compute_values = batch_of(message)

    def compute() -> PolicyOutput:
        if mode != "train":
            return engine.decide(observation, "mean" if mode == "mean" else "greedy")
        generators: list[RandomSource] | None = engine.row_generators([[seed] for seed in seeds])
        if generators is None:
            generators = list(engine.make_generators([seeds[0]]))
        return engine.act(observation, compute_values, generators)

    return compute


def answer_of(output: PolicyOutput) -> dict[str, Any]:
    """Return an output as arrays.

    Raises:
        ServingError: messages do not support a tensor's dtype.
    """
    return {
        "actions": output.actions,
        "logprobs": _array("logprobs", output.logprobs),
        "values": None if output.values is None else _array("values", output.values),
        "forward_inputs": {name: _array(name, tensor) for name, tensor in output.forward_inputs.items()},
        "policy_version": output.version,
    }


def _array(name: str, tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype == torch.bfloat16:
        raise ServingError(
            f"{name} is bfloat16, which messages do not support", "set rollout.precision=fp32", code="server-dtype"
        )
    return tensor.detach().cpu().contiguous().numpy()
