"""Training backends and their processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from embodrl.config.rules.base import Context, divisors, note, rule
from embodrl.config.rules.cluster import KEY
from embodrl.errors import EmbodrlError
from embodrl.names import import_function
from embodrl.rule_set import Finding
from embodrl.specs import ENGINES

BACKEND = "actor.training_backend"
OPTIMIZER = "actor.optim.fn"


@rule(BACKEND, "actor.own_process", "cluster.launcher")
def parts_have_their_own_processes(context: Context) -> Iterator[Finding]:
    """Processes of fsdp and megatron hold sharded weights, which cannot run inference."""
    actor = context.config.actor
    if actor.training_backend != "native" and actor.own_process is False:
        yield Finding(
            "actor.own_process",
            f"is false, and the processes of {actor.training_backend} hold parts of the weights, which"
            " rollouts cannot use",
            "leave it out, or set actor=native",
            "null, true",
            others=(BACKEND,),
        )
    elif context.launcher.starts_everything and actor.own_process is False:
        message = f"is false, and cluster.launcher={context.launcher.name} starts a process even for that"
        yield Finding("actor.own_process", message, "leave it out", "null, true", others=("cluster.launcher",))


@rule(BACKEND, KEY, "cluster", "env.num_processes", "rollout.backend")
def parts_have_a_device_a_process(context: Context) -> Iterator[Finding]:
    """Each process of fsdp or megatron has one GPU of its own; NCCL refuses two processes on one GPU."""
    backend = context.config.actor.training_backend
    if backend == "native":
        return
    if context.deployment is None:
        return  # other rules report it
    processes = context.deployment.of("actor")
    several = next((p for p in processes if len(p.devices) > 1), None)
    if several is not None:
        message = f"process {several.rank} of the actor gets {len(several.devices)} GPUs, and one of {backend} uses one"
        yield Finding(KEY, message, "leave out what follows the colon", "one process per GPU", others=(BACKEND,))
    used = [(p.node, device) for p in processes for device in p.devices]
    twice = next((gpu for gpu in used if used.count(gpu) > 1), None)
    if twice is not None:
        message = f"{used.count(twice)} processes of the actor share GPU {twice[1]}, and NCCL refuses that"
        yield Finding(KEY, message, "leave out what follows the colon", "one process per GPU", others=(BACKEND,))


@rule("actor.tensor_parallel_size", BACKEND, KEY, "cluster", "model", "env.num_processes", "rollout.backend")
def layers_can_be_cut(context: Context) -> Iterator[Finding]:
    """Tensor parallelism needs fsdp or megatron, a process count that it divides, and no adapters."""
    actor = context.config.actor
    key = "actor.tensor_parallel_size"
    size = actor.tensor_parallel_size
    if size == 1:
        return
    if actor.training_backend == "native":
        message = f"is {size}, and the backend '{actor.training_backend}' does not split layers"
        hint = "set actor=fsdp or actor=megatron, or leave it at 1"
        yield Finding(key, message, hint, "1", others=(BACKEND,))
        return
    if context.config.model.small_actor.kind is not None or (context.family and context.family.off_policy):
        message = f"is {size}, and a small actor has no layers to split among processes"
        yield Finding(key, message, "leave it at 1", "1", others=("model.model_type",))
    if context.config.model.trainable == "lora" and actor.training_backend == "fsdp":
        message = f"is {size}, and layers with low-rank adapters can't be split"
        yield Finding(
            key, message, "leave it at 1, or choose another model.trainable", "1", others=("model.trainable",)
        )
    if context.deployment is None:
        return
    count = len(context.deployment.of("actor"))
    if count % size:
        message = f"{count} actor process(es) / {size} leaves {count % size}"
        hint = f"set it to {divisors(count, size)}"
        if context.solution.gpus_per_node == 0:
            hint += f", or place {size} processes on the CPU: {KEY}={{actor:'0:0-{size - 1}',rollout:0,env:0}}"
        yield Finding(key, message, hint, f"a divisor of {count}", others=(KEY,))


@rule(BACKEND, "model.trainable")
def backend_trains_adapters(context: Context) -> Iterator[Finding]:
    """Some training backends do not support low-rank adapters."""
    backend = context.config.actor.training_backend
    model = context.config.model
    if model.trainable == "lora" and not context.training_engine.trains_adapters:
        message = f"'{backend}' has no low-rank adapters, and model.trainable is 'lora'"
        hint = "set actor=fsdp, or model.trainable=all"
        able = ", ".join(spec.name for spec in ENGINES.all() if spec.training and spec.trains_adapters)
        yield Finding(BACKEND, message, hint, able, others=("model.trainable",))


@rule(BACKEND, "algorithm.loss_type", "algorithm.bc_coef")
def backend_runs_the_update(context: Context) -> Iterator[Finding]:
    """Some training backends only update from rollouts: they neither imitate nor train critics."""
    algorithm = context.config.algorithm
    if context.training_engine.every_update or not (context.loss.learns_from_records or algorithm.bc_coef):
        return
    cause = "algorithm.loss_type" if context.loss.learns_from_records else "algorithm.bc_coef"
    message = f"'{context.config.actor.training_backend}' only updates from rollouts: it neither imitates nor trains"
    message += f" critics, which {cause} asks for"
    able = ", ".join(spec.name for spec in ENGINES.all() if spec.training and spec.every_update)
    yield Finding(BACKEND, message, "set actor=native or actor=fsdp", able, others=(cause,))


@rule("actor.fsdp.cpu_offload", "cluster")
def offload_needs_a_gpu(context: Context) -> Iterator[Finding]:
    """Offloading needs a GPU."""
    if context.config.actor.fsdp.cpu_offload and context.solution.gpus_per_node == 0:
        yield Finding(
            "actor.fsdp.cpu_offload",
            "is true, and weights that train on a CPU are in main memory already",
            "set it to false",
            "false",
            others=("cluster.device",),
        )


@rule(OPTIMIZER, "actor.optim.arguments")
def optimizer_can_be_made(context: Context) -> Iterator[Finding]:
    """The function of the optimizer can be imported, and takes the arguments."""
    optim = context.config.actor.optim
    if optim.fn is None:
        return
    for name, key in (("lr", "actor.optim.lr"), ("weight_decay", "actor.optim.weight_decay")):
        if name in optim.arguments:
            message = f"{name} would have no effect: every parameter group gets {key}"
            yield Finding("actor.optim.arguments", message, f"leave it out, and set {key}", others=(key, OPTIMIZER))
    try:
        signature = inspect.signature(import_function(optim.fn))
    except EmbodrlError as error:
        hint = error.hint or "put the module's directory on PYTHONPATH, or correct the name"
        yield Finding(OPTIMIZER, error.message, hint, "module:function, or null")
        return
    except ValueError:
        return  # implemented in C: its signature is not available
    try:
        signature.bind([], **optim.arguments)
    except TypeError as error:
        message = f"'{optim.fn}' can't be called with parameter groups and these: {error}"
        hint = f"its parameters are {', '.join(signature.parameters)}"
        yield Finding("actor.optim.arguments", message, hint, others=(OPTIMIZER,))


@note(OPTIMIZER, "actor.optim.betas", "actor.optim.eps", "algorithm.loss_type")
def adamw_settings_have_an_effect(context: Context) -> Iterator[Finding]:
    """``betas`` and ``eps`` are AdamW's: with another optimizer they reach the critics alone."""
    if context.config.actor.optim.fn is None or context.loss.off_policy:
        return
    for key in ("actor.optim.betas", "actor.optim.eps"):
        if context.by_user(key):
            yield Finding(key, "has no effect: it is AdamW's, and actor.optim.fn is another optimizer", "leave it out")
