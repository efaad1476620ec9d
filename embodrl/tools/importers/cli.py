"""`embodrl import`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.app import choose, one_of
from embodrl.cli.common import Debug, execute

if TYPE_CHECKING:
    from embodrl.tools.importers.rlinf import Import


class System(StrEnum):
    """Systems whose configurations can be imported."""

    rlinf = "rlinf"


def import_recipe(
    system: Annotated[
        str, typer.Argument(metavar="SYSTEM", help="rlinf", show_default=False, autocompletion=one_of(System))
    ],
    recipe: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="a recipe, next to its folders env and model", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="YAML", help="write the configuration to this file", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Convert a recipe of another system to a configuration, and report the outcome of each of its keys.

    Reads the file and its includes in the same folder as plain YAML; runs none of its code.

    \b
    Examples:
      embodrl import rlinf RLinf/examples/embodiment/config/maniskill_ppo_openvla.yaml --out mine.yaml
      embodrl config validate --config mine.yaml
    """

    def action() -> None:
        choose(system, System, "SYSTEM")
        from embodrl.errors import OutputError
        from embodrl.tools.importers.rlinf import import_rlinf

        if out is not None and out.exists():
            raise OutputError(f"{out} exists", "name a new file", code="output-exists")
        found = import_rlinf(recipe)
        print("\n".join(report(recipe, found)))
        if out is not None:
            _write(out, recipe, found)
            choices = "".join(f" {key}=..." for key in found.missing)
            print(f"\n{out}: check it with `embodrl config validate --config {out}{choices}`")

    execute(action, debug)


def report(path: Path, found: Import) -> list[str]:
    """Return the lines of the report: totals, presets, and the keys by outcome."""
    from embodrl.tools.importers.rlinf import GROUPS

    counts = ", ".join(f"{found.count(group)} {words}" for group, words in GROUPS.items())
    lines = [f"{path}: {len(found.answers)} keys: {counts}"]
    lines.append(f"kept: {found.share:.0%} of the {found.num_read} keys that RLinf reads")
    lines += [f"not found next to the recipe: {name}" for name in found.recipe.missing]
    lines.append("presets: " + " ".join(f"{group}={name}" for group, name in found.presets.items()))
    lines += [f"choose it yourself: {key}, RLinf's is {name}" for key, name in found.missing.items()]
    for group, words in GROUPS.items():
        answers = [answer.line() for answer in found.answers if answer.group == group]
        lines += ["", f"{words}:", *(f"  {line}" for line in answers)] if answers else []
    return lines


def _write(out: Path, recipe: Path, found: Import) -> None:
    import yaml

    from embodrl.storage.atomic import atomic_file

    comments = [f"# RLinf's {recipe.name}; {found.count('unsupported')} of its keys have no counterpart here."]
    comments += [f"# Choose {key}: RLinf's {name} is not here." for key, name in found.missing.items()]
    text = yaml.safe_dump(found.document(), sort_keys=False, allow_unicode=True)
    with atomic_file(out) as partial:
        partial.write_text("\n".join(comments) + "\n" + text)
