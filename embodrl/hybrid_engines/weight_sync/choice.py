"""Which weight sync a placement gets, and which ones it cannot use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, cast

from embodrl.errors import EmbodrlError

Kind = Literal["memory", "collective", "disk"]
KINDS: tuple[Kind, ...] = ("memory", "collective", "disk")


class Place(Protocol):
    """A process and its place; ``embodrl.scheduler.placement.ProcessPlace``."""

    @property
    def node(self) -> int: ...
    @property
    def devices(self) -> tuple[int, ...]: ...


class Placed(Protocol):
    """Where everything runs; ``embodrl.scheduler.placement.Placement``."""

    def of(self, component: str, /) -> Sequence[Place]: ...


def choose_weight_sync(placement: Placed, kind: str = "auto") -> Kind:
    """Return the kind that moves the least, or check the requested one.

    ``memory`` where every machine with a rollout process has a trainer; else ``collective``.

    Args:
        placement: with the components ``actor`` and ``rollout``.
        kind: ``auto``, or one of ``KINDS``.

    Raises:
        EmbodrlError: the requested kind cannot work with this placement.
    """
    far = {place.node for place in placement.of("rollout")} - {place.node for place in placement.of("actor")}
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


def uses_nccl(placement: Placed) -> bool:
    """Return whether a collective sync can go from GPU to GPU: trainer and rollout have GPUs, none in common."""
    actor, rollout = (
        {(place.node, device) for place in placement.of(component) for device in place.devices}
        for component in ("actor", "rollout")
    )
    return bool(actor and rollout) and not actor & rollout
