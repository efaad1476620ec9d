"""Memory of a run by place and component, estimated before anything starts. ``embodrl plan`` explains each figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch

from embodrl.config.schema import Config, model_settings
from embodrl.deployment import Deployment, ProcessPlace
from embodrl.deployment.solver import hardware_by_node, node_component
from embodrl.deployment.topology import GIB
from embodrl.hybrid_engines.figures import ModelFigures
from embodrl.hybrid_engines.training.sharding import blocks_of
from embodrl.models.base import VLAPolicy
from embodrl.models.common.teacher import is_apart, teacher_num_bytes
from embodrl.models.registry import build_policy
from embodrl.names import import_object, workflow_agents
from embodrl.preflight.memory import memory_limit_bytes
from embodrl.preflight.rollout_memory import kv_cache_bytes, recorded_bytes
from embodrl.preflight.training_memory import estimate, token_counts
from embodrl.specs import ENGINES, ENVS, MODELS

MIB = 1 << 20
HOST = -1
"""Device number of main memory."""
# Proportional set size of a ManiSkill process with PhysX and rendering on the CPU after some steps of PushCube-v1 at
# 64 x 64 pixels: 601 MiB with 1 environment, 619 with 8, 671 with 16, 703 with 32; 656 with 16 at 224 x 224.
PYTHON_BYTES = 420 * MIB
"""Memory of the main process with torch and transformers loaded, without its tensors."""
KEPT_FREED_BYTES = 900 * 2**20
"""Fragmentation between the tensors of a process that trains on a CPU: see ``workers.policy.keep_freed_memory``."""
PHASES = ("training", "handover", "rollouts")
"""During a handover, new weights move from training to rollout processes."""
# Device memory of allocator, kernels and libraries, in addition to the counted part.
HEADROOM = 0.9
TINY_PARAMETERS = 100_000_000
"""The smallest published family has four times as many, the largest tiny size a fiftieth."""

ESTIMATED_BY = {
    "weights": "counted: parameters and buffers, and a copy in the type of autocast; for fsdp, a process's shard"
    " and the blocks gathered at a time",
    "gradients": "counted: one for every trained parameter, in its dtype; for fsdp unsharded during accumulation",
    "optimizer": "counted: AdamW's two moments of every trained parameter; for parameters in bf16 also a float32 copy",
    "reference": "counted: a copy of the trained parameters where algorithm.kl.coef is above 0; or a whole teacher",
    "activations": "estimated: inputs and outputs of linear layers and norms of one micro-batch; no attention scores",
    "rollout weights": "counted: parameters and buffers; 0 where the rollout acts with the actor's, unless vLLM copies"
    " them",
    "kept policy": "counted: parameters and buffers of a main process that neither trains nor acts, for checkpoints,"
    " publishing and export; and, with rollouts ahead of training, the trained parameters used by rollout processes",
    "KV cache": "counted: 2 x layers x rows decided at once x key-value heads x positions x head width x bytes",
    "trajectory buffer": "counted: record of a chunk, from one prepared observation, x chunks of an iteration; once"
    " over the rollouts, once in a main process that joins them, and once in each training process",
    "simulator": "measured once with ManiSkill on a CPU: 600 MiB per process and 5 MiB per environment; other"
    " simulators and GPU memory of rendering are not counted",
    "offloaded": "counted: GPU memory offloaded between phases, in pinned main memory that PyTorch keeps, without its"
    " rounding of every tensor up to a power of two",
    "allocator": "measured: freed memory that a process that trains on a CPU keeps, 0.6 to 1.5 GiB; at most as much as"
    " its tensors take",
    "evaluation": "runner.eval_async: program, weights, KV cache and simulators of the process that evaluates during"
    " training, as for the others",
    "program": "measured once: Python with torch and transformers, 420 MiB per process of actor, rollout or a node",
}


@dataclass(frozen=True)
class MemoryOf:
    """Memory needed of one device or host.

    Attributes:
        device: GPU number, or HOST.
        needed: bytes by component.
        available: bytes; 0 if unknown.
        away: components offloaded in a phase, one of PHASES.
    """

    node: int
    device: int
    needed: dict[str, int]
    available: int
    away: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def in_phase(self, phase: str) -> int:
        away = self.away.get(phase, frozenset[str]())
        return sum(num_bytes for component, num_bytes in self.needed.items() if component not in away)

    @property
    def total(self) -> int:
        """Peak bytes over the phases."""
        return max(self.in_phase(phase) for phase in PHASES)

    @property
    def name(self) -> str:
        return f"node {self.node} {'main memory' if self.device == HOST else f'GPU {self.device}'}"

    @property
    def missing(self) -> int:
        """Bytes that are missing for everything to fit with a tenth to spare; 0 if it fits, or the size is unknown."""
        return max(0, math.ceil(self.total - HEADROOM * self.available)) if self.available else 0

    @property
    def fits(self) -> bool:
        """Whether everything fits with a tenth to spare; True if the size is unknown."""
        return not self.missing

    @property
    def shortage(self) -> str:
        """What is needed and what there is, in words."""
        return f"{self.name} needs {gib(self.total)} GiB, and nine tenths of {gib(self.available)} GiB can be used"


@dataclass(frozen=True)
class MemoryPlan:
    """All memories used by a placement.

    Attributes:
        not_estimated: why the model has no figures; else "".
        hints: changes for a memory that is too small or of unknown size.
        num_parameters: parameters of the policy; 0 if unknown.
        tiny: a tiny size, without a checkpoint, of a family that is published larger.
        public_size: preset of the published size, if the planned one is tiny.
    """

    memories: list[MemoryOf]
    not_estimated: str = ""
    hints: list[str] = field(default_factory=list[str])
    num_parameters: int = 0
    tiny: bool = False
    public_size: str = ""


def gib(num_bytes: int) -> str:
    """Return bytes in GiB."""
    return f"{num_bytes / GIB:.2f}"


def chunks_of(config: Config) -> int:
    """Return the chunks of an iteration, over all environments and the agents of a workflow."""
    rows = config.env.train.total_num_envs * (len(workflow_agents(config.rollout.workflow)) or 1)
    return rows * config.rollout_chunks * config.algorithm.rollout_epoch


def model_figures(config: Config, on_gpu: bool, num_rollouts: int) -> ModelFigures:
    """Return the figures of a model from its shapes; raises CheckpointError as the family's builder.

    ``on_gpu`` computes in bf16 if ``actor.precision`` is auto, otherwise float32 is assumed. ``num_rollouts`` processes
    share the environments.
    """
    param_dtype = torch.bfloat16 if config.actor.param_dtype == "bf16" else torch.float32
    low = config.actor.precision == "bf16" or (config.actor.precision == "auto" and on_gpu)
    compute_dtype = torch.bfloat16 if low else param_dtype
    policy = _shapes(config.model.model_type, config.model.model_dump_json(), param_dtype)
    cameras = config.env.cameras
    training = estimate(
        policy,
        token_counts(policy, len(cameras)),
        config.actor.micro_batch_size,
        compute_dtype,
        config.actor.gradient_checkpointing,
        config.actor.optim.master_weights is not False,
    )
    plain = sum(t.numel() * t.element_size() for t in (*policy.parameters(), *policy.buffers()))
    rows = -(-config.env.train.total_num_envs // (num_rollouts * config.rollout.pipeline_stages))
    itemsize = compute_dtype.itemsize if on_gpu else torch.float32.itemsize
    height = cameras[0].height
    width = cameras[0].width
    recorded = recorded_bytes(policy, len(cameras), height, width)
    cache = kv_cache_bytes(policy, rows, len(cameras), itemsize)
    gathered = gathered_bytes(policy) if ENGINES.entry(config.actor.training_backend).shards else 0
    count = sum(parameter.numel() for parameter in policy.parameters())
    return ModelFigures(policy, training, training.gradients, plain, cache, recorded, gathered, count)


@lru_cache(maxsize=2)
def _shapes(model_type: str, section: str, dtype: torch.dtype) -> VLAPolicy:
    """Return the policy of a section without weights; cached, since `embodrl plan --fit` asks repeatedly."""
    model = model_settings(model_type).model_validate_json(section)
    model = model.model_copy(update={"warm_start": None})  # it has the size defined by the section
    return build_policy(model, device="meta", dtype=dtype, seed=0)[0]


def gathered_bytes(policy: VLAPolicy) -> int:
    """Return the bytes outside of blocks, and of two blocks: one computes while the next is gathered."""
    sizes = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks_of(policy)]
    total = sum(p.numel() * p.element_size() for p in policy.parameters())
    return total - sum(sizes) + 2 * max(sizes, default=0)


def plan_memory(config: Config, deployment: Deployment) -> MemoryPlan:
    """Estimate every memory that the deployment uses; every component is explained in ``ESTIMATED_BY``.

    Raises:
        CheckpointError: the model's files can't be read.
    """
    needed: dict[tuple[int, int], dict[str, int]] = {}

    def add(where: tuple[int, int], component: str, num_bytes: int) -> None:
        assert component in ESTIMATED_BY, component
        found = needed.setdefault(where, {})
        found[component] = found.get(component, 0) + num_bytes

    actors = deployment.of("actor")
    rollouts = deployment.of("rollout")
    path = config.model.model_path
    unknown = path is not None and not Path(path).expanduser().is_dir()
    figures = None
    if not unknown:
        figures = model_figures(config, bool(actors[0].devices), len(rollouts))
        _add_model(config, deployment, figures, add)
    for place in _programs(config, deployment):
        add((place.node, HOST), "program", PYTHON_BYTES)
    if deployment.main_component is None:
        add((0, HOST), "program", PYTHON_BYTES)
        add((0, HOST), "kept policy", 0 if figures is None else figures.plain)
    if deployment.rolls_out_in_processes and config.runner.max_staleness and figures is not None:
        add((0, HOST), "kept policy", figures.trained)
    simulators = deployment.of("env")
    simulator = ENVS.entry(config.env.env_type)
    if simulator.process_bytes:
        share = -(-config.env.train.total_num_envs // len(simulators))
        for place in (*simulators, *deployment.of("eval_env")):
            component = "simulator" if place.component == "env" else "evaluation"
            add((place.node, HOST), component, simulator.process_bytes + share * simulator.env_bytes)
    for place in deployment.of("eval"):
        add((place.node, HOST), "evaluation", PYTHON_BYTES)
        add(_memories(place)[0], "evaluation", 0 if figures is None else figures.plain + figures.kv_cache)
    away = _offloaded(config, deployment)
    memories = [
        MemoryOf(node, device, parts, _available(config, deployment, node, device), away[device != HOST])
        for (node, device), parts in sorted(needed.items())
    ]
    hints = [line for memory in memories if not memory.fits for line in remedies_of(config, memory, figures)]
    return _with_size(config, figures, MemoryPlan(memories, hints=list(dict.fromkeys(hints))))


def _programs(config: Config, deployment: Deployment) -> Iterator[ProcessPlace]:
    """Yield the places that have a Python with torch, besides a main process that only drives the others."""
    yield from deployment.of("actor")
    yield from (place for place in deployment.of("rollout") if not _shares_weights(deployment, place))
    for name in config.pipeline.placement:
        yield from deployment.of(node_component(name))
    yield from deployment.simulator_hosts


def _with_size(config: Config, figures: ModelFigures | None, plan: MemoryPlan) -> MemoryPlan:
    """Return the plan with the size of the model, or with a hint if it is unknown."""
    path = config.model.model_path
    size = public_size(config)
    if figures is None:
        instead = f", or plan its size with {size} model.model_path=null" if size else ""
        hint = f"give the directory of its files, see `embodrl fetch`{instead}"
        reason = f"model.model_path '{path}' is not a local directory: its size is unknown"
        return replace(plan, not_estimated=reason, hints=[*plan.hints, hint])
    count = figures.num_parameters
    has_larger = MODELS.entry(config.model.model_type).public_layout
    tiny = path is None and count < TINY_PARAMETERS and has_larger
    return replace(plan, num_parameters=count, tiny=tiny, public_size=size if tiny else "")


def public_size(config: Config) -> str:
    """Return the preset with the dimensions of a family's published weights; "" if there is none."""
    spec = MODELS.entry(config.model.model_type)
    return f"model={spec.public_preset}" if spec.public_preset else ""


