"""What a wrong configuration is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wrong:
    """A wrong configuration.

    Attributes:
        name: what is wrong.
        key: the key that the report names.
        code: of the problem with that key.
        args: command-line arguments.
        text: content of a file given with --config; None for no file.
        line: line of the file that the report names; 0 if the origin is the first argument.
        more: further keys that the report names, because they are wrong for the same reason.
        names: a name or number that the report's paragraph about that key has to contain.
    """

    name: str
    key: str
    code: str
    args: tuple[str, ...] = ()
    text: str | None = None
    line: int = 0
    more: tuple[str, ...] = ()
    names: str = ""
