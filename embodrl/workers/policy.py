"""From configuration to a policy on its device."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from embodrl.config.policy_card import known_instructions, policy_directory
from embodrl.config.schema import Config
from embodrl.deployment import Deployment, ProcessPlace
from embodrl.errors import EmbodrlError
from embodrl.models import registry
from embodrl.models.base import CHECKPOINTING, IMITATION, Decoding, VLAPolicy, check_decoding, require
from embodrl.models.common.condition import conditioned
from embodrl.models.common.own_critic import add_critic
from embodrl.models.memory import state_memory
from embodrl.preflight.memory import memory_limit_bytes
from embodrl.specs import LOSSES

logger = logging.getLogger(__name__)

GIB = 1 << 30
# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


def resolve_device(config: Config) -> torch.device:
    """Return the policy's device; auto is the first GPU if there is one.

    Raises:
        EmbodrlError: a GPU is requested and torch sees none.
    """
    setting = config.cluster.device
    if setting == "cuda" and not torch.cuda.is_available():
        raise EmbodrlError(
            "cluster.device is cuda, but torch sees no GPU", "set cluster.device=auto or cpu", code="gpu-missing"
        )
    return torch.device("cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu")


def check_memory(
    config: Config,
    deployment: Deployment,
    training: bool = True,
    device: torch.device | None = None,
    decoding: Decoding | Literal["all"] = "all",
) -> None:
    """Reject a model whose weights, gradients and optimizer, or prompts, cannot fit, judging by shapes and files alone.

    Also reject a decoding that the policy lacks. Checkpoints on the hub are not checked: only their files tell the
    size.

    Args:
        config: run configuration.
        deployment: placement of the run.
        training: include gradients and optimizer.
        device: device of the policy; None uses the configured one.
        decoding: decoding that the verb uses; ``all`` for every decoding of the policy.

    Raises:
        EmbodrlError: the device has too little memory, a task instruction is longer than a prompt may be, the decoding
            does not exist, or the policy lacks what a training setting needs.
        CheckpointError: see the family's builder.
    """
    model = config.model
    if model.model_path is not None and not Path(model.model_path).expanduser().is_dir():
        return
    # A warm start has the size of the section; its file may be gone when a run is resumed.
    model = model.model_copy(update={"warm_start": None})
    device = resolve_device(config) if device is None else device
    policy, _ = registry.build_policy(model, device="meta", dtype=param_dtype(config), seed=0)
    known = [conditioned(text, config.model.condition) for text in known_instructions(config).values() if text]
    policy.check_instructions(known, len(config.env.cameras))
    check_policy_decoding(config, policy, decoding)
    if training:
        check_features(config, policy)
    weights, *state = state_memory(policy, master_weights=config.actor.optim.master_weights is not False)
    needed = weights + training * sum(state)
    if training and device.type == "cuda" and config.actor.training_backend != "native":
        count = config.cluster.controllers
        # A controller also acts, with whole weights.
        needed = needed // (len(deployment.of("actor")) * count) + (weights if count > 1 else 0)
    room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory_limit_bytes()
    if needed > room:
        what = "weights, gradients and optimizer" if training else "the weights"
        raise EmbodrlError(
            f"{what} of {model.model_type} take {needed / GIB:.0f} GiB in"
            f" {config.actor.param_dtype}, and {'the GPU' if device.type == 'cuda' else 'this machine'} has"
            f" {room / GIB:.0f} GiB",
            _memory_hint(config, training),
            code="model-too-large",
        )


def check_policy_decoding(config: Config, policy: VLAPolicy, decoding: Decoding | Literal["all"]) -> None:
    """Reject a decoding that the policy lacks, before simulators start or clients connect.

    Raises:
        EmbodrlError: the policy lacks the decoding.
    """
    if decoding != "all":
        check_decoding(decoding, policy.decodings, config.model.model_type)


def check_features(config: Config, policy: VLAPolicy) -> None:
    """Reject training settings that need features the policy lacks.

    Raises:
        EmbodrlError: a feature is missing.
    """
    algorithm = config.algorithm
    loss = LOSSES.entry(algorithm.loss_type)
    if config.actor.gradient_checkpointing:
        require(policy, CHECKPOINTING)
    if algorithm.bc_coef:
        require(policy, IMITATION, "algorithm.bc_coef")
    if loss.imitates or loss.offline:
        require(policy, IMITATION, f"algorithm.loss_type={algorithm.loss_type}")


def _memory_hint(config: Config, training: bool) -> str:
    smaller = "choose a smaller model or a larger device"
    if training and config.model.trainable != "lora":
        return f"set model.trainable=lora with actor.param_dtype=bf16, or {smaller}"
    return smaller if config.actor.param_dtype == "bf16" else f"set actor.param_dtype=bf16, or {smaller}"


def param_dtype(config: Config) -> torch.dtype:
    """Return the dtype of the weights."""
    return torch.bfloat16 if config.actor.param_dtype == "bf16" else torch.float32


def num_threads(config: Config) -> int:
    """Return the number of cores for a policy that has this machine to itself; workers use ``Deployment``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    return config.cluster.num_threads or cores


