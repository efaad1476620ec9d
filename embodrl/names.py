"""Name lookup: the nearest known name, and objects in modules, including the user's."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from embodrl.errors import EmbodrlError
from embodrl.user_code import guard_user_code


def nearest(name: str, known: list[str], cutoff: float = 0.5) -> str:
    """Return the known name closest to ``name``, or "" if none has at least similarity ``cutoff`` (1: equal).

    Differences in case or between ``-`` and ``_`` are ignored.
    """
    for one in known:
        if one.lower().replace("-", "_") == name.lower().replace("-", "_"):
            return one
    matches = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def without_password(text: str) -> str:
    """Return a text without the password of a URL in it (``://USER:PASSWORD@``)."""
    return re.sub(r"(://[^\s/:@]*):(?!\d+/)\S*@", r"\1@", text)


MISSPELT = 0.8
"""Similarity above which a name counts as a misspelling rather than another name."""


def is_misspelt(name: str, known: str) -> bool:
    """Return whether a name is a misspelling of a known one, so that a hint may suggest it; never for "".

    Swapped letters are a misspelling, too. Words with digits have to be equal: libero_90 is not libero_10, nor 8xA100
    8xH100.
    """
    given, meant = (text.lower().replace("-", "_") for text in (name, known))
    numbered = re.compile(r"[a-z]*[0-9][a-z0-9]*")
    alike = difflib.SequenceMatcher(None, given, meant).ratio() > MISSPELT or sorted(given) == sorted(meant)
    return bool(meant) and alike and numbered.findall(given) == numbered.findall(meant)


def meant(name: str, known: list[str]) -> str:
    """Return the known name that ``name`` misspells, or ""."""
    near = nearest(name, known)
    return near if is_misspelt(name, near) else ""


def import_object(path: str) -> Any:
    """Return the object at ``module:attribute`` or ``module:Class.method``.

    A method is bound to an instance that the class gives without arguments; methods of one class share it.

    Raises:
        EmbodrlError: the path does not have that form, an attribute does not exist, or the class gives no instance.
        Exception: any exception from importing the module.
    """
    module_name, separator, attributes = path.partition(":")
    if not separator or not module_name or not all(attributes.split(".")):
        raise EmbodrlError(
            f"'{path}' is not of the form module:attribute",
            "write my_package.my_module:my_function or my_package.my_module:MyClass.my_method",
            code="function-path",
        )
    found: Any = importlib.import_module(module_name)
    place = module_name
    for attribute in attributes.split("."):
        found = _attribute(found, attribute, place)
        place += (":" if place == module_name else ".") + attribute
    return found


def _attribute(owner: Any, name: str, place: str) -> Any:
    """Return an attribute of the module or class at ``place``; a method is bound to the class's instance."""
    try:
        found = getattr(owner, name)
    except AttributeError as error:
        kind, joint = ("module", ":") if inspect.ismodule(owner) else ("object", ".")
        near = nearest(name, [known for known in dir(owner) if not known.startswith("_")])
        hint = f"did you mean {place}{joint}{near}?" if near else f"define it in {place}"
        raise EmbodrlError(f"{kind} '{place}' has no attribute '{name}'", hint, code="function-missing") from error
    is_method = inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, name))
    return getattr(_instance(owner), name) if is_method else found


@functools.cache
def _instance(cls: type) -> Any:
    """Return the only instance of a class whose methods a path names.

    Raises:
        EmbodrlError: its constructor needs arguments, or raises.
    """
    try:
        return cls()
    except Exception as error:  # a user's class may raise anything
        raise EmbodrlError(
            f"making '{cls.__module__}:{cls.__qualname__}' failed: {type(error).__name__}: {error}",
            "give it a constructor without arguments, or make the method a staticmethod or classmethod",
            code="method-instance",
        ) from error


