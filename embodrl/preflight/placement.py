"""``cluster.placement=auto`` with regard to memory: the fastest placement that fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice
from typing import TypeVar

from embodrl.config import LoadedConfig
from embodrl.deployment import Solution, solutions
from embodrl.preflight.run_memory import MemoryPlan, gib, plan_memory

L = TypeVar("L", bound=LoadedConfig)
SHOWN = 6
"""Placements of which the plan says why they were passed over."""


def weighed(loaded: L) -> L:
    """Return the run on the fastest placement that ``cluster.placement=auto`` allows and that fits the memories.

    Placements that the rules refuse are passed over, too. If none fits, the one that lacks least is chosen. What was
    passed over, and why, is added to the reasons of the deployment. Other values of ``cluster.placement`` are left as
    they are. Allocates nothing.

    Raises:
        CheckpointError: the model's files can't be read.
    """
    solution = loaded.solution
    if loaded.config.cluster.placement != "auto" or solution.weighed or solution.found is None:
        return loaded
    allowed = solutions(loaded.config, solution.machine, solution.planning)
    first = list(islice(allowed, 2))
    if len(first) == 1:
        return loaded
    passed: list[tuple[int, Solution, str]] = []
    for other in chain(first, allowed):
        refusal = _refusal(loaded, other)
        if refusal:
            passed.append((-1, other, refusal))
            continue
        memory = plan_memory(loaded.config, other.deployment)
        short = max(memory.memories, key=lambda each: each.missing)
        if short.fits:
            return _placed(loaded, other, (*_passed_over(passed), *_unknown(memory)))
        passed.append((short.missing, other, short.shortage))
    estimated = [each for each in passed if each[0] >= 0]
    if not estimated:
        return loaded
    missing, nearest, why = min(estimated, key=lambda each: each[0])
    others = [each for each in passed if each[1] is not nearest]
    verdict = f"no placement fits; this one is nearest, and lacks {gib(missing)} GiB: {why}"
    return _placed(loaded, nearest, (verdict, *_passed_over(others)))


def _refusal(loaded: LoadedConfig, other: Solution) -> str:
    """Return why the rules refuse a placement; "" if they do not."""
    if other.found is None:
        return "; ".join(str(failure.reason) for failure in other.unplaced)
    assert loaded.check is not None, "a loaded configuration has been checked"
    errors = loaded.check(loaded.config, other).errors
    return f"{errors[0].key}: {errors[0].message}" if errors else ""


def _placed(loaded: L, solution: Solution, reasons: tuple[str, ...]) -> L:
    """Return the run on a placement, with further reasons before the last one, the same placement by hand."""
    assert loaded.check is not None
    deployment = solution.deployment
    *given, by_hand = deployment.reasons
    found = replace(deployment, reasons=(*given, *reasons, by_hand))
    report = loaded.check(loaded.config, solution)
    return replace(loaded, solution=replace(solution, found=found, weighed=True), obstacles=report.obstacles)


def _passed_over(passed: list[tuple[int, Solution, str]]) -> tuple[str, ...]:
    lines = [f"passed over: {_devices(solution)}: {why}" for _, solution, why in passed[:SHOWN]]
    if len(passed) > SHOWN:
        lines.append(f"and {len(passed) - SHOWN} slower ones passed over")
    return tuple(lines)


def _devices(solution: Solution) -> str:
    """Return how many devices training and rollouts have, and whether they share some."""
    actors, rollouts = (
        {(place.node, place.devices) for place in solution.places.get(name, ())} for name in ("actor", "rollout")
    )
    how = "sharing devices" if actors & rollouts else "apart"
    return f"training on {len(actors)} and rollouts on {len(rollouts)}, {how}"


def _unknown(memory: MemoryPlan) -> tuple[str, ...]:
    """Return what the choice could not regard."""
    if memory.not_estimated:
        return (f"without regard to the memory of the model: {memory.not_estimated}",)
    sizes = [each.name for each in memory.memories if not each.available]
    return (f"without regard to {', '.join(sizes)}, whose size is unknown (extra 'gpu')",) if sizes else ()