def num_generators(config: Config, deployment: Deployment) -> list[int]:
    """Return the number of random generators of each acting process; empty if only its engine knows."""
    if config.rollout.backend != "native":
        return []
    on_cpu = resolve_device(config).type == "cpu"
    return [deployment.threads_of(place) if on_cpu else 1 for place in deployment.of("rollout")]


def configure_torch(config: Config, place: ProcessPlace | None = None, threads: int | None = None) -> torch.device:
    """Set device, threads and seeds; return the policy's device.

    Args:
        config: run configuration.
        place: placement of the driver's own work, which uses the first of its GPUs; None in workers, whose
            CUDA_VISIBLE_DEVICES lists only their own.
        threads: threads of operations that prepare work for a GPU; None uses all cores.
    """
    device = resolve_device(config)
    if place is not None and place.visible == "":  # placed on the CPU of a machine with GPUs
        device = torch.device("cpu")
    elif place is not None and place.devices and device.type == "cuda":
        torch.cuda.set_device(place.devices[0])
    # The engines distribute whole batches over threads; torch must not split operations as well.
    torch.set_num_threads(1 if device.type == "cpu" else threads or num_threads(config))
    torch.manual_seed(config.runner.seed)
    if device.type == "cpu":
        # Like use_deterministic_algorithms(True), which also imports the compiler: 1.7 s.
        torch.set_deterministic_debug_mode("error")
        # It would fill every new tensor before its first write; reading uninitialised memory is a bug anyway.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        keep_freed_memory()
    return device


def keep_freed_memory() -> None:
    """Let glibc keep the memory that torch frees, up to 2 GiB, instead of returning it to the system.

    Every micro-batch allocates and frees the same tensors of some megabytes. Remapping their pages each time costs
    about a tenth of an update.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    for option, num_bytes in ((_M_MMAP_THRESHOLD, 2**30), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26)):
        mallopt(option, num_bytes)


def build_policy(config: Config, device: torch.device | None = None) -> VLAPolicy:
    """Build or load the policy, and log the loaded names; ``device`` None uses the configured one."""
    device = resolve_device(config) if device is None else device
    of_its_own = config.model.add_value_head and config.algorithm.critic.kind == "network"
    model = config.model.model_copy(update={"add_value_head": False}) if of_its_own else config.model
    policy, report = registry.build_policy(model, device=device, dtype=param_dtype(config), seed=config.runner.seed)
    if of_its_own:
        add_critic(policy, config, policy_directory(model), report)
    logger.info(
        "policy from %s: %d tensors loaded, %d initialised, %d ignored",
        report.source,
        report.num_loaded,
        len(report.initialized),
        len(report.ignored),
    )
    logger.info("%s", report.describe(limit=10))
    policy.condition = config.model.condition
    policy.eval()
    if config.actor.gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    return policy


def in_memory(config: Config) -> Config:
    """Return the configuration of a policy that is only sent to other processes, and needs no GPU."""
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "cpu"})})


@dataclass(frozen=True)
class RecordedPolicy:
    """A policy that acts in place of experts; ``fingerprint`` is its ``weights_fingerprint``, "" if unknown."""

    name: str
    policy: VLAPolicy
    fingerprint: str = ""


def weights_fingerprint(policy: VLAPolicy) -> str:
    """Return a digest of the names, the shapes and at most about 500 numbers of each tensor.

    It distinguishes two policies within moments, however large they are; it does not detect damage.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if not tensor.is_meta and tensor.numel():
            sample = tensor.detach().flatten()[:: max(tensor.numel() // 256, 1)]
            digest.update(sample.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
