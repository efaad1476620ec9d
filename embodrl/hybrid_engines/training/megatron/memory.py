"""Memory of one training process, for `embodrl plan`."""

from __future__ import annotations

from embodrl.config.schema import Config
from embodrl.deployment import Deployment
from embodrl.hybrid_engines.figures import ModelFigures
from embodrl.models.base import VLAPolicy


def uncut_bytes(policy: VLAPolicy) -> int:
    """Return the bytes that tensor parallelism leaves whole: everything but the language model."""
    cut = sum(p.numel() * p.element_size() for p in policy.parts()["language"].parameters())
    return sum(p.numel() * p.element_size() for p in policy.parameters()) - cut


def process_bytes(config: Config, deployment: Deployment, figures: ModelFigures, reference: int) -> dict[str, int]:
    """Return the bytes of one training process by component; ``reference`` is 0 without a reference policy."""
    training = figures.training
    layers = config.actor.tensor_parallel_size
    uncut = uncut_bytes(figures.policy) / figures.plain
    part = uncut + (1 - uncut) / layers  # ratio over all weights; about the same for the trained ones
    shares = len(deployment.of("actor")) // layers if deployment.gpus_per_node else 1
    return {
        "weights": int(training.weights * part),
        "gradients": int(training.gradients * part),
        "optimizer": int(training.optimizer * part) // max(1, shares),
        "reference": int(reference * part),
        "activations": training.activations,
    }
