"""From the configuration to a policy on its device."""

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

from embodrl.config.policy_card import known_instructions
from embodrl.config.schema import Config
from embodrl.deployment import Deployment, ProcessPlace
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.models import registry
from embodrl.models.base import CHECKPOINTING, IMITATION, Decoding, VLAPolicy, check_decoding, require
from embodrl.models.common.condition import conditioned
from embodrl.models.memory import state_memory
from embodrl.preflight.memory import memory_limit_bytes
from embodrl.specs import LOSSES

logger = logging.getLogger(__name__)

GIB = 1 << 30
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


def resolve_device(config: Config) -> torch.device:
    """Return the device of the policy; auto is the first GPU if there is one.

    Raises:
        EmbodrlError: a GPU is asked for and torch sees none.
    """
    setting = config.cluster.device
    if setting == "cuda" and not torch.cuda.is_available():
        raise EmbodrlError(
            "cluster.device is cuda, and torch sees no GPU", "set cluster.device=auto or cpu", code="gpu-missing"
        )
    return torch.device("cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu")


def check_memory(
    config: Config,
    deployment: Deployment,
    training: bool = True,
    device: torch.device | None = None,
    decoding: Decoding | Literal["all"] = "all",
) -> None:
    """Refuse a model whose weights, gradients and optimizer, or prompts, can't fit, from its shapes and files alone.

    Refuse a decoding that it lacks, too: its family may have more than a small actor on it, or than its action head.

    A checkpoint on the hub is not looked at: only its files tell its size.

    Args:
        config: the run.
        deployment: of it.
        training: there are gradients and an optimizer.
        device: of the policy; None takes that of the configuration.
        decoding: what the verb chooses actions by; ``all`` takes those that there are.

    Raises:
        EmbodrlError: the device has less memory, an instruction of the tasks is longer than a prompt may be, or there
            is no such decoding, or the policy lacks what a setting of training needs.
        CheckpointError: see the family's builder.
    """
    model = config.model
    if model.model_path is not None and not Path(model.model_path).expanduser().is_dir():
        return
    # A warm start has the size of the section, and need not be there any more when a run is resumed.
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
        needed //= len(deployment.of("actor"))
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
    """Refuse a decoding that the policy lacks, before simulators start and clients ask.

    Raises:
        EmbodrlError: see above.
    """
    if decoding != "all":
        check_decoding(decoding, policy.decodings, config.model.model_type)


def check_features(config: Config, policy: VLAPolicy) -> None:
    """Refuse settings of training that need what the policy does not offer.

    Raises:
        EmbodrlError: see above.
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
    """Return the type of the weights."""
    return torch.bfloat16 if config.actor.param_dtype == "bf16" else torch.float32


def num_threads(config: Config) -> int:
    """Return how many cores a policy may use that has this machine to itself; in workers see ``Deployment``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    return config.cluster.num_threads or cores


def num_generators(config: Config, deployment: Deployment) -> list[int]:
    """Return how many random generators each process that acts has; empty if only its engine knows."""
    if config.rollout.backend != "native":
        return []
    on_cpu = resolve_device(config).type == "cpu"
    return [deployment.threads_of(place) if on_cpu else 1 for place in deployment.of("rollout")]


def configure_torch(config: Config, place: ProcessPlace | None = None, threads: int | None = None) -> torch.device:
    """Set device, threads and seeds; return the device of the policy.

    Args:
        config: the run.
        place: of what the driver does itself, of whose GPUs it uses the first; None in workers, whose
            CUDA_VISIBLE_DEVICES shows their own alone.
        threads: of operations that prepare work for a GPU; None takes all cores.
    """
    device = resolve_device(config)
    if place is not None and place.visible == "":  # placed on the processor of a machine with GPUs
        device = torch.device("cpu")
    elif place is not None and place.devices and device.type == "cuda":
        torch.cuda.set_device(place.devices[0])
    # The engines give whole batches to threads; torch must not split operations as well.
    torch.set_num_threads(1 if device.type == "cpu" else threads or num_threads(config))
    torch.manual_seed(config.runner.seed)
    if device.type == "cpu":
        # As use_deterministic_algorithms(True), which imports the compiler as well: 1.7 s.
        torch.set_deterministic_debug_mode("error")
        # It would write every new tensor twice; what reads memory before it is written is a bug anyway.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        keep_freed_memory()
    return device


def keep_freed_memory() -> None:
    """Let glibc keep what torch frees, up to 2 GiB, instead of giving it back to the system.

    Every micro-batch allocates and frees the same tensors of some megabytes. Mapping their pages again each time costs
    about a tenth of an update.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    for option, num_bytes in ((_M_MMAP_THRESHOLD, 2**30), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26)):
        mallopt(option, num_bytes)


def build_policy(config: Config, device: torch.device | None = None) -> VLAPolicy:
    """Build or load the policy, and log how the checkpoint's names were loaded.

    Args:
        config: the run.
        device: None takes that of the configuration.
    """
    device = resolve_device(config) if device is None else device
    policy, report = registry.build_policy(
        config.model, device=device, dtype=param_dtype(config), seed=config.runner.seed
    )
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


@dataclass(frozen=True)
class RecordedPolicy:
    """A policy that acts in place of experts.

    Attributes:
        name: where it comes from.
        engine: computes its actions.
        fingerprint: of its weights, as ``weights_fingerprint``; "" if they are not known.
    """

    name: str
    engine: RolloutEngine
    fingerprint: str = ""


def weights_fingerprint(policy: VLAPolicy) -> str:
    """Return what changes when a policy learns: a digest of names, shapes and at most about 500 numbers of each tensor.

    It tells two policies apart within moments, however large; it does not detect damage.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if not tensor.is_meta and tensor.numel():
            sample = tensor.detach().flatten()[:: max(tensor.numel() // 256, 1)]
            digest.update(sample.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