def _add_model(
    config: Config, deployment: Deployment, figures: ModelFigures, add: Callable[[tuple[int, int], str, int], None]
) -> None:
    """Add the memory that the model needs in each process, component by component."""
    _add_actors(config, deployment, _actor_bytes(config, deployment, figures), add)
    rollouts = deployment.of("rollout")
    whole = figures.recorded * chunks_of(config)
    if deployment.rolls_out_in_processes:  # the main process joins the parts of all rollouts
        add((0, HOST), "trajectory buffer", whole)
    for place in (
        deployment.of("actor") if deployment.trains_in_processes else ()
    ):  # each training process gets all of it
        add((place.node, HOST), "trajectory buffer", whole)
    for place in rollouts:
        own = ENGINES.entry(config.rollout.backend).own_weights or not _shares_weights(deployment, place)
        # A controller acts with whole weights beside its shards.
        own = own or (config.cluster.controllers > 1 and ENGINES.entry(config.actor.training_backend).shards)
        weights = figures.plain if own else 0
        for where in _memories(place):
            add(where, "rollout weights", weights // len(_memories(place)))
            add(where, "KV cache", figures.kv_cache // len(_memories(place)))
        if place.devices and _offloads_rollout(config, deployment):
            add((place.node, HOST), "offloaded", weights)
        add((place.node, HOST), "trajectory buffer", whole // len(rollouts))


def _add_actors(
    config: Config,
    deployment: Deployment,
    parts: Mapping[str, int],
    add: Callable[[tuple[int, int], str, int], None],
) -> None:
    actors = deployment.of("actor")
    for place in actors:
        for where in _memories(place):
            for component, num_bytes in parts.items():
                add(where, component, num_bytes // len(_memories(place)))
        if not place.devices:
            add((place.node, HOST), "allocator", min(KEPT_FREED_BYTES, sum(parts.values())))
    if config.actor.enable_offload:
        for place in (place for place in actors if place.devices):
            drops = ENGINES.entry(config.actor.training_backend).frees_gradients
            freed = {"activations", "gradients"} if drops else {"activations"}
            moved = sum(parts[component] for component in _training_only(deployment) - freed)
            add((place.node, HOST), "offloaded", moved)


def _training_only(deployment: Deployment) -> frozenset[str]:
    weights = {"weights"} if _has_separate_weights(deployment) else set[str]()
    return frozenset({"gradients", "optimizer", "reference", "activations", *weights})


def _offloads_rollout(config: Config, deployment: Deployment) -> bool:
    """Whether the rollout has its own weights and ``rollout.enable_offload`` offloads them."""
    own = ENGINES.entry(config.rollout.backend).own_weights
    return config.rollout.enable_offload and (own or _has_separate_weights(deployment))


def _has_separate_weights(deployment: Deployment) -> bool:
    """Whether training and rollout are different processes, each with its own weights."""
    return deployment.has_processes


def _offloaded(config: Config, deployment: Deployment) -> dict[bool, dict[str, frozenset[str]]]:
    """Return what is offloaded in a phase, for main memory (False) and GPUs (True).

    Content offloaded from a CPU stays in main memory.
    """
    nothing = frozenset[str]()
    ends = config.env.enable_offload and config.env.offload_level == "process"
    acts = frozenset({"rollout weights", "KV cache"}) if _offloads_rollout(config, deployment) else nothing
    trains = _training_only(deployment) if config.actor.enable_offload else nothing
    simulators = frozenset({"simulator"}) if ends else nothing
    done = frozenset({"gradients", "activations", "KV cache"}) if acts else nothing
    return {
        False: {"training": simulators, "handover": simulators},
        True: {"training": acts, "handover": done, "rollouts": trains},
    }


def _actor_bytes(config: Config, deployment: Deployment, figures: ModelFigures) -> dict[str, int]:
    training = figures.training
    actor = config.actor
    num_actors = len(deployment.of("actor"))
    reference = figures.trained if config.algorithm.kl.coef > 0 else 0
    whole = 0  # of a teacher beside the policy, in every process
    if is_apart(config):
        dtype = torch.bfloat16 if actor.param_dtype == "bf16" else torch.float32
        reference, whole = 0, teacher_num_bytes(config, dtype)
    if actor.training_backend == "native":
        return {
            "weights": training.weights,
            "gradients": training.gradients,
            "optimizer": training.optimizer,
            "reference": reference + whole,
            "activations": training.activations,
        }
    estimate_process = ENGINES.entry(actor.training_backend).training_memory
    if estimate_process:
        parts = import_object(estimate_process)(config, deployment, figures, reference)
        return parts | {"reference": parts["reference"] + whole}
    cut = num_actors * config.cluster.controllers
    layers = actor.tensor_parallel_size
    share = actor.global_batch_size // max(1, cut // layers)
    # While gradients of several micro-batches accumulate, they are unsharded.
    adds_up = share > actor.micro_batch_size and not actor.fsdp.reduce_every_micro_batch
    return {
        "weights": training.weights // cut + figures.gathered // layers,
        "gradients": training.gradients // (layers if adds_up else cut),
        "optimizer": training.optimizer // cut,
        "reference": reference // cut + whole,
        "activations": training.activations,
    }


def _memories(place: ProcessPlace) -> list[tuple[int, int]]:
    return [(place.node, device) for device in place.devices] or [(place.node, HOST)]


def _shares_weights(deployment: Deployment, rollout: ProcessPlace) -> bool:
    """Whether a rollout uses the weights of an actor process: same machine and devices, same rank."""
    return not _has_separate_weights(deployment) and any(
        (a.rank, a.node, a.devices) == (rollout.rank, rollout.node, rollout.devices) for a in deployment.of("actor")
    )


def _available(config: Config, deployment: Deployment, node: int, device: int) -> int:
    if device != HOST:
        gpus = deployment.machines[node].gpus
        return gpus[device].memory_bytes if device < len(gpus) else 0
    hardware = hardware_by_node(config.cluster)[node]
    return memory_limit_bytes() if hardware.name is None else int(hardware.memory_gib * GIB)


def remedies_of(config: Config, memory: MemoryOf, figures: ModelFigures | None) -> list[str]:
    """Return remedies for a memory that is too small, the largest component first."""
    lines: list[str] = []
    largest = sorted(memory.needed.items(), key=lambda item: -item[1])
    for component in (name for name, num_bytes in largest if num_bytes):
        if component in ("weights", "gradients", "optimizer", "reference", "activations"):
            lines += _training_remedies(config, memory, component, figures)
        elif component == "rollout weights" and not config.rollout.enable_offload and not config.runner.max_staleness:
            lines.append("rollout.enable_offload=true keeps them in main memory while the policy trains")
        elif component == "evaluation":
            lines.append("runner.eval_async=false evaluates between iterations")
        elif component == "KV cache":
            lines.append("a larger rollout.pipeline_stages processes fewer rows at once")
        elif component in ("simulator", "trajectory buffer"):
            lines.append(f"fewer env.train.total_num_envs than {config.env.train.total_num_envs}, or env.num_processes")
            if component == "simulator" and not config.env.enable_offload and not config.runner.max_staleness:
                lines.append("env.enable_offload=true ends the simulators while the policy trains")
    return list(dict.fromkeys(lines))


def _training_remedies(config: Config, memory: MemoryOf, component: str, figures: ModelFigures | None) -> Iterator[str]:
    actor = config.actor
    if component != "activations":
        adapters = config.model.trainable == "lora"
        if not adapters:
            yield "model.trainable=lora needs little memory for gradients and optimizer"
        if actor.param_dtype == "fp32":
            yield (
                "actor.param_dtype=bf16 halves the weights; adapters stay in float32"
                if adapters
                else "actor.param_dtype=bf16 with model.trainable=lora halves the weights; alone it saves little, given"
                " the optimizer's float32 copies"
            )
    elif figures is not None:
        rest = HEADROOM * memory.available - (memory.total - memory.needed[component])
        rows = int(rest / max(1, memory.needed[component] / actor.micro_batch_size))
        if rows >= 1:
            yield f"actor.micro_batch_size of at most {rows}"
        if not actor.gradient_checkpointing:
            yield "actor.gradient_checkpointing=true keeps one input per block"


def as_plain(plan: MemoryPlan) -> list[Mapping[str, object]]:
    """Return the memories as plain values, for JSON."""
    return [
        {
            "node": memory.node,
            "device": None if memory.device == HOST else memory.device,
            "needed_bytes": {**memory.needed, "total": memory.total},
            "phase_bytes": {phase: memory.in_phase(phase) for phase in PHASES},
            "available_bytes": memory.available or None,
            "fits": memory.fits if memory.available else None,
        }
        for memory in plan.memories
    ]
