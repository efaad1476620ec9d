"""Actions per second of each model family, against the plain way of the public reference implementations.

The plain way takes one observation at a time. Token families call transformers' Llama with its growing key-value cache
and the logits of the whole vocabulary for every position. Flow families run images and prompt again at every denoising
step. embodrl takes the batch at once, keeps keys and values in static buffers, computes the action rows of the output
layer only, and runs images and prompt once for a chunk. A third column gives the plain way the whole batch, which
tells how much of the ratio is batching.

All sides choose the actions of evaluation with the same random weights, in turns within one run, and must agree:
exactly where they choose tokens, to ``CHAIN_TOLERANCE`` where they integrate. In bfloat16, at full size on a GPU,
rounding differs with the shape of a product, and the agreement is reported instead.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hardware import describe_hardware
from numpy.typing import NDArray
from plain import plain_actions
from rich.console import Console
from rich.table import Table

from embodrl.config.schema import model_settings
from embodrl.errors import UsageError
from embodrl.hybrid_engines.offload import take_peak_bytes
from embodrl.models.base import VLAPolicy
from embodrl.models.registry import build_policy
from embodrl.specs import MODELS
from embodrl.storage.json_file import write_json_result
from embodrl.tools.parity.common import CHAIN_TOLERANCE
from embodrl.types import Observation, SamplingParams

BATCH = 16
NUM_BLOCKS = 7
NUM_BLOCKS_PUBLIC = 3
STATE_DIM = 7
INSTRUCTION = "push the cube to the goal"
Actions = NDArray[np.float32]

_SIGLIP = {"width": 1152, "depth": 27, "num_heads": 16, "mlp_dim": 4304}
_LLAMA_7B = {
    "image_size": 224,
    "patch_size": 14,
    "dino": {"width": 1024, "depth": 24, "num_heads": 16, "mlp_dim": 4096},
    "siglip": _SIGLIP,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_PI = {
    "image_size": 224,
    "patch_size": 14,
    "siglip": _SIGLIP,
    "depth": 18,
    "num_heads": 8,
    "num_kv_heads": 1,
    "head_dim": 256,
    "vlm_width": 2048,
    "vlm_mlp_dim": 16384,
    "expert_width": 1024,
    "expert_mlp_dim": 4096,
    "max_action_dim": 32,
}
_PI0_FAST: dict[str, object] = {name: size for name, size in _PI.items() if not name.startswith("expert")}
_PI0_FAST |= {"action_horizon": 10, "max_action_tokens": 60}
_GR00T = {
    "image_size": 224,
    "patch_size": 14,
    "siglip": _SIGLIP,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dit_num_layers": 16,
    "dit_num_heads": 32,
    "dit_head_dim": 48,
    "dit_output_dim": 1024,
    "vl_num_layers": 4,
    "vl_num_heads": 32,
    "vl_head_dim": 64,
    "num_embodiments": 32,
    "max_action_dim": 32,
    "max_state_dim": 64,
    "action_horizon": 16,
    "num_future_tokens": 32,
}
_GR00T_N1_7: dict[str, object] = {
    **{name: size for name, size in _GR00T.items() if name not in ("siglip", "num_future_tokens")},
    "image_size": 256,
    "patch_size": 16,
    "vision": {"width": 1024, "depth": 24, "num_heads": 16, "mlp_dim": 4096},
    "num_hidden_layers": 16,
    "dit_num_layers": 32,
    "max_action_dim": 132,
    "max_state_dim": 132,
    "action_horizon": 40,
}
_SMOLVLA: dict[str, object] = {
    "image_size": 512,
    "patch_size": 16,
    "scale_factor": 4,
    "siglip": {"width": 768, "depth": 12, "num_heads": 12, "mlp_dim": 3072},
    "depth": 16,
    "num_heads": 15,
    "num_kv_heads": 5,
    "head_dim": 64,
    "vlm_width": 960,
    "vlm_mlp_dim": 2560,
    "expert_width": 720,
    "expert_mlp_dim": 2048,
    "action_horizon": 50,
}
FULL: dict[str, dict[str, Any]] = {
    "openvla": {"num_action_chunks": 1, "architecture": _LLAMA_7B},
    "openvla_oft": {"num_action_chunks": 8, "architecture": _LLAMA_7B},
    "pi0": {"num_action_chunks": 50, "pi": {**_PI, "action_horizon": 50}, "flow": {"num_steps": 10}},
    "pi05": {"num_action_chunks": 10, "pi": {**_PI, "action_horizon": 10}, "flow": {"num_steps": 10}},
    "pi0_fast": {"num_action_chunks": 10, "pi0_fast": _PI0_FAST},
    "gr00t": {"num_action_chunks": 16, "gr00t": _GR00T},
    "gr00t_n1_7": {"num_action_chunks": 16, "gr00t_n1_7": _GR00T_N1_7},
    "smolvla": {"num_action_chunks": 50, "smolvla": _SMOLVLA, "flow": {"num_steps": 10}},
}
"""Dimensions of the public checkpoints but for the vocabulary, which is that of the small tokenizer: the plain way's
output layer is smaller here than with a public checkpoint, and its time shorter."""


def make_policy(family: str, full: bool, device: torch.device) -> VLAPolicy:
    """Return a policy with random weights: the tiny preset in float32, or the public size in bfloat16."""
    settings = {"model_type": family, "warm_start": None, "add_value_head": False, **(FULL[family] if full else {})}
    dtype = torch.bfloat16 if full else torch.float32
    policy, _ = build_policy(model_settings(family).model_validate(settings), device=device, dtype=dtype, seed=0)
    return policy.eval()


def make_observation(family: str, full: bool, batch: int) -> Observation:
    """Return random pictures and states of the size that the model wants."""
    size = 224 if full else 64
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, 1, size, size, 3), dtype=np.uint8)
    state_dim = STATE_DIM if MODELS.entry(family).uses_state is True else 0
    state = rng.uniform(-1, 1, (batch, state_dim)).astype(np.float32)
    return Observation(images, state, [INSTRUCTION] * batch, np.zeros(batch, np.int32))


def sides(policy: VLAPolicy, observation: Observation) -> dict[str, Callable[[], Actions]]:
    """Return the ways to choose actions ``float32[B,C,A]`` by name."""
    rows = [observation.select(np.array([row])) for row in range(observation.batch_size)]
    plain = plain_actions(policy)

    def embodrl() -> Actions:
        return policy.predict_action_batch(observation, "eval", SamplingParams(), compute_values=False).actions

    return {
        "embodrl": embodrl,
        "plain": lambda: np.concatenate([plain(row) for row in rows]),
        "plain_batched": lambda: plain(observation),
    }


def check(family: str, policy: VLAPolicy, found: Actions, wanted: Actions) -> dict[str, float]:
    """Return how well actions agree.

    Raises:
        RuntimeError: they don't, in float32.
    """
    difference = np.abs(found - wanted)
    exact = MODELS.entry(family).kind != "flow"
    if policy.device.type == "cpu" and difference.max() > (0.0 if exact else CHAIN_TOLERANCE):
        raise RuntimeError(f"{family}: actions differ by {difference.max()}")
    return {
        "largest_difference": float(difference.max()),
        "equal_to_1e-2": round(float((difference < 1e-2).mean()), 4),
    }


def measure(
    family: str, full: bool, device: torch.device, batch: int = BATCH, blocks: int = NUM_BLOCKS
) -> dict[str, Any]:
    """Return the figures of one family.

    Args:
        family: registered name.
        full: the public size instead of the tiny one.
        device: where it runs.
        batch: observations at once.
        blocks: how often each side runs; they take turns.

    Raises:
        RuntimeError: the sides do not choose the same actions.
    """
    policy = make_policy(family, full, device)
    ways = sides(policy, make_observation(family, full, batch))
    first = {name: way() for name, way in ways.items()}  # warms up as well
    agreement = {name: check(family, policy, first["embodrl"], first[name]) for name in ("plain", "plain_batched")}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(blocks):
        for name, way in ways.items():
            seconds[name].append(_timed(way, device))
    num_actions = batch * policy.num_action_chunks
    figures = {name: _summary(times, num_actions) for name, times in seconds.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "batch": batch,
        "chunk": policy.num_action_chunks,
        "dtype": str(next(policy.parameters()).dtype).removeprefix("torch."),
        "ratio": _ratio(figures, "plain", device),
        "ratio_batched": _ratio(figures, "plain_batched", device),
        **figures,
        "agreement": agreement,
    }


def _timed(way: Callable[[], Actions], device: torch.device) -> tuple[float, float]:
    """Return seconds by the clock and of the processor; actions are on the host when ``way`` returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    start_cpu = time.process_time()
    way()
    return time.perf_counter() - start, time.process_time() - start_cpu


