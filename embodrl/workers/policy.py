"""From the configuration to a policy on its device."""

from __future__ import annotations

import logging
import os

import psutil
import torch

from embodrl.config.schema import Config
from embodrl.errors import EmbodrlError
from embodrl.models import registry
from embodrl.models.base import VLAPolicy

logger = logging.getLogger(__name__)


def resolve_device(config: Config) -> torch.device:
    """Return the device of the policy; auto is the first GPU if there is one.

    Raises:
        EmbodrlError: a GPU is asked for and torch sees none.
    """
    setting = config.cluster.device
    if setting == "cuda" and not torch.cuda.is_available():
        raise EmbodrlError("cluster.device is cuda, and torch sees no GPU", "set cluster.device=auto or cpu")
    return torch.device("cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu")


def num_threads(config: Config) -> int:
    """Return how many cores the policy may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    return config.cluster.num_threads or cores


def configure_torch(config: Config) -> torch.device:
    """Set threads and seeds; return the device of the policy."""
    device = resolve_device(config)
    # The engines give whole batches to threads; torch must not split operations as well.
    torch.set_num_threads(1 if device.type == "cpu" else num_threads(config))
    torch.manual_seed(config.runner.seed)
    if device.type == "cpu":
        # As use_deterministic_algorithms(True), which imports the compiler as well: 1.7 s.
        torch.set_deterministic_debug_mode("error")
    return device


def build_policy(config: Config) -> VLAPolicy:
    """Build or load the policy on its device, and log what became of the checkpoint's names."""
    device = resolve_device(config)
    dtype = torch.bfloat16 if config.actor.param_dtype == "bf16" else torch.float32
    policy, report = registry.build_policy(config.model, device=device, dtype=dtype, seed=config.runner.seed)
    logger.info(
        "policy from %s: %d tensors loaded, %d initialised, %d ignored",
        report.source,
        report.num_loaded,
        len(report.initialized),
        len(report.ignored),
    )
    if config.actor.gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    return policy.eval()
