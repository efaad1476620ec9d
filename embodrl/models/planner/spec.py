"""A planner that writes text: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from embodrl.config.rules.base import Context, divisors
from embodrl.config.schema import ModelConfig, PositiveInt, Section
from embodrl.errors import EmbodrlError
from embodrl.models.common.config_file import CONFIG_FILE, own_section, read_file
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import ModelSpec

FAMILY = "planner"
PUBLIC = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Kinds of public language models that are read, as config.json names them."""
EXPERTS_PER_TOKEN = 2


class PlannerArchitectureConfig(Section):
    """Dimensions of a planner without a checkpoint, and lengths."""

    hidden_size: PositiveInt = Field(default=64, description="hidden size of Llama")
    intermediate_size: PositiveInt = Field(default=160, description="units of its MLPs")
    num_hidden_layers: PositiveInt = Field(default=2, description="layers")
    num_attention_heads: PositiveInt = Field(default=4, description="heads; an even part of hidden_size each")
    max_prompt_tokens: PositiveInt = Field(
        default=512, description="tokens of tools and messages (bytes without a checkpoint); prompts are padded to it"
    )
    max_new_tokens: PositiveInt = Field(default=64, description="tokens of a message that the planner writes")
    num_experts: int | None = Field(
        default=None, ge=EXPERTS_PER_TOKEN, description="MLPs per layer, of which a router picks 2; null for one"
    )


class PlannerModelConfig(ModelConfig):
    """A planner."""

    planner: PlannerArchitectureConfig = Field(
        default=PlannerArchitectureConfig(), description="dimensions without a checkpoint, and lengths"
    )


RULES = RuleSet()


def num_experts(raw: Mapping[str, object]) -> int:
    """Return the number of experts that the content of a config.json names, as Mixtral and Qwen3-MoE do; 0 for none."""
    return next((n for name in ("num_local_experts", "num_experts") if isinstance(n := raw.get(name), int)), 0)


def experts(config: ModelConfig) -> int | None:
    """Return the number of experts of a planner, also of its checkpoint; None if that is not at hand."""
    assert isinstance(config, PlannerModelConfig)
    path = config.model_path
    if path is None:
        return config.planner.num_experts or 0
    file = Path(path).expanduser() / CONFIG_FILE
    try:
        return num_experts(read_file(file).content) if file.is_file() else None
    except EmbodrlError:  # another rule reports it
        return None


@RULES.rule("model.planner")
def planner_heads_divide_its_width(context: Context) -> Iterator[Finding]:
    """Heads have an even size, for rotary positions."""
    shape = context.model(PlannerModelConfig).planner
    if context.config.model.model_path is None and shape.hidden_size % (2 * shape.num_attention_heads):
        message = f"{shape.num_attention_heads} heads of an even size do not fill {shape.hidden_size}"
        near = divisors(shape.hidden_size // 2, shape.num_attention_heads) if shape.hidden_size % 2 == 0 else "none"
        key = "model.planner.num_attention_heads"
        yield Finding(key, message, "set it to 4", near, others=("model.planner.hidden_size",))


@RULES.rule("model.planner", "model.model_path")
def a_checkpoint_has_its_experts(context: Context) -> Iterator[Finding]:
    """The checkpoint's configuration says how many experts it has."""
    model = context.model(PlannerModelConfig)
    if model.model_path is not None and model.planner.num_experts is not None:
        message = "has no effect: the language model of model.model_path has the experts that its config.json names"
        yield Finding("model.planner.num_experts", message, "set it to null", "null", others=("model.model_path",))


@RULES.rule("model.model_type", "rollout.workflow")
def text_needs_a_workflow(context: Context) -> Iterator[Finding]:
    """What a planner writes becomes actions only by a workflow's tools."""
    if context.verb in ("record", "sft"):
        message = f"{FAMILY} writes text, and `embodrl {context.verb}` is about actions"
        yield Finding("model.model_type", message, "choose a family that acts, such as model=openvla")
    elif context.config.rollout.workflow is None and context.verb in (None, "train", "eval"):
        message = f"model.model_type={FAMILY} writes text, and nothing turns it into actions"
        hint = "name a workflow that calls engine.generate, as examples/planner does"
        yield Finding("rollout.workflow", message, hint, "module:Class", others=("model.model_type",))


@RULES.rule("model", "algorithm.reward_type", "rollout.backend")
def a_message_is_a_chunk(context: Context) -> Iterator[Finding]:
    """A message is one chunk of one element, written from the conversation alone."""
    config = context.config
    model = config.model
    wanted = (
        ("model.num_action_chunks", model.num_action_chunks, 1),
        ("model.value_head.output", model.value_head.output, "chunk"),
        ("algorithm.reward_type", config.algorithm.reward_type, "chunk_level"),
        ("model.condition", model.condition, None),
        ("model.stats_path", model.stats_path, None),
        ("model.center_crop", model.center_crop, False),
        ("model.freeze_vision", model.freeze_vision, False),
        ("model.small_actor.kind", model.small_actor.kind, None),
        ("model.gripper", model.gripper, "as_is"),
    )
    for key, value, only in wanted:
        if value != only:
            allowed = "null" if only is None else str(only).lower()
            message = f"a chunk of model.model_type={FAMILY} is a message, not actions"
            yield Finding(key, message, f"set it to {allowed}", allowed, others=("model.model_type",))
    if config.rollout.backend not in ("native", "vllm"):
        message = f"a chunk of model.model_type={FAMILY} is a message, which policy servers do not send"
        hint = "set it to native or vllm"
        yield Finding("rollout.backend", message, hint, "native", others=("model.model_type",))


def num_parameters(config: ModelConfig) -> int:
    """Return the approximate parameter count of a planner without a checkpoint (matrices only)."""
    assert isinstance(config, PlannerModelConfig)
    shape = config.planner
    layer = 4 * shape.hidden_size**2 + 3 * shape.hidden_size * shape.intermediate_size * (shape.num_experts or 1)
    return shape.num_hidden_layers * layer + 2 * 263 * shape.hidden_size


SPEC = ModelSpec(
    name=FAMILY,
    target="embodrl.models.planner.build:build_planner",
    description="a language model, public or of bytes, that writes messages and tool calls, for workflows",
    recognizes=lambda raw: own_section(raw).get("family", FAMILY) == FAMILY and raw.get("model_type") in PUBLIC,
    settings=PlannerModelConfig,
    rules=(RULES,),
    kind="text",
    autoregressive=True,
    value_inputs=("prompt_end",),
    trainable=("all", "lora"),
    uses_state=False,
    uses_images=False,
    num_parameters=num_parameters,
    experts=experts,
    sizes="0.1 M",
    actions="none: text, of which a workflow makes actions",
    checkpoint="a causal language model of transformers: Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE",
    rl="log-probs of written tokens: temperature, top-k",
)
