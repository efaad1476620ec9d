"""What a rule of the configuration is; ``embodrl.config.rules.base`` says what it looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What a rule objects to.

    Attributes:
        key: the key to be changed first.
        message: what is wrong, with the arithmetic.
        hint: what to change.
        allowed: values that would do, in words.
        nearest: the nearest valid name.
        others: further keys that are part of it; the report names their origins, too.
        at: the key whose origin is meant, if it is not ``key`` itself.
        code: stable identifier; by default the name of the rule.
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
        check: yields what is wrong.
        keys: what it reads.
        machine_specific: depends on this machine or the programs on it. A plan, which starts nothing, lists what it
            finds as an obstacle instead of refusing it.
    """

    check: Check
    keys: tuple[str, ...]
    machine_specific: bool = False

    @property
    def code(self) -> str:
        """Stable identifier of what the rule finds: its name in kebab case."""
        return self.check.__name__.replace("_", "-")


@dataclass(frozen=True)
class RuleSet:
    """Checks that belong together: the core's, or those of one simulator or model family."""

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
