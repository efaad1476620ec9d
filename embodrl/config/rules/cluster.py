"""Devices and placement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from embodrl.config.placement import COMPONENTS, Place, PlacementError, parse_ranks
from embodrl.config.rules.base import Context, Finding, note, rule
from embodrl.names import nearest

KEY = "cluster.component_placement"


def count_devices(device: str) -> int | None:
    """Return how many devices this machine offers, without importing torch; None if it can't be told.

    A machine without GPUs has one device, the CPU.
    """
    if device == "cpu":
        return 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    else:
        gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return gpus or (1 if device == "auto" else None)


@rule(KEY)
def components_are_placed_once(context: Context) -> Iterator[Finding]:
    """Every component has exactly one place."""
    seen: list[str] = []
    for names in context.config.cluster.component_placement:
        at = f"{KEY}.{names}"
        for name in (part.strip() for part in names.split(",")):
            if name not in COMPONENTS:
                hint = nearest(name, list(COMPONENTS))
                remedy = f"write {hint}" if hint else "remove it"
                message = f"there is no component '{name}' (in '{names}')"
                yield Finding(KEY, message, remedy, ", ".join(COMPONENTS), hint, at=at)
            elif name in seen:
                message = f"the component '{name}' is placed twice"
                yield Finding(KEY, message, "name it in one line only", "once each", at=at)
            seen.append(name)
    missing = [name for name in COMPONENTS if name not in seen]
    if missing:
        remedy = "add a line for it, e.g. '" + ",".join(missing) + ": all'"
        yield Finding(KEY, f"no place is given for {', '.join(missing)}", remedy, f"all of {', '.join(COMPONENTS)}")


@rule(KEY, "cluster.device", "actor.training_backend", "rollout.backend")
def places_exist(context: Context) -> Iterator[Finding]:
    """Placements can be read, and name devices that there are and that the backends can use."""
    cluster = context.config.cluster
    available = count_devices(cluster.device)
    used: dict[str, Place] = {}
    for names, text in cluster.component_placement.items():
        at = f"{KEY}.{names}"
        try:
            place = parse_ranks(text)
        except PlacementError as error:
            message = f"'{names}: {text}' can't be read: {error}"
            yield Finding(KEY, message, "write all, 0, 0-3 or 0-1:0-3", error.allowed, at=at)
            continue
        if place is None:
            continue
        used |= {name.strip(): place for name in names.split(",")}
        beyond = [rank for rank in place.devices if available is not None and rank >= available]
        if beyond:
            last = "0" if available == 1 else f"0 to {(available or 1) - 1}"
            message = f"'{names}: {text}' needs {max(place.devices) + 1} devices, and this machine offers {available}"
            yield Finding(KEY, message, f"write '{names}: all'", f"all, {last}", others=("cluster.device",), at=at)
    yield from native_is_one_process(context, used)


def native_is_one_process(context: Context, used: dict[str, Place]) -> Iterator[Finding]:
    """Yield what is wrong with the devices of actor and rollout: both backends are one process on one device."""
    actor, rollout = used.get("actor"), used.get("rollout")
    config = context.config
    for name, place, key, backend in (
        ("actor", actor, "actor.training_backend", config.actor.training_backend),
        ("rollout", rollout, "rollout.backend", config.rollout.backend),
    ):
        if place is not None and (len(place.devices) > 1 or place.num_processes > 1):
            message = f"{name} gets {len(place.devices)} device(s) x {place.num_processes} process(es), but {key}"
            message += f" '{backend}' is 1 process on 1 device"
            yield Finding(KEY, message, f"place {name} on 0, or on all", "all, or one device", others=(key,))
    if actor is None or rollout is None or len(actor.devices) != 1 or len(rollout.devices) != 1:
        return
    if actor.devices != rollout.devices:
        yield Finding(
            KEY,
            f"actor on device {actor.devices[0]} and rollout on device {rollout.devices[0]}: rollout.backend"
            f" '{config.rollout.backend}' acts with the weights of the actor, in its process",
            f"write 'actor,rollout: {actor.devices[0]}'",
            "the same device for both",
            others=("rollout.backend",),
        )


@rule("actor.param_dtype", "actor.precision")
def device_has_the_dtype(context: Context) -> Iterator[Finding]:
    """Weights in bf16 are multiplied in bf16."""
    actor = context.config.actor
    if actor.param_dtype == "bf16" and actor.precision == "fp32":
        message = "weights in bf16 can't be computed with in fp32 precision"
        remedy = "set actor.precision=auto and rollout.precision=auto, or actor.param_dtype=fp32"
        yield Finding("actor.precision", message, remedy, "auto, bf16", others=("actor.param_dtype",))


@note("cluster.num_threads")
def threads_have_cores(context: Context) -> Iterator[Finding]:
    """More threads than cores get in each other's way."""
    threads, cores = context.config.cluster.num_threads, os.cpu_count() or 1
    if threads is not None and threads > cores:
        yield Finding("cluster.num_threads", f"{threads} threads share {cores} cores", f"set it to {cores}, or null")
