"""Actions per second of the rollout backends, native and vLLM, beside plain ``generate`` of transformers.

All sides have the same random weights at tiny size in float32, on one core, and the same images and prompts; each runs
the policy's own vision and projector, and chooses the actions of evaluation. They take turns within one run and must
agree. Plain ``generate`` gets the whole batch, and a mask that leaves action tokens only; it returns actions, whereas
the engines return what training needs as well. Besides, both engines draw actions from the same random numbers, and
their log-probs are compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hardware import describe_hardware
from inference import make_observation, make_policy
from numpy.typing import NDArray
from plain import stock_llama
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from embodrl.config.schema import RolloutConfig, SamplingConfig
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.hybrid_engines.rollout.vllm.engine import VllmRolloutEngine
from embodrl.hybrid_engines.rollout.vllm.llm import DecodeLimits
from embodrl.models.openvla.token_policy import TokenPolicy
from embodrl.storage.json_file import write_json_file
from embodrl.types import Observation, SamplingParams

BATCHES = (1, 2, 4, 8, 16, 32, 64)
NUM_ROUNDS = 9
Actions = NDArray[np.float32]
Way = Callable[[Observation], Actions]


class OnlyActions(LogitsProcessor):
    """Makes every token impossible that is not an action.

    Args:
        first_id: id of the first bin.
        num_bins: K.
    """

    def __init__(self, first_id: int, num_bins: int) -> None:
        self.allowed = slice(first_id, first_id + num_bins)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return ``float32[B,V]`` scores with -inf outside the bins."""
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.allowed] = scores[:, self.allowed]
        return masked  # pyright: ignore[reportReturnType]


@torch.no_grad()
def generate_actions(policy: TokenPolicy, llama: LlamaForCausalLM, observation: Observation) -> Actions:
    """Return the actions ``float32[B,C,A]`` that ``generate`` chooses; all rows have prompts of one length."""
    embeddings, _ = policy.prompt_embeddings(policy.preprocess(observation))
    num_tokens = policy.num_action_chunks * policy.action_dim
    tokens: Any = llama.generate(  # pyright: ignore[reportCallIssue]
        inputs_embeds=embeddings,
        attention_mask=torch.ones(embeddings.shape[:2], dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        logits_processor=LogitsProcessorList([OnlyActions(policy.bins.first_id, policy.bins.num_bins)]),
    )
    index = policy.bins.index(tokens[:, -num_tokens:])
    logits = torch.zeros(*index.shape, policy.bins.num_bins)
    return policy.make_output({}, index, logits, None, SamplingParams()).actions


def engines(policy: TokenPolicy, max_batch: int) -> tuple[RolloutEngine, RolloutEngine]:
    """Return the native engine and vLLM's."""
    config, sampling = RolloutConfig(precision="fp32"), SamplingConfig()
    native = NativeRolloutEngine(policy, config, sampling, 0)
    return native, VllmRolloutEngine(policy, config, sampling, 0, limits=DecodeLimits(max_batch))


def sides(policy: TokenPolicy, native: RolloutEngine, vllm: RolloutEngine) -> dict[str, Way]:
    """Return the ways to choose actions, by name."""
    llama = stock_llama(policy)
    return {
        "native": lambda observation: native.decide(observation, "greedy").actions,
        "vllm": lambda observation: vllm.decide(observation, "greedy").actions,
        "generate": lambda observation: generate_actions(policy, llama, observation),
    }


def logprob_difference(native: RolloutEngine, vllm: RolloutEngine, observation: Observation) -> float:
    """Return the largest difference between the log-probs of actions that both draw from the same random numbers.

    Raises:
        RuntimeError: they draw different actions.
    """
    vllm.set_random_state(native.random_state())
    found, wanted = (engine.act(observation, compute_values=False) for engine in (vllm, native))
    if not np.array_equal(found.actions, wanted.actions):
        raise RuntimeError("native and vllm draw different actions from the same random numbers")
    return float((found.logprobs - wanted.logprobs).abs().max())


def measure(ways: dict[str, Way], observation: Observation) -> dict[str, dict[str, float]]:
    """Return the figures of each way for one batch.

    Raises:
        RuntimeError: they do not choose the same actions.
    """
    first = {name: way(observation) for name, way in ways.items()}  # warms up as well
    for name, actions in first.items():
        if not np.array_equal(actions, first["native"]):
            difference = float(np.abs(actions - first["native"]).max())
            raise RuntimeError(f"{name} and native choose actions that differ by {difference}")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(NUM_ROUNDS):
        for name, way in ways.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            way(observation)
            times[name].append((time.perf_counter() - start, time.process_time() - start_cpu))
    num_actions = first["native"].shape[0] * first["native"].shape[1]
    figures: dict[str, dict[str, float]] = {}
    for name, pairs in times.items():
        seconds, cpu_seconds = (float(np.median(part)) for part in np.array(pairs).T)
        figures[name] = {
            "actions_s": round(num_actions / seconds, 1),
            "median_ms": round(1000 * seconds, 2),
            "median_cpu_ms": round(1000 * cpu_seconds, 2),
            "samples": len(pairs),
        }
    return figures


def run(batches: tuple[int, ...] = BATCHES) -> dict[str, Any]:
    """Measure on one core and return the figures by batch size."""
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        policy = make_policy("openvla", False, torch.device("cpu"))
        assert isinstance(policy, TokenPolicy)
        native, served = engines(policy, max(batches))
        ways = sides(policy, native, served)
        observations = {str(batch): make_observation("openvla", False, batch) for batch in batches}
        figures = {batch: measure(ways, observation) for batch, observation in observations.items()}
        difference = max(logprob_difference(native, served, observation) for observation in observations.values())
    finally:
        os.sched_setaffinity(0, cores)
    import vllm  # pyright: ignore[reportMissingImports]

    return {
        "batches": figures,
        "max_logprob_difference": difference,
        "chunk": policy.num_action_chunks,
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "dtype": "float32",
        "cores_used": 1,
        "vllm": vllm.__version__,
        "hardware": describe_hardware(),
    }


def main(json_path: Path | None = None, batches: tuple[int, ...] = BATCHES) -> int:
    """Measure, print a table, write the figures to ``json_path``; return 0."""
    result = run(batches)
    title = f"OpenVLA, tiny size, float32, actions/s on one core of {result['hardware']['cpu']}"
    table = Table("batch", "native", "vLLM", "generate", "native / generate", "vLLM / generate", title=title)
    for batch, figures in result["batches"].items():
        rates = {name: one["actions_s"] for name, one in figures.items()}
        ratios = [f"{rates[name] / rates['generate']:.2f}" for name in ("native", "vllm")]
        table.add_row(batch, *(f"{rate:.0f}" for rate in rates.values()), *ratios)
    Console().print(table, f"log-probs of native and vLLM differ by {result['max_logprob_difference']:.1e} at most")
    if json_path is not None:
        write_json_file(json_path, result)
    return 0
