"""Requirements on a pipeline. All are checked, and all problems are reported. Imports no torch."""

from __future__ import annotations

import functools
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from embodrl.errors import EmbodrlError, PipelineProblem
from embodrl.names import import_function, nearest

ROLES: dict[str, str] = {
    "rollout": "gathers experience; exactly one, or none with an offline algorithm.loss_type",
    "dynamic_sampling": "selects groups, and gathers more; goes with algorithm.filter.enabled",
    "reward": "judges episodes; goes with reward.fn, reward.model and algorithm.srpo.enabled",
    "reference": "log-probs under the initial policy or the teacher; goes with algorithm.kl.coef",
    "proximal": "log-probs and values under the weights at the start of the update; goes with algorithm.decoupled and"
    " algorithm.recompute_logprobs",
    "advantage": "advantages and returns",
    "store": "adds episodes to the replay buffer; goes with an off-policy algorithm.loss_type",
    "train": "updates the weights; exactly one",
    "sync": "hands the new weights to the rollout; at least one, after the node that trains",
    "compute": "any other node whose output is used",
    "sink": "any other node without dependents, such as a log",
}
ENDS = ("train", "sync", "sink")
"""Roles of nodes that no other node has to depend on."""
CHANGES = ("store", "train")
"""Roles of nodes that change the learned state or its data: they cannot be undone. They have no output: nodes that list
them in ``deps`` run after them, and get no input from them.
"""
BESIDE = ("compute", "reward", "sink")
"""Roles of nodes that run in threads of their own, beside the nodes that do not depend on them."""
RESERVED_NAMES = ("env", "policy", "total", "eval")
"""Names whose time metrics have another meaning."""


@dataclass(frozen=True)
class NodeSpec:
    """An unchecked node; see ``graph.GraphNode``."""

    name: str
    fn: Callable[..., object] | str
    deps: tuple[str, ...]
    role: str
    retries: int


