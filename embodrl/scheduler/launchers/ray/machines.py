"""The Ray resources of a run: which node is which machine of the placement, and what is reserved on each."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from embodrl.deployment import ProcessPlace
from embodrl.errors import EmbodrlError

# Time limit for the CPUs of the workers' child processes; then the run continues without them.
CHILDREN_TIMEOUT_S = 15.0
_POLL_S = 0.5
_NODE_ID_LABEL = "ray.io/node-id"  # defined by Ray on each node
Amounts = dict[str, float]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayMachine:
    """A Ray node as a machine of the placement.

    Attributes:
        node_id: Ray's node id, in hexadecimal.
        amounts: its CPUs and GPUs, by Ray's names; resources it lacks are omitted.
    """

    rank: int
    node_id: str
    address: str
    amounts: Amounts

    def __str__(self) -> str:
        return f"machine {self.rank} ({self.address})"


def find_machines(ray: ModuleType) -> list[RayMachine]:
    """Return the live nodes: the driver's is machine 0, the others follow by address, then by id."""
    own = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"], node["NodeID"]))
    return [
        RayMachine(rank, node["NodeID"], node["NodeManagerAddress"], _processors(node["Resources"]))
        for rank, node in enumerate(alive)
    ]


class Reservation:
    """A bundle of one placement group on each machine: one CPU per process, and the requested GPUs.

    Child processes of the workers (``children``, by machine) get a CPU each as well, if their machine has that many and
    they are free.

    Raises:
        EmbodrlError: Ray does not provide the machines or resources within ``timeout_s``.
    """

    def __init__(
        self, ray: ModuleType, places: Sequence[ProcessPlace], children: Mapping[int, int], timeout_s: float
    ) -> None:
        self._ray = ray
        self._group = None
        needs = _needs(places)
        found = self._await_machines(max(needs) + 1, timeout_s)
        # A resource that a machine does not have at all will not become free.
        if any(rank >= len(found) or _exceeds(needs[rank], found[rank].amounts) for rank in needs):
            raise self._refusal(needs, found)
        self._machines = {rank: found[rank] for rank in needs}
        self._bundles = {rank: index for index, rank in enumerate(needs)}
        wishes = {rank: self._with_children(rank, need, children.get(rank, 0)) for rank, need in needs.items()}
        modest = wishes == needs
        if not self._reserve(wishes, timeout_s if modest else min(timeout_s, CHILDREN_TIMEOUT_S)):
            if modest or not self._reserve(needs, timeout_s):
                raise self._refusal(needs, found, timeout_s)
            logger.warning(
                "Ray has no CPU for each simulator in time (%s), since others hold them: one CPU per process is"
                " reserved, and the simulators share the cores with what runs there",
                _table(wishes, found),
            )
        for machine in self._machines.values():
            logger.info("%s is Ray's node %s", machine, machine.node_id)

    def machine(self, rank: int) -> RayMachine | None:
        """Return a machine; None if nothing is reserved on it."""
        return self._machines.get(rank)

    def is_lost(self, machine: RayMachine) -> bool:
        """Whether Ray reports the node as dead, which loses its reservation for good."""
        return not any(node["NodeID"] == machine.node_id and node["Alive"] for node in self._ray.nodes())

    def strategy(self, machine: RayMachine) -> object:
        """Return the ``scheduling_strategy`` of an actor on a machine."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = self._bundles[machine.rank]
        return strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def release(self) -> None:
        if self._group is not None:
            importlib.import_module("ray.util").remove_placement_group(self._group)
        self._group = None

    def _await_machines(self, count: int, timeout_s: float) -> list[RayMachine]:
        deadline = time.monotonic() + timeout_s
        while len(found := find_machines(self._ray)) < count and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def _with_children(self, rank: int, need: Amounts, count: int) -> Amounts:
        return need | {"CPU": min(need["CPU"] + count, self._machines[rank].amounts["CPU"])}

    def _reserve(self, bundles: Mapping[int, Amounts], timeout_s: float) -> bool:
        # Some versions of Ray ignore the labels under STRICT_PACK, so even one bundle uses SPREAD.
        self._group = importlib.import_module("ray.util").placement_group(
            list(bundles.values()),
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{_NODE_ID_LABEL: self._machines[rank].node_id} for rank in bundles],
        )
        ready, _ = self._ray.wait([self._group.ready()], timeout=timeout_s)
        if not ready:
            self.release()
        return bool(ready)

    def _refusal(
        self, needs: Mapping[int, Amounts], found: Sequence[RayMachine], timeout_s: float = 0.0
    ) -> EmbodrlError:
        there = _table({machine.rank: machine.amounts for machine in found}, found)
        free = _words(_processors(self._ray.available_resources()))
        within = f" within {timeout_s:g} s" if timeout_s else ""
        return EmbodrlError(
            f"Ray lacks resources that {len(needs)} machine(s) need{within}: {_table(needs, found)}."
            f" It has {there}, of which {free} is free in all",
            "place fewer processes, add machines to Ray, or free its resources",
            code="ray-resources",
        )


def _needs(places: Sequence[ProcessPlace]) -> dict[int, Amounts]:
    needs: dict[int, Amounts] = {}
    for rank in sorted({place.node for place in places}):
        here = [place for place in places if place.node == rank]
        gpus = {device for place in here for device in place.devices}
        needs[rank] = {"CPU": float(len(here))} | ({"GPU": float(len(gpus))} if gpus else {})
    return needs


def _processors(resources: Mapping[str, float]) -> Amounts:
    return {name: resources[name] for name in ("CPU", "GPU") if name in resources}


def _exceeds(need: Amounts, amounts: Amounts) -> bool:
    return any(amount > amounts.get(name, 0.0) for name, amount in need.items())


def _words(amounts: Amounts) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"


def _table(amounts: Mapping[int, Amounts], machines: Sequence[RayMachine]) -> str:
    names = {machine.rank: str(machine) for machine in machines}
    return ", ".join(f"{names.get(rank, f'machine {rank}')} {_words(part)}" for rank, part in amounts.items())
