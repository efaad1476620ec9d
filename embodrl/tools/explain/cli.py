"""`embodrl explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from embodrl.cli.common import Debug, execute, importing
from embodrl.errors import UsageError


def explain(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="keys (algorithm.gamma), sections (algorithm.kl) and error codes (config-range)",
            show_default=False,
        ),
    ],
    debug: Debug = False,
) -> None:
    """Explain settings, sections and error codes.

    For a setting: type, default, allowed values, conditions, the verbs that read it, and the rules about it. For
    a section: its keys. For a code, which ends every error: the messages, with … for variable parts, and what
    to do about each.

    \b
    Examples:
      embodrl explain env.tasks
      embodrl explain algorithm.kl
      embodrl explain config-unknown-key
    """

    def action() -> None:
        with importing():
            texts = [entry for name in names for entry in entries(name)]
        print("\n\n".join(texts))

    execute(action, debug)


def entries(name: str) -> list[str]:
    """Return the entries of a name, which may be both a key and a code, e.g. ``store``.

    Raises:
        UsageError: the name is neither; names the nearest one.
    """
    from embodrl.tools.explain import codes, keys, text

    settings = keys.find(name)
    found = [text.key_text(settings)] if settings else []
    found += [text.code_text(entry) for entry in codes.entries_of(name)]
    if found:
        return found
    near = codes.nearest_code(name) if "-" in name else keys.nearest_key(name) or codes.nearest_code(name)
    kinds = "`embodrl config show` prints all keys; a code ends every error"
    raise UsageError(
        f"unknown setting, section or error code '{name}'",
        f"nearest: {near}; {kinds}" if near else kinds,
        code="explain-unknown-name",
    )
