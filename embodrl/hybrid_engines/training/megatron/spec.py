"""The training backend megatron, for the configuration: no torch here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from embodrl.config.rules.base import Context, divisors, teacher_is_apart
from embodrl.models.openvla.spec import OpenVlaConfig
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import MODELS, EngineSpec

BACKEND = "actor.training_backend"
MASTERS = "actor.optim.master_weights"
RULES = RuleSet()


@RULES.rule(BACKEND, "model.model_type")
def megatron_can_train(context: Context) -> Iterator[Finding]:
    """megatron supports some model families."""
    if context.family is None or not context.family.tensor_parallel:
        able = ", ".join(spec.name for spec in MODELS.all() if spec.tensor_parallel)
        message = f"'megatron' trains {able}, and model.model_type is '{context.config.model.model_type}'"
        hint = f"set actor=fsdp, or model={able}"
        yield Finding(BACKEND, message, hint, "native, fsdp", others=("model.model_type",))


@RULES.rule(BACKEND, "model.model_type", "model.trainable", "algorithm.loss_type", machine_specific=True)
def megatron_is_installed(context: Context) -> Iterator[Finding]:
    """The package of the backend megatron is an extra."""
    if has_megatron():
        return
    has_layers = context.family is not None and context.family.tensor_parallel
    from_records = context.loss.learns_from_records
    if has_layers and context.config.model.trainable != "lora" and not from_records:  # otherwise useless
        message = "'megatron' needs the package megatron-core, which is not installed"
        hint = "pip install 'embodrl[megatron]', or set actor=native or actor=fsdp"
        yield Finding(BACKEND, message, hint, "native, fsdp")


def has_megatron() -> bool:
    """Return whether megatron-core is installed, without importing it."""
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


@RULES.note("actor.param_dtype", BACKEND, "cluster", "model.trainable")
def megatron_rounds_updates_on_a_cpu(context: Context) -> Iterator[Finding]:
    """megatron has no float32 copies of bf16 weights on a CPU."""
    config = context.config
    if config.actor.param_dtype == "bf16" and config.model.trainable != "lora" and not context.solution.gpus_per_node:
        message = (
            "is bf16, and megatron has no float32 copies of weights on a CPU, and 80 to 90 % of the movement is"
            " rounded away at learning rates of 1e-5 and below"
        )
        hint = "set actor=fsdp, which has them, or actor.param_dtype=fp32"
        yield Finding("actor.param_dtype", message, hint, others=(BACKEND,))


@RULES.rule(BACKEND, "actor.optim.fn")
def megatron_has_its_own_optimizer(context: Context) -> Iterator[Finding]:
    """megatron-core shares out AdamW's state, and no other optimizer's."""
    if context.config.actor.optim.fn is not None:
        message = "the backend megatron has its own AdamW"
        hint = "set it to null, or set actor=native or actor=fsdp"
        yield Finding("actor.optim.fn", message, hint, "null", others=(BACKEND,))


@RULES.rule("algorithm.teacher", "algorithm.kl", BACKEND, "model")
def megatron_has_copies_for_teachers(context: Context) -> Iterator[Finding]:
    """A teacher that is a network of its own has not been tried in processes of megatron."""
    if teacher_is_apart(context.config):
        message = "is of another size or family than the policy, which the backend megatron does not support"
        hint = "set actor=fsdp or actor=native, or choose a teacher of the policy's shapes"
        yield Finding("algorithm.teacher", message, hint, "null", others=(BACKEND,))


@RULES.rule(MASTERS, BACKEND)
def megatron_keeps_its_own_masters(context: Context) -> Iterator[Finding]:
    """megatron-core itself decides about float32 copies."""
    asked = context.config.actor.optim.master_weights
    if asked != "auto":
        message = f"is {str(asked).lower()}, and megatron-core decides by itself: copies on CUDA, none on a CPU"
        yield Finding(MASTERS, message, "remove it, or set actor=fsdp", "auto", others=(BACKEND,))


@RULES.rule("actor.training_backend", "actor.tensor_parallel_size", "model")
def megatron_cuts_evenly(context: Context) -> Iterator[Finding]:
    """Heads and MLP units of a model without a checkpoint divide evenly; a checkpoint's are checked later."""
    model = context.config.model
    if not isinstance(model, OpenVlaConfig) or model.model_path is not None:
        return
    size = context.config.actor.tensor_parallel_size
    shape = model.architecture
    for name, number in (
        ("num_attention_heads", shape.num_attention_heads),
        ("intermediate_size", shape.intermediate_size),
    ):
        if number % size:
            yield Finding(
                "actor.tensor_parallel_size",
                f"is {size}, and model.architecture.{name} = {number}: {number} / {size} leaves {number % size}",
                f"set it to {divisors(number, size)}",
                f"a divisor of {number}",
                others=(f"model.architecture.{name}",),
            )


ENGINE = EngineSpec(
    name="megatron",
    training="embodrl.hybrid_engines.training.megatron.engine:make",
    description="OpenVLA's language model by megatron-core, one training process for each device",
    rules=(RULES,),
    shards=True,
    trains_adapters=False,
    every_update=False,
    keeps_masters=False,
    frees_gradients=False,
    training_memory="embodrl.hybrid_engines.training.megatron.memory:process_bytes",
)
