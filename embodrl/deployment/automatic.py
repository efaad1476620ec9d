"""``cluster.placement`` by name: a placement that fills the cluster, with its reasons. Arithmetic only.

If rollouts and training take turns, sharing all devices (colocated) is fastest. If they run concurrently, as in an
asynchronous run, each has devices of its own (disaggregated), and an iteration takes as long as the slower of the two:
with a share s of the work in training, a actors and r rollouts, max(s / a, (1 - s) / r). The minimum over all
a + r <= devices that the batch sizes allow is chosen; ties go to the smallest sum. ``auto`` takes the first without,
the second with ``runner.max_staleness``; where that does not fit the memories, the fastest one that does. With
``hybrid``, for simulators that render or simulate on GPUs, some devices are for the simulators and the others for the
acting policy, and training takes its turn on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from embodrl.deployment.grammar import COMPONENTS, PlacementError
from embodrl.specs import ENGINES, LOSSES

if TYPE_CHECKING:
    from embodrl.config.schema import Config


@dataclass(frozen=True)
class Choice:
    """A placement and its reasons.

    Attributes:
        places: component -> place, as ``cluster.component_placement``.
        reasons: one line each, for `embodrl plan`.
    """

    places: dict[str, str]
    reasons: tuple[str, ...]


def choices(config: Config, gpus_per_node: int) -> Iterator[Choice]:
    """Yield the placements that ``cluster.placement`` allows, on all GPUs of the cluster, or on its machines if they
    have none; the fastest first.

    The run's own ``cluster.component_placement`` is ignored.

    Raises:
        PlacementError: the devices can't be divided as the name says; raised before the first placement.
    """
    cluster = config.cluster
    size = cluster.num_nodes * (gpus_per_node or 1)
    what = "GPU" if gpus_per_node else "machine"
    have = f"{size} {what}{'s' if size > 1 else ''}"
    kind = cluster.placement
    if kind == "hybrid":
        yield _hybrid(config, have, gpus_per_node)
        return
    actors, training = _actors(config, size)
    rollouts, acting = _rollouts(config, size)
    sizes = [(a, r) for a in actors for r in rollouts if a + r <= size]
    if kind == "disaggregated" and not sizes:
        limits = f": training: {training}; rollouts: {acting}" if size > 1 else ""
        raise _indivisible(f"{have} can't be divided among training and rollouts{limits}")
    if size == 1:
        yield _explained(dict.fromkeys(COMPONENTS, "0"), [f"{have}: training, rollouts and simulators share it"])
        return

    def placed(count: int, acts: int, where: str, reason: str) -> Choice:
        reasons = [reason, f"training: {count} process(es); {training}", f"rollouts: {acts} process(es); {acting}"]
        return _with_simulators(config, gpus_per_node, {"actor": _ranks(0, count), "rollout": where}, reasons)

    def shared() -> Choice:
        count = actors[-1]
        acts = rollouts[-1]
        where = _ranks(0, acts) if size % acts or acts == 1 else _spread(size, acts)
        return placed(count, acts, where, f"{have}; {_shares(config, bool(sizes))}: both use as many as they can")

    divided = (placed(a, r, _ranks(a, a + r), _divides(config, have, a, r)) for a, r in _fastest_first(config, sizes))
    if sizes and config.divides_devices:
        yield from divided
        if kind == "auto":
            yield shared()
    else:
        yield shared()
        if kind == "auto":
            yield from divided


def _with_simulators(config: Config, gpus_per_node: int, places: dict[str, str], reasons: list[str]) -> Choice:
    """Return the placement with simulators beside rollouts; those of one rollout process on several GPUs."""
    where = places["rollout"]
    if "," in where or "-" in where or gpus_per_node < 2:
        return _explained({**places, "env": where}, reasons)
    simulators = _largest(gpus_per_node, config.env.num_processes)
    rank = int(where)
    first = rank if rank + simulators <= gpus_per_node else 0
    reasons.append(f"simulators: on {simulators} GPUs of machine 0, next to the rollout process")
    return _explained({**places, "env": _ranks(first, first + simulators)}, reasons)


def _shares(config: Config, divisible: bool) -> str:
    """Return why training and rollouts share devices."""
    kind = config.cluster.placement
    if kind == "auto" and config.runner.max_staleness == 0:
        return "rollouts and training take turns (runner.max_staleness=0)"
    if kind == "auto" and not divisible:
        return "are too few to be divided"
    return f"rollouts and training share them (cluster.placement={kind})"


def _divides(config: Config, have: str, count: int, acts: int) -> str:
    """Return why training has ``count`` devices of its own, and rollouts ``acts``."""
    cluster = config.cluster
    why = f"rollouts run while the policy trains (runner.max_staleness={config.runner.max_staleness})"
    if config.runner.max_staleness == 0:
        why = f"training and rollouts are apart (cluster.placement={cluster.placement}), and wait for each other"
    reason = f"{have}; {why}: each has its own, {count} and {acts}, as training is {cluster.training_share:.0%}"
    return f"{reason} of the work (cluster.training_share)"


def _fastest_first(config: Config, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the numbers of training and of rollout processes, the shortest iteration first."""
    share = config.cluster.training_share
    return sorted(sizes, key=lambda pair: (iteration_cost(share, *pair), share / pair[0] + (1 - share) / pair[1]))


