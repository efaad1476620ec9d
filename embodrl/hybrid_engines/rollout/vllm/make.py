"""The engine of a rollout in vLLM, by what its policy writes: actions, or text."""

from __future__ import annotations

from embodrl.config.schema import section_in
from embodrl.hybrid_engines.rollout.base import RolloutParts
from embodrl.hybrid_engines.rollout.native import max_batch_rows
from embodrl.hybrid_engines.rollout.vllm.engine import VllmEngine, VllmRolloutEngine
from embodrl.hybrid_engines.rollout.vllm.llm import DecodeLimits
from embodrl.hybrid_engines.rollout.vllm.spec import VllmConfig
from embodrl.hybrid_engines.rollout.vllm.text_engine import VllmTextEngine


def make(parts: RolloutParts) -> VllmEngine:
    """Return the engine of a rollout."""
    settings = section_in(parts.config.rollout, "vllm", VllmConfig)
    rows = settings.max_num_seqs or max_batch_rows(parts.config)
    caches = settings.enable_prefix_caching is not False
    limits = DecodeLimits(rows, settings.max_num_batched_tokens, settings.tensor_parallel_size, caches)
    if parts.policy.writes_text:
        return VllmTextEngine(parts.common, limits)
    return VllmRolloutEngine(*parts.common, limits)
