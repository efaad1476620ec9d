"""Which weight sync a placement gets, and which ones it cannot use."""

from __future__ import annotations

from typing import Literal, cast

from embodrl.deployment import Deployment
from embodrl.errors import EmbodrlError

Kind = Literal["memory", "collective", "disk"]
KINDS: tuple[Kind, ...] = ("memory", "collective", "disk")


def choose_weight_sync(deployment: Deployment, kind: str = "auto") -> Kind:
    """Return the kind that moves the least, or check the requested one.

    ``memory`` where every machine with a rollout process has a trainer; else ``collective``.

    Args:
        deployment: with the components ``actor`` and ``rollout``.
        kind: ``auto``, or one of ``KINDS``.

    Raises:
        EmbodrlError: the requested kind cannot work with this placement.
    """
    far = {place.node for place in deployment.of("rollout")} - {place.node for place in deployment.of("actor")}
    if kind == "auto":
        return "collective" if far else "memory"
    if kind == "memory" and far:
        machines = ", ".join(map(str, sorted(far)))
        raise EmbodrlError(
            f"weight sync by memory needs trainer and rollout on one machine: machine {machines} has a rollout and no"
            " trainer",
            "set rollout.weight_sync to auto, collective or disk",
        )
    return cast("Kind", kind)


def uses_nccl(deployment: Deployment) -> bool:
    """Return whether a collective sync can go from GPU to GPU: trainer and rollout have GPUs, none in common."""
    actor, rollout = (
        {(place.node, device) for place in deployment.of(component) for device in place.devices}
        for component in ("actor", "rollout")
    )
    return bool(actor and rollout) and not actor & rollout
