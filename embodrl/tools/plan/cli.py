"""`embodrl plan`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.app import add, make_app
from embodrl.cli.common import (
    EXIT_ERROR,
    ConfigFile,
    Debug,
    JsonOutput,
    Overrides,
    Trust,
    execute,
    say_if_random,
    show_notes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from embodrl.config import LoadedConfig
    from embodrl.config.schema import Config
    from embodrl.deployment import ProcessPlace
    from embodrl.preflight.run_memory import MemoryOf
    from embodrl.tools.plan.fit import Fit
    from embodrl.tools.plan.plan import Plan

app = make_app()
MAX_ROWS = 40
SIMULATORS = ("env", "eval_env")


@app.callback()
def about() -> None:
    """Plan a run without starting it.

    \b
    Examples:
      embodrl plan train env=maniskill model=openvla_7b cluster=1xh200
    """


def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    json_output: JsonOutput = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="search for settings with which it fits, and print them", show_default=False)
    ] = False,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Print the placement of every process of a training run, its batches, and its memory.

    Starts nothing and imports no simulator. `cluster=` may describe other hardware. Exit code 0, or 1 if a
    memory is too small or the size of the model is unknown. --fit tries cluster.placement=auto with actor=fsdp,
    gradient checkpointing, smaller micro-batches, bf16 weights and, last, adapters; it exits with 0 if it finds a fit.

    \b
    Examples:
      embodrl plan train env=maniskill model=openvla
      embodrl plan train model=openvla_7b cluster=8xh100 --fit
      embodrl plan train cluster=8xh100 'cluster.component_placement={actor:0-3,rollout:4-7,env:all}' --json
    """

    def action() -> int:
        from embodrl.pipelines.load import load_config
        from embodrl.tools.plan.plan import make_plan

        given = overrides or []
        found = None
        if fit:
            from embodrl.tools.plan.fit import find_fit

            def candidate(added: tuple[str, ...]) -> LoadedConfig:
                print(f"trying {shlex.join(added) or 'it as it is'}", file=sys.stderr, flush=True)
                return load_config(changed(given, added), config, "plan", trust)

            found = find_fit(candidate)
        loaded = load_config(given, config, "plan", trust) if found is None else found.loaded
        show_notes(loaded.notes)
        plan = make_plan(loaded) if found is None else found.plan
        if json_output:
            added: dict[str, object] = {}
            if fit:
                fits = found if plan.fits else None
                added["fit"] = None if fits is None else list(fits.overrides)
                added["fit_trains_adapters"] = None if fits is None else fits.adapters
            print(json.dumps({**plan.as_json(loaded.config), **added}, indent=2))
        else:
            say_if_random(loaded.config)
            if loaded.share is not None and loaded.config.divides_devices:
                print(loaded.share.line)
            show(plan, loaded.config)
            if fit:
                _show_fit(found, changed(given, found.overrides if found else ()), config)
        return 0 if plan.fits else EXIT_ERROR

    execute(action, debug)


def changed(arguments: Sequence[str], added: Sequence[str]) -> list[str]:
    """Return arguments with some replaced by others with the same keys."""
    keys = {text.partition("=")[0] for text in added}
    return [*(text for text in arguments if text.lstrip("+").partition("=")[0] not in keys), *added]


def _show_fit(found: Fit | None, arguments: list[str], config: Path | None) -> None:
    if found is None:
        print("nothing that --fit tries fits: plan with more or larger GPUs, or a smaller model")
        return
    if found.plan.memory.not_estimated:
        print(f"--fit needs the size of the model: {'; '.join(found.plan.memory.hints)}")
        return
    if not found.overrides:
        print("it fits as it is")
        return
    if found.adapters:
        print("LAST RESORT: nothing fits that trains all weights; this trains adapters (model.trainable=lora)")
    print(f"it fits with: {shlex.join(found.overrides)}")
    options = [] if config is None else ["--config", str(config)]
    print(shlex.join(["embodrl", "plan", "train", *options, *arguments]))


def show(plan: Plan, config: Config) -> None:
    """Print the plan as tables."""
    from rich.console import Console

    from embodrl.tools.plan.plan import machine_kinds

    console = Console(highlight=False)
    kinds = machine_kinds(config, plan.deployment)
    for kind in kinds:
        cores = sum(kind.machine.num_cores.values())
        where = f" ({ranges(kind.nodes)})" if len(kinds) > 1 else ""
        console.print(
            f"{kind.name}{' (described)' if kind.described else ''}: {len(kind.nodes)} node(s){where} with {cores}"
            f" cores, {len(kind.machine.nodes)} NUMA node(s), {len(kind.machine.gpus)} GPU(s)"
        )
    console.print(f"actor, rollout and env are {plan.deployment.mode}")
    for line in plan.deployment.reasons:
        console.print(f"  {line}", soft_wrap=True, markup=False)
    console.print()
    _show_processes(plan, console)
    _show_batches(plan, console)
    _show_memory(plan, console)
    for line in plan.warnings:
        console.print(f"note: {line}", soft_wrap=True)
    for line in plan.obstacles:
        console.print(
            f"note on this machine, not on the plan: `embodrl train` would refuse this here: {line}", soft_wrap=True
        )