def _summary(times: list[tuple[float, float]], num_actions: int) -> dict[str, float]:
    seconds, cpu_seconds = (float(np.median(part)) for part in np.array(times).T)
    return {
        "actions_s": round(num_actions / seconds, 1),
        "median_ms": round(1000 * seconds, 2),
        "median_cpu_ms": round(1000 * cpu_seconds, 2),
        "samples": len(times),
    }


def _ratio(figures: dict[str, dict[str, float]], baseline: str, device: torch.device) -> float:
    """Return the ratio of the clock or, on a CPU, the smaller one of clock and processor time."""
    keys = ("median_ms", "median_cpu_ms") if device.type == "cpu" else ("median_ms",)
    return round(min(figures[baseline][key] / figures["embodrl"][key] for key in keys), 2)


def run(families: Sequence[str] = tuple(FULL), size: str | None = None, device: str | None = None) -> dict[str, Any]:
    """Measure and return the figures.

    Args:
        families: registered names.
        size: ``tiny`` or ``public``; None takes the tiny one and, with a GPU, the public one.
        device: ``cpu`` or ``cuda``; None takes a core for the tiny size, and a GPU for the public one if there is one.
    """
    gpu = torch.cuda.is_available()
    result: dict[str, Any] = {}
    if size in (None, "tiny"):
        tiny = _tiny(families, torch.device(device or "cpu"))
        result |= {"ratios": {name: figures["ratio"] for name, figures in tiny.items()}, "tiny": tiny}
    if size == "public" or (size is None and gpu):
        public = _public(families, torch.device(device or ("cuda" if gpu else "cpu")))
        result |= {"public": public, "ratios_public": {name: figures["ratio"] for name, figures in public.items()}}
    if gpu:
        result["gpu"] = torch.cuda.get_device_name()
    return result | {"hardware": describe_hardware()}