def iteration_cost(share: float, actors: int, rollouts: int) -> float:
    """Return how long an iteration takes with devices divided, relative to all work on one device."""
    return max(share / actors, (1 - share) / rollouts)


def _hybrid(config: Config, have: str, gpus_per_node: int) -> Choice:
    """Return a placement whose simulators have the second half of the GPUs of every machine, and training all GPUs.

    Raises:
        PlacementError: a machine has fewer than two GPUs, or simulators or rollouts can't be spread over the halves.
    """
    nodes = config.cluster.num_nodes
    if gpus_per_node < 2:
        raise _indivisible(f"{have} can't be divided among simulators and the acting policy")
    rollouts, acting = _rollouts(config, nodes * gpus_per_node)
    simulators = config.env.num_processes
    halves = [
        (acts, seen)
        for acts in range(1, gpus_per_node)
        for seen in range(1, gpus_per_node - acts + 1)
        if acts * nodes in rollouts and simulators % (seen * nodes) == 0
    ]
    if not halves:
        raise _indivisible(f"{have} can't be divided among env.num_processes={simulators} and rollouts: {acting}")
    acts, seen = max(halves, key=lambda half: (min(half), sum(half)))
    actors, training = _actors(config, nodes * gpus_per_node)
    places = {
        "actor": _ranks(0, actors[-1]),
        "rollout": _of_each(nodes, gpus_per_node, 0, acts),
        "env": _of_each(nodes, gpus_per_node, acts, acts + seen),
    }
    reason = f"{have}; simulators and the acting policy have devices of their own, training takes turns on all"
    each = " of each machine" if nodes > 1 else ""
    return _explained(
        places,
        [
            f"{reason} (cluster.placement=hybrid)",
            f"training: {actors[-1]} process(es); {training}",
            f"rollouts: on {acts} GPU(s){each}; {acting}",
            f"simulators: on {seen} other GPU(s){each}",
        ],
    )


def _indivisible(message: str) -> PlacementError:
    hint = "set cluster.placement=auto; on one device actor.own_process=true rollout.own_process=true divide the work"
    return PlacementError(message, hint, "auto, colocated, given; or more devices")


def _of_each(nodes: int, gpus: int, first: int, end: int) -> str:
    """Return the devices ``first`` to ``end - 1`` of every machine, counted over all machines."""
    return ",".join(_ranks(node * gpus + first, node * gpus + end) for node in range(nodes))


def _explained(places: dict[str, str], reasons: list[str]) -> Choice:
    quoted = {name: f'"{place}"' if "," in place else place for name, place in places.items()}
    text = ",".join(f"{name}:{place}" for name, place in quoted.items())
    return Choice(places, (*reasons, f"the same by hand: 'cluster.component_placement={{{text}}}'"))


def _actors(config: Config, size: int) -> tuple[list[int], str]:
    """Return the possible numbers of training processes, ascending, and the limiting setting."""
    actor = config.actor
    if actor.training_backend == "native":
        return [1], "actor.training_backend=native is one process (actor=fsdp trains on several)"
    if config.cluster.controllers > 1:
        return [1], "a controller is one process"
    cut = actor.tensor_parallel_size
    micro = actor.micro_batch_size
    found = [n for n in range(1, size + 1) if n % cut == 0 and _splits(actor.global_batch_size, n // cut, micro)]
    limit = f"as many as share actor.global_batch_size={actor.global_batch_size} in micro-batches of {micro}"
    return found or [cut], limit + (f", {cut} per copy of the model" if cut > 1 else "")


def _splits(batch: int, groups: int, micro: int) -> bool:
    return groups == 1 or (batch % groups == 0 and batch // groups % micro == 0)


def _rollouts(config: Config, size: int) -> tuple[list[int], str]:
    """Return the possible numbers of rollout processes, ascending, and the limiting setting."""
    loss = LOSSES.entry(config.algorithm.loss_type) if config.algorithm.loss_type in LOSSES else None
    if loss is not None and loss.learns_from_records:
        return [1], "this algorithm gathers and trains in one process"
    engine = ENGINES.entry(config.rollout.backend) if config.rollout.backend in ENGINES else None
    if engine is not None and not engine.in_processes:
        return [1], f"rollout.backend={engine.name} serves the main process"
    if config.rollout.own_process is False:
        return [1], "rollout.own_process=false"
    simulators = config.env.num_processes
    stages = config.rollout.pipeline_stages
    found = [n for n in range(1, size + 1) if n == 1 or simulators % (n * stages) == 0]
    limit = f"as many as share env.num_processes={simulators}" + (f" in {stages} stages" if stages > 1 else "")
    return found, limit if found[-1] == size else f"{limit} (a multiple of {size * stages} could use all)"


def _largest(limit: int, processes: int) -> int:
    """Return the largest number of devices, at most ``limit``, over which processes spread evenly."""
    return max(n for n in range(1, limit + 1) if processes % n == 0)


def _ranks(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}-{end - 1}"


def _spread(size: int, count: int) -> str:
    """Return ``count`` of ``size`` devices, spread evenly, so that every machine has some."""
    return _ranks(0, size) if count == size else ",".join(str(rank) for rank in range(0, size, size // count))
