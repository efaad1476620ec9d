"""Which kind of weight sync suits a placement, and which can't work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, cast

from embodrl.errors import EmbodrlError
from embodrl.names import nearest

Kind = Literal["shared", "memory", "collective", "disk"]
KINDS: tuple[Kind, ...] = ("shared", "memory", "collective", "disk")


class Place(Protocol):
    """A process and its place; ``embodrl.scheduler.placement.ProcessPlace``."""

    @property
    def node(self) -> int: ...
    @property
    def devices(self) -> tuple[int, ...]: ...


class Placed(Protocol):
    """Where everything runs; ``embodrl.scheduler.placement.Placement``."""

    def of(self, component: str, /) -> Sequence[Place]: ...


def choose_weight_sync(placement: Placed, same_process: bool, kind: str = "auto") -> Kind:
    """Return the kind that moves least, or check the one that is asked for.

    ``shared`` in one process; ``memory`` where every machine with a rollout has a trainer; else ``collective``.

    Args:
        placement: with the components ``actor`` and ``rollout``.
        same_process: trainer and rollout are one process.
        kind: ``auto``, or a kind that must be able to work.

    Raises:
        EmbodrlError: there is no such kind, or it can't work with this placement.
    """
    if kind == "auto":
        if same_process:
            return "shared"
        return "collective" if _far(placement) else "memory"
    found = cast("Kind | None", kind if kind in KINDS else None)
    if found is None:
        near = nearest(kind, list(KINDS))
        raise EmbodrlError(
            f"there is no weight sync '{kind}'; known: auto, {', '.join(KINDS)}",
            f"did you mean '{near}'?" if near else "name one of them",
        )
    if problem := _problem(found, placement, same_process):
        raise EmbodrlError(f"weight sync '{kind}' can't work here: {problem}", f"take auto, or {_others(found)}")
    return found


def uses_nccl(placement: Placed) -> bool:
    """Tell whether a collective sync can go from GPU to GPU: trainer and rollout have GPUs, none in common."""
    actor, rollout = (_gpus(placement.of(component)) for component in ("actor", "rollout"))
    return bool(actor and rollout) and not actor & rollout


def _problem(kind: Kind, placement: Placed, same_process: bool) -> str:
    if kind == "shared" and not same_process:
        return "trainer and rollout are different processes, which share no memory"
    if kind == "collective" and same_process:
        return "trainer and rollout are one process, which has nobody to send to"
    if kind == "memory" and (far := _far(placement)):
        machines = ", ".join(map(str, sorted(far)))
        return f"machine {machines} has a rollout and no trainer, and memory is of one machine"
    return ""


def _others(kind: Kind) -> str:
    return " or ".join({"shared": ("memory", "disk"), "collective": ("shared", "disk")}.get(kind, ("disk",)))


def _far(placement: Placed) -> set[int]:
    """Return the machines with a rollout and no trainer."""
    return {place.node for place in placement.of("rollout")} - {place.node for place in placement.of("actor")}


def _gpus(places: Sequence[Place]) -> set[tuple[int, int]]:
    return {(place.node, device) for place in places for device in place.devices}
