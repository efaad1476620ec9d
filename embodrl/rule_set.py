"""Configuration rules; their input is defined in ``embodrl.config.rules.base``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A rule's objection.

    Attributes:
        key: key to change first.
        message: what is wrong, with the arithmetic.
        hint: what to change.
        allowed: acceptable values, in words.
        nearest: nearest valid name.
        others: further keys involved; the report names their origins, too.
        at: key whose origin is reported, if not ``key``.
        code: stable identifier; defaults to the name of the rule.
    """

    key: str
    message: str
    hint: str
    allowed: str = ""
    nearest: str = ""
    others: tuple[str, ...] = ()
    at: str = ""
    code: str = ""


Check = Callable[[Any], Iterator[Finding]]
"""Called with a ``Context`` of ``embodrl.config.rules.base``."""


@dataclass(frozen=True)
class Rule:
    """A check and the keys that it reads; it is skipped while one of them is invalid.

    Attributes:
        check: yields findings.
        keys: keys that it reads.
        machine_specific: whether it depends on this machine or its software. A plan, which starts nothing, lists the
            findings as obstacles instead of errors.
    """

    check: Check
    keys: tuple[str, ...]
    machine_specific: bool = False

    @property
    def code(self) -> str:
        """Stable identifier of the findings: the check's name in kebab case."""
        return self.check.__name__.replace("_", "-")


@dataclass(frozen=True)
class RuleSet:
    """Checks that belong together: the core's, or a simulator's or model family's."""

    rules: list[Rule] = field(default_factory=list[Rule])
    notes: list[Rule] = field(default_factory=list[Rule])

    def rule(self, *keys: str, machine_specific: bool = False) -> Callable[[Check], Check]:
        """Register a check whose findings are errors; ``machine_specific``: see ``Rule``."""
        return self._register(self.rules, keys, machine_specific)

    def note(self, *keys: str) -> Callable[[Check], Check]:
        """Register a check whose findings are printed, but do not stop anything."""
        return self._register(self.notes, keys)

    def _register(
        self, rules: list[Rule], keys: tuple[str, ...], machine_specific: bool = False
    ) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            rules.append(Rule(check, keys, machine_specific))
            return check

        return add