def nearest_module(missing: str) -> str:
    """Return the existing module closest to a missing one, or ""; its parents must exist."""
    parent, _, leaf = missing.rpartition(".")
    search = list(getattr(importlib.import_module(parent), "__path__", [])) if parent else None
    near = nearest(leaf, [found.name for found in pkgutil.iter_modules(search)], cutoff=0.85)
    return f"{parent}.{near}" if parent and near else near


def import_function(path: str) -> Callable[..., Any]:
    """Return the user's function at ``module:function``.

    Raises:
        EmbodrlError: the function does not exist, or its module can't be imported; gives the reason.
    """
    try:
        with guard_user_code(f"importing '{path}'"):
            found = import_object(path)
    except EmbodrlError:
        raise
    except Exception as error:  # a user's module may raise anything
        hint = "fix the module, or put its directory on PYTHONPATH"
        if isinstance(error, ModuleNotFoundError) and error.name and _is_part(error.name, path.partition(":")[0]):
            near = nearest_module(error.name)
            hint = f"did you mean '{near}'? Or put the module's directory on PYTHONPATH" if near else hint
        raise EmbodrlError(
            f"importing '{path}' failed: {type(error).__name__}: {error}", hint, code="function-import"
        ) from error
    if not callable(found):
        raise EmbodrlError(
            f"'{path}' is a {type(found).__name__}, not a function", "name a function", code="function-not-callable"
        )
    return found


def import_workflow(path: str) -> Any:
    """Return an instance of the workflow class at ``module:Class``.

    Raises:
        EmbodrlError: the class does not exist, or is not a workflow; gives the reason.
    """
    found = import_function(path)
    if not inspect.isclass(found) or not inspect.iscoroutinefunction(getattr(found, "run_episode", None)):
        raise EmbodrlError(
            f"'{path}' is not a class with `async def run_episode(self, engine, env, task)`",
            "name a subclass of embodrl.RolloutWorkflow",
            code="workflow-class",
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise EmbodrlError(
            f"'{path}' is abstract: it lacks {', '.join(missing)}",
            "define them, or name a subclass that does",
            code="workflow-abstract",
        )
    agents_of(found)
    try:
        return found()
    except Exception as error:  # a user's class may raise anything
        raise EmbodrlError(
            f"making '{path}' failed: {type(error).__name__}: {error}",
            "give it a constructor without arguments",
            code="workflow-constructor",
        ) from error


def agents_of(workflow: object) -> tuple[str, ...]:
    """Return the agents that a workflow, or its class, declares; empty if it has one.

    Raises:
        EmbodrlError: ``agents`` are not several different names (``workflow-agents``).
    """
    agents: object = getattr(workflow, "agents", ())
    declared = cast("tuple[object, ...]", agents) if isinstance(agents, tuple) else (agents,)
    names = tuple(name for name in declared if isinstance(name, str) and name.isidentifier())
    if names == declared and len(set(names)) == len(names) != 1:
        return names
    raise EmbodrlError(
        f"a workflow has agents = {agents!r:.100}",
        'name two or more, as in agents = ("proposer", "solver"); leave it out for one',
        code="workflow-agents",
    )


def workflow_agents(path: str | None) -> tuple[str, ...]:
    """Return the agents of the workflow at ``module:Class``, empty for None; raises as ``import_workflow``."""
    return () if path is None else agents_of(import_workflow(path))


def _is_part(name: str, module: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def label_of(function: Callable[..., object]) -> str:
    """Return ``module:function``, by which ``import_object`` finds a function that its module defines by name."""
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def parameters_of(function: Callable[..., object]) -> tuple[set[str], set[str], bool]:
    """Return the keyword parameters of a function, those without default, and whether it accepts any others."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = {p.name for p in named if p.default is p.empty}
    return {p.name for p in named}, needed, any(p.kind is p.VAR_KEYWORD for p in parameters)


def call_named(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with the arguments that its parameters name."""
    names, _, takes_all = parameters_of(function)
    return function(**{name: value for name, value in arguments.items() if takes_all or name in names})