def _tiny(families: Sequence[str], device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {family: measure(family, False, device) for family in families}
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        return {family: measure(family, False, device) for family in families}
    finally:
        os.sched_setaffinity(0, cores)


def _public(families: Sequence[str], device: torch.device) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for family in families:
        take_peak_bytes(device)
        figures[family] = measure(family, True, device, blocks=NUM_BLOCKS_PUBLIC)
        peak = take_peak_bytes(device)
        figures[family]["gpu_peak_mib"] = None if peak is None else round(peak / 2**20)
        gc.collect()
        torch.cuda.empty_cache()
    return figures


def main(
    json_path: Path | None = None,
    family: Sequence[str] | None = None,
    size: str | None = None,
    device: str | None = None,
) -> int:
    """Measure, print a table, write the figures to ``json_path``; return 0. ``family`` None takes all; see ``run``.

    Raises:
        UsageError: no such family is measured.
    """
    if unknown := [name for name in family or () if name not in FULL]:
        raise UsageError(f"--family {unknown[0]} is not measured; known: {', '.join(FULL)}", "choose one of these")
    result = run(tuple(family or FULL), size, device)
    hardware = result["hardware"]
    titles = {
        "tiny": f"tiny size, float32, {result['gpu'] if device == 'cuda' else 'one core of ' + str(hardware['cpu'])}",
        "public": f"public size, bfloat16, {result.get('gpu', hardware['cpu'])}",
    }
    console = Console()
    for size in (name for name in titles if name in result):
        columns = ("family", "parameters", "embodrl actions/s", "plain", "ratio", "plain, batched", "ratio")
        table = Table(*columns, title=titles[size])
        for name, figures in result[size].items():
            parameters = f"{figures['parameters'] / 1e6:.1f} M"
            ours, plain, batched = (f"{figures[way]['actions_s']:.0f}" for way in ("embodrl", "plain", "plain_batched"))
            first, second = (f"{figures[key]:.1f}" for key in ("ratio", "ratio_batched"))
            table.add_row(name, parameters, ours, plain, first, batched, second)
        console.print(table)
    console.print(f"batch {BATCH}; plain: {PLAIN}")
    if json_path is not None:
        write_json_result(json_path, result)
    return 0


PLAIN = "one observation at a time; whole vocabulary and growing cache, or images and prompt again at every step"