def _show_processes(plan: Plan, console: Console) -> None:
    from rich.table import Table

    from embodrl.tools.plan.plan import per_cpu, per_device

    table = Table(title="placement")
    for column in ("component", "ranks", "node", "GPUs", "CPUs", "NUMA node"):
        table.add_column(column, overflow="fold")
    groups: list[list[ProcessPlace]] = []
    for place in plan.deployment.processes:
        last = groups[-1] if groups else None
        same = last is not None and _place(last[0]) == _place(place)
        if last is not None and same:
            last.append(place)
        else:
            groups.append([place])
    for group in groups[:MAX_ROWS]:
        first = group[0]
        cpus = [cpu for place in (group if first.component in SIMULATORS else group[:1]) for cpu in place.cpus]
        ranks = f"{first.rank}-{group[-1].rank}" if len(group) > 1 else str(first.rank)
        numa = "any" if first.numa_node is None else str(first.numa_node)
        gpus = ranges(first.devices) or "none"
        table.add_row(first.component, ranks, str(first.node), gpus, ranges(cpus) or "all", numa)
    console.print(table)
    if len(groups) > MAX_ROWS:
        console.print(f"and {len(groups) - MAX_ROWS} more lines; --json has all")
    loads = sorted(set(per_cpu(plan.deployment).values()))
    if loads:
        console.print(f"simulators per core that has any: {' or '.join(map(str, loads))}")
    devices = {key: parts for key, parts in per_device(plan.deployment).items() if parts}
    for key, parts in devices.items():
        console.print(f"GPU {key}: " + ", ".join(f"{count} x {part}" for part, count in parts.items()))
    console.print()


def _place(place: ProcessPlace) -> tuple[object, ...]:
    cpus = () if place.component in SIMULATORS else place.cpus
    return place.component, place.node, place.devices, place.numa_node, cpus, bool(place.cpus)


def ranges(numbers: list[int] | tuple[int, ...]) -> str:
    """Return sorted numbers as ``0-3,8``."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _show_batches(plan: Plan, console: Console) -> None:
    b = plan.batches
    console.print(
        f"environments: {b.environments} = {len(plan.deployment.of('env'))} simulators x"
        f" {b.environments_per_simulator}; a rollout process has {b.simulators_per_rollout} simulators and decides"
        f" {b.environments_per_stage} environments at once ({b.pipeline_stages} stage(s))"
    )
    console.print(
        f"iteration:    {b.environments} x {b.chunks_per_environment} chunks = {b.chunks} chunks,"
        f" {b.environment_steps} environment steps"
    )
    console.print(
        f"update:       {b.optimizer_steps} optimizer steps of {b.global_batch} chunks ="
        f" {len(plan.deployment.of('actor'))} actor process(es) x {b.gradient_accumulation} micro-batches of"
        f" {b.micro_batch}\n"
    )


def _without_repeats(memories: Sequence[MemoryOf]) -> list[tuple[MemoryOf, int]]:
    """Return each kind of memory once, with the number of identical ones."""
    unlike: dict[tuple[object, ...], list[MemoryOf]] = {}
    for memory in memories:
        key = (memory.device < 0, tuple(memory.needed.items()), memory.available)
        unlike.setdefault(key, []).append(memory)
    return [(alike[0], len(alike)) for alike in unlike.values()]


def _show_memory(plan: Plan, console: Console) -> None:
    from rich.table import Table

    from embodrl.preflight.run_memory import ESTIMATED_BY, PHASES, gib

    columns = _without_repeats(plan.memory.memories)
    parts = [part for part in ESTIMATED_BY if any(memory.needed.get(part) for memory, _ in columns)]
    table = Table(title="memory in GiB")
    table.add_column("")
    for memory, count in columns:
        table.add_column(memory.name + (f" (and {count - 1} alike)" if count > 1 else ""), justify="right")
    for part in parts:
        table.add_row(part, *(gib(memory.needed[part]) if part in memory.needed else "" for memory, _ in columns))
    table.add_section()
    if any(any(memory.away.values()) for memory, _ in columns):
        for phase in PHASES:
            table.add_row(f"in {phase}", *(gib(memory.in_phase(phase)) for memory, _ in columns))
    table.add_row("needed", *(gib(memory.total) for memory, _ in columns))
    there = [gib(memory.available) if memory.available else "not known" for memory, _ in columns]
    table.add_row("there", *there)
    console.print(table)
    for part in parts:
        console.print(f"  [dim]{part}: {ESTIMATED_BY[part]}[/]", soft_wrap=True)
    _show_verdict(plan, columns, console)


def _show_verdict(plan: Plan, columns: Sequence[tuple[MemoryOf, int]], console: Console) -> None:
    if plan.memory.not_estimated:
        console.print(f"[bold red]not known whether it fits[/]: {plan.memory.not_estimated}", soft_wrap=True)
    if plan.memory.tiny:
        size = f"; public size: {plan.memory.public_size}" if plan.memory.public_size else ""
        console.print(f"note: tiny architecture ({plan.memory.num_parameters:,} parameters){size}", soft_wrap=True)
    for memory, count in columns:
        if not memory.fits:
            alike = f"; {count - 1} more alike" if count > 1 else ""
            console.print(f"[bold red]does not fit[/]: {memory.shortage}{alike}", soft_wrap=True)
    for line in plan.memory.hints:
        console.print(f"  hint: {line}", soft_wrap=True)


add(app, train)