def inputs_of(deps: tuple[str, ...], roles: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes in ``deps`` that have an output."""
    return tuple(name for name in deps if roles.get(name) not in CHANGES)


def resolve(fn: Callable[..., object] | str) -> tuple[Callable[..., object], str]:
    """Return a function and its ``module:name``.

    Raises:
        EmbodrlError: the function does not exist.
    """
    if isinstance(fn, str):
        return import_function(fn), fn
    if not callable(fn):
        raise EmbodrlError(
            f"fn is a {type(fn).__name__}, not a function",
            "pass a function, or 'module:function'",
            code="pipeline-node-fn",
        )
    inner: object = fn
    while isinstance(inner, functools.partial):
        inner = cast(Any, inner).func
    named = cast(Any, inner if hasattr(inner, "__qualname__") else type(inner))
    return fn, f"{named.__module__}:{named.__qualname__}"


def sorted_names(specs: list[NodeSpec]) -> list[str]:
    """Return names so that each follows its dependencies, otherwise in the given order (Kahn 1962).

    Nodes in or after a cycle are omitted; missing dependencies are ignored.
    """
    known = {spec.name for spec in specs}
    left = list(specs)
    done = list[str]()
    while ready := next((s for s in left if all(d in done or d not in known for d in s.deps)), None):
        left.remove(ready)
        done.append(ready.name)
    return done


def check_nodes(specs: list[NodeSpec]) -> list[PipelineProblem]:
    """Return all problems of a pipeline's nodes."""
    roles = {spec.name: spec.role for spec in specs}
    problems = [problem for spec in specs for problem in _check_node(spec, roles)]
    sound = [spec for spec in specs if not isinstance(spec.deps, str)]
    links = [*_missing(sound), *_cycles(sound)]
    problems += [*links, *_unused(sound), *_needed_roles(specs)]
    if not links and len(sound) == len(specs):
        problems += _disconnected(specs)
    return problems


def _check_node(spec: NodeSpec, roles: Mapping[str, str]) -> Iterator[PipelineProblem]:
    yield from _check_name(spec)
    if isinstance(spec.deps, str):
        yield PipelineProblem(
            spec.name, f"deps is the text '{spec.deps}'", f"write deps=('{spec.deps}',)", code="pipeline-deps-text"
        )
    elif twice := sorted({name for name in spec.deps if spec.deps.count(name) > 1}):
        yield PipelineProblem(
            spec.name, f"depends on '{twice[0]}' more than once", "name it once", code="pipeline-dep-duplicate"
        )
    yield from _check_role(spec)
    try:
        fn, label = resolve(spec.fn)
    except EmbodrlError as error:
        yield PipelineProblem(spec.name, error.message, error.hint or "correct the name", error.code)
    else:
        if not isinstance(spec.deps, str):
            yield from _check_signature(spec.name, inputs_of(spec.deps, roles), fn, label)


def _check_name(spec: NodeSpec) -> Iterator[PipelineProblem]:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", spec.name):
        yield PipelineProblem(
            spec.name,
            "is not a name",
            "use lower-case letters, digits and _, e.g. reward_shaping",
            code="pipeline-node-name",
        )
    elif spec.name in RESERVED_NAMES:
        message = f"its time would be the metric time/{spec.name}_s, which means something else"
        yield PipelineProblem(spec.name, message, "choose another name", code="pipeline-node-taken")


def _check_role(spec: NodeSpec) -> Iterator[PipelineProblem]:
    """Yield the problems with the role and with the number of retries, which depends on it."""
    if spec.role not in ROLES:
        near = nearest(str(spec.role), list(ROLES))
        hint = f"did you mean '{near}'?" if near else f"choose one of {', '.join(ROLES)}"
        yield PipelineProblem(
            spec.name, f"unknown role '{spec.role}'; known: {', '.join(ROLES)}", hint, code="pipeline-role-unknown"
        )
    if type(spec.retries) is not int or spec.retries < 0:
        yield PipelineProblem(
            spec.name, f"retries is {spec.retries!r}", "use a number of at least 0", code="pipeline-retries"
        )
    elif spec.retries and spec.role in CHANGES:
        message = "another attempt would repeat the optimizer steps, or add the episodes, of the first one"
        yield PipelineProblem(spec.name, message, "set its retries to 0", code="pipeline-retries")


def _check_signature(
    node: str, inputs: tuple[str, ...], fn: Callable[..., object], label: str
) -> Iterator[PipelineProblem]:
    call = type(fn).__call__ if not inspect.isroutine(fn) else fn
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(kind(fn) or kind(call) for kind in kinds):
        message = f"{label} is a coroutine or a generator, which is never awaited"
        yield PipelineProblem(
            node, message, "write a plain function; it may call asyncio.run", code="pipeline-fn-coroutine"
        )
        return
    wanted = f"(context{''.join(f', {name}' for name in inputs)})"
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        message = f"the parameters of {label} can't be read"
        yield PipelineProblem(node, message, f"wrap it in a function of {wanted}", code="pipeline-fn-signature")
        return
    try:
        signature.bind(*range(1 + len(inputs)))
    except TypeError:
        message = f"{label}{signature} can't be called with {wanted}"
        hint = "one positional parameter for the context, and one for each of deps that gives an output"
        yield PipelineProblem(node, message, hint, code="pipeline-fn-signature")


def _missing(specs: list[NodeSpec]) -> Iterator[PipelineProblem]:
    names = [spec.name for spec in specs]
    for spec in specs:
        for name in dict.fromkeys(spec.deps):
            if name not in names:
                near = nearest(name, [known for known in names if known != spec.name])
                hint = f"did you mean '{near}'?" if near else f"add it; there are {', '.join(names)}"
                yield PipelineProblem(
                    spec.name, f"depends on '{name}', which does not exist", hint, code="pipeline-dep-unknown"
                )


def _cycles(specs: list[NodeSpec]) -> Iterator[PipelineProblem]:
    """Yield a cycle for each node in a cycle, unless it was reported before."""
    deps = {spec.name: spec.deps for spec in specs}
    reported = set[str]()
    for spec in specs:
        path = [] if spec.name in reported else _cycle_through(spec.name, deps)
        if path:
            reported |= set(path)
            yield PipelineProblem(
                spec.name,
                f"is in a cycle: {' -> '.join(path)}",
                "remove one of these dependencies",
                code="pipeline-cycle",
            )


def _cycle_through(name: str, deps: dict[str, tuple[str, ...]]) -> list[str]:
    """Return a shortest cycle through a node along the data flow, or []."""
    ways = deque([[name]])
    seen = set[str]()
    while ways:
        way = ways.popleft()
        for before in deps.get(way[0], ()):
            if before == name:
                return [name, *way]
            if before not in seen:
                seen.add(before)
                ways.append([before, *way])
    return []


def _unused(specs: list[NodeSpec]) -> Iterator[PipelineProblem]:
    used = {name for spec in specs for name in spec.deps}
    for spec in specs:
        if spec.name not in used and spec.role not in ENDS:
            hint = "name it in the deps of a node, or give it the role 'sink'"
            yield PipelineProblem(spec.name, "its output is not used", hint, code="pipeline-output-unused")


def _needed_roles(specs: list[NodeSpec]) -> Iterator[PipelineProblem]:
    train = [spec.name for spec in specs if spec.role == "train"]
    if not train:
        yield PipelineProblem(
            "",
            "no node has the role 'train'",
            "add one, e.g. embodrl.pipelines.nodes:train",
            code="pipeline-role-missing",
        )
    for name in train[1:]:
        message = f"has the role 'train', but so does '{train[0]}'"
        hint = "only one node trains; combine several losses in one function for algorithm.loss_type"
        yield PipelineProblem(name, message, hint, code="pipeline-role-twice")
    rollouts = [spec.name for spec in specs if spec.role == "rollout"]
    for name in rollouts[1:]:
        message = f"has the role 'rollout', but so does '{rollouts[0]}', which gathers the same episodes"
        yield PipelineProblem(
            name, message, "raise algorithm.rollout_epoch for more of them per update", code="pipeline-role-twice"
        )
    if all(spec.role != "sync" for spec in specs):
        hint = "add one, e.g. embodrl.pipelines.nodes:sync"
        yield PipelineProblem("", "no node has the role 'sync'", hint, code="pipeline-role-missing")


def _disconnected(specs: list[NodeSpec]) -> Iterator[PipelineProblem]:
    """Yield rollouts that training does not depend on, which might be interrupted after it, and early syncs."""
    deps = {spec.name: spec.deps for spec in specs}
    train = next((spec.name for spec in specs if spec.role == "train"), None)
    if train is None:
        return
    for spec in specs:
        if spec.role in ("rollout", "dynamic_sampling", "store") and spec.name not in upstream(train, deps):
            message = f"'{train}', which trains, does not depend on it"
            yield PipelineProblem(spec.name, message, f"connect its output to '{train}'", code="pipeline-disconnected")
        elif spec.role == "sync" and train not in upstream(spec.name, deps):
            message = f"does not depend on '{train}', so it might send the weights from before the update"
            yield PipelineProblem(spec.name, message, f"name '{train}' in its deps", code="pipeline-disconnected")


def upstream(name: str, deps: dict[str, tuple[str, ...]]) -> set[str]:
    """Return a node and all its dependencies, present or not."""
    found = set[str]()
    todo = [name]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += deps.get(one, ())
    return found
