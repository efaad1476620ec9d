"""Registries of lazily resolved names: asking whether a name exists imports nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from embodrl.errors import EmbodrlError, UnknownNameError
from embodrl.names import import_object, meant, nearest
from embodrl.user_code import ends_process

if TYPE_CHECKING:
    from typing import Self  # simulators may run in Python 3.10, which lacks it

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered name with its target.

    Attributes:
        name: name in the configuration.
        target: ``module:attribute``, imported on first use, or the object itself.
        description: one line for ``embodrl list``.
    """

    name: str
    target: Callable[..., object] | str
    description: str = ""

    @classmethod
    def make(cls, name: str, target: Any, description: str, facts: Mapping[str, Any]) -> Self:
        """Return a spec from facts given by name.

        Raises:
            EmbodrlError: a fact is unknown (the nearest known one is named), or its value is invalid.
        """
        known = [each.name for each in fields(cls) if each.name not in ("name", "target", "description")]
        for fact in facts:
            if fact not in known:
                near = nearest(fact, known)
                raise EmbodrlError(
                    f"'{name}' is registered with an unknown fact '{fact}'",
                    f"did you mean '{near}'?" if near else f"known facts: {', '.join(known)}",
                    code="spec-fact-unknown",
                )
        return cls(name=name, target=target, description=description, **facts)


E = TypeVar("E", bound=Entry)


class Registry(Generic[E]):
    """Entries by name: built in, registered, or from an entry point of an installed package.

    Args:
        kind: kind of the entries in words, for messages.
        cls: class of the entries.
        group: entry-point group. Each entry point names an entry (``module:SPEC``), or a module that registers its
            name; "" for none.
        table: built-in entries: name -> ``module:SPEC``, imported when the name is first requested; or the location of
            that mapping, as ``module:ATTRIBUTE``.
    """

    def __init__(self, kind: str, cls: type[E], group: str = "", table: Mapping[str, str] | str = "") -> None:
        self.kind = kind
        self.cls = cls
        self.group = group
        self._table = table
        self._entries: dict[str, E] = {}
        self._points: dict[str, EntryPoint] | None = None

    @cached_property
    def builtin(self) -> dict[str, str]:
        """Built-in names, with the locations of their entries."""
        table: Mapping[str, str] = import_object(self._table) if isinstance(self._table, str) and self._table else {}
        return dict(self._table if isinstance(self._table, Mapping) else table)

    def register(self, spec: E) -> E:
        """Add a spec.

        Raises:
            EmbodrlError: the name is taken by another target.
        """
        known = self._entries.get(spec.name)
        if spec.name in self.builtin or (known is not None and known.target != spec.target):
            raise EmbodrlError(
                f"{self.kind} '{spec.name}' is already registered", "choose another name", code="name-taken"
            )
        self._entries[spec.name] = spec
        return spec

    def add(self, name: str, target: Any, description: str = "", **facts: Any) -> E:
        """Create a spec from facts given by name, and add it.

        Raises:
            EmbodrlError: the name is taken, or a fact is unknown or invalid.
        """
        return self.register(self.cls.make(name, target, description, facts))

    def names(self) -> list[str]:
        """Return all names: built-in, then from entry points, then registered."""
        return list(dict.fromkeys((*self.builtin, *self._discovered(), *self._entries)))

    def package(self, name: str) -> str | None:
        """Return the package whose entry point defines a name; None for other names."""
        point = self._discovered().get(name)
        if name in self.builtin or name in self._entries or point is None:
            return None
        return "an unknown package" if point.dist is None else str(point.dist.metadata["Name"])

    def entry(self, name: str) -> E:
        """Return the spec of a name; its target is not imported.

        Raises:
            UnknownNameError: no such name; lists the known ones.
            EmbodrlError: the name's entry point can't be imported, or gives no spec.
        """
        if name in self.builtin and name not in self._entries:
            self._entries[name] = import_object(self.builtin[name])
        elif name not in self._entries and name in self._discovered():
            self._entries[name] = self._load(self._discovered()[name])
        if name not in self._entries:
            near = meant(name, self.names())
            hint = f"did you mean '{near}'?" if near else f"choose a known {self.kind} or register yours"
            raise UnknownNameError(
                f"unknown {self.kind} '{name}'; known: {', '.join(self.names())}",
                hint,
            )
        return self._entries[name]

    def get(self, name: str) -> Any:
        """Return the target of a name, importing it if necessary.

        Raises:
            EmbodrlError: there is no such name, or its module can't be imported.
        """
        target = self.entry(name).target
        if not isinstance(target, str):
            return target
        try:
            return import_object(target)
        except ModuleNotFoundError as error:
            module = target.partition(":")[0]
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise  # a module that the target's own module imports
            raise EmbodrlError(
                f"{self.kind} '{name}' is registered as '{target}', and there is no module '{error.name}'",
                "correct the name, or put the module's directory on PYTHONPATH",
                code="spec-target-missing",
            ) from error

    def all(self) -> list[E]:
        """Return all specs, leaving out entry points that can't be imported."""
        found: list[E] = []
        for name in self.names():
            try:
                found.append(self.entry(name))
            except EmbodrlError:
                continue
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self._entries or name in self._discovered()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _discovered(self) -> dict[str, EntryPoint]:
        if self._points is None:  # reading the metadata of all installed packages takes some milliseconds
            points = installed_points(self.group) if self.group else ()
            # An older source installation of embodrl may still list entry points to its own modules.
            others = [point for point in points if not point.value.startswith(("embodrl.", "embodrl:"))]
            self._points = {}
            for point in sorted(others, key=lambda point: point.name):
                self._points.setdefault(point.name, point)
        return self._points

    def _load(self, point: EntryPoint) -> E:
        try:
            found = point.load()
        except BaseException as error:  # third-party packages may raise anything on import, or exit
            if ends_process(error):
                raise
            raise EmbodrlError(
                f"{self.kind} '{point.name}' of the entry point '{point.value}' can't be imported:"
                f" {type(error).__name__}: {error}",
                "fix or uninstall the package that declares it",
                code="entry-point-broken",
            ) from error
        spec = found if isinstance(found, self.cls) else self._entries.get(point.name)
        if spec is None:
            raise EmbodrlError(
                f"the entry point '{point.value}' gives no {self.kind} '{point.name}'",
                f"name a {self.cls.__name__}, or a module that registers '{point.name}'",
                code="entry-point-broken",
            )
        return spec


def installed_points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, warning about and skipping packages with damaged metadata."""
    try:
        return list(entry_points(group=group))
    except Exception:  # noqa: BLE001  the library reads all packages' metadata at once, and one is damaged
        # Importing these reads the metadata as well, and would fail.
        os.environ |= {"PYDANTIC_DISABLE_PLUGINS": "__all__", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    found: dict[str, list[EntryPoint]] = {}
    for package in distributions():
        name = str(package.metadata["Name"])
        if name in found:
            continue  # the first one on the path counts
        try:
            found[name] = list(package.entry_points.select(group=group))
        except Exception as error:  # noqa: BLE001  it raises whatever its parser raises
            found[name] = []
            _warn_of_package(name, str(error))
    return [point for points in found.values() for point in points]


@cache
def _warn_of_package(name: str, problem: str) -> None:
    logger.warning("the entry points of package %s can't be read: %s; reinstall it", name, problem)
