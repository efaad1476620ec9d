"""`embodrl parity`."""

from __future__ import annotations

import math
import re
import sys
import traceback
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.app import choose, one_of
from embodrl.cli.common import EXIT_ERROR, EXIT_OK, Debug, JsonFile, execute
from embodrl.errors import EmbodrlError, UsageError
from embodrl.names import import_object, meant

if TYPE_CHECKING:
    from embodrl.tools.parity.common import Arithmetic, Comparison

INPUTS_FILE = "io.safetensors"
OWN = ("openvla", "openvla_oft", "pi0_fast", "gr00t", "gr00t_n1_7", "smolvla")
"""Families compared by the module of their name."""
COMPARISONS = {
    **{name: f"embodrl.tools.parity.{name}:run" for name in OWN},
    **dict.fromkeys(("pi0", "pi05"), "embodrl.tools.parity.pi:run"),
}
"""Built-in family -> ``module:function`` that compares it; other families use ``ModelSpec.parity``."""


class ParityDevice(StrEnum):
    """Device of the networks."""

    cpu = "cpu"
    cuda = "cuda"


class ParityPrecision(StrEnum):
    """Compute precision of the networks."""

    fp32 = "fp32"
    bf16 = "bf16"


Directory = Annotated[Path, typer.Argument(metavar="DIR", help="a fixture, or a directory of fixtures")]
Family = Annotated[
    str | None,
    typer.Option("--family", metavar="NAME", help="model family; default: from the folder's name", show_default=False),
]


@dataclass
class ParityOutcome:
    """Result of one fixture; ``comparisons`` is empty and ``error`` set if the comparison could not run."""

    directory: Path
    family: str
    comparisons: list[Comparison] = field(default_factory=list)
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and all(comparison.ok for comparison in self.comparisons)

    def to_dict(self) -> dict[str, object]:
        """Return JSON values; JSON has no infinity, so an infinite error is null, and so is a missing tolerance."""
        return {
            "directory": str(self.directory),
            "family": self.family,
            "ok": self.ok,
            "error": self.error or None,
            "outputs": [
                {
                    "name": one.name,
                    "max_error": one.max_error if math.isfinite(one.max_error) else None,
                    "tolerance": one.tolerance if math.isfinite(one.tolerance) else None,
                    "scale": one.scale if math.isfinite(one.scale) else None,
                    "ok": one.ok,
                }
                for one in self.comparisons
            ],
        }


def parity(
    directory: Directory,
    family: Family = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="cpu or cuda", autocompletion=one_of(ParityDevice))
    ] = "cpu",
    precision: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="fp32, or bf16: autocast, as in training", autocompletion=one_of(ParityPrecision)
        ),
    ] = "fp32",
    json: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Compare a model family with recorded outputs of its reference implementation.

    A fixture is a folder named after its family with model.safetensors (weights), io.safetensors (inputs and the
    reference's outputs) and, for some families, config.json. Exits 0 if every output is within tolerance, else 1.
    Tolerances are ten times as wide in float32 on a GPU (without TF32), and relative to the output in bfloat16.

    \b
    Examples:
      embodrl parity fixtures/openvla_oft
      embodrl parity fixtures --json errors.json
      embodrl parity my-recording --family pi0
      embodrl parity fixtures --device cuda --precision bf16
    """

    def action() -> int:
        where = ParityDevice(choose(device, ParityDevice, "device"))
        wanted = ParityPrecision(choose(precision, ParityPrecision, "precision"))
        chosen = [(folder, family_of(folder, family)) for folder in fixtures(directory)]
        if json is not None:
            from embodrl.storage.json_file import check_json_file

            check_json_file(json)
        from embodrl.tools.parity.common import arithmetic

        how = arithmetic(where.value, wanted.value)
        outcomes = [run(folder, name, how, debug) for folder, name in chosen]
        show(outcomes)
        ok = all(outcome.ok for outcome in outcomes)
        if json is not None:
            from embodrl.storage.json_file import write_json_result

            found = [outcome.to_dict() for outcome in outcomes]
            write_json_result(json, {"ok": ok, "device": how.name, "precision": wanted.value, "fixtures": found})
        return EXIT_OK if ok else EXIT_ERROR

    execute(action, debug)


def fixtures(directory: Path) -> list[Path]:
    """Return the fixture that a directory is, or the fixtures in it, by name.

    Raises:
        UsageError: no such directory, or no fixture.
    """
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}", "give the folder of a fixture, or of several")
    directory = directory.resolve()
    found = [directory] if (directory / INPUTS_FILE).is_file() else []
    found = found or sorted(path.parent for path in directory.glob(f"*/{INPUTS_FILE}"))
    if not found:
        raise UsageError(
            f"{directory} holds no fixture: neither it nor a folder in it has {INPUTS_FILE}",
            "give the folder that has model.safetensors and io.safetensors",
        )
    return found


def family_of(directory: Path, family: str | None = None) -> str:
    """Return the registered family of a fixture: ``family``, else the longest registered name in the folder's name.

    Raises:
        UsageError: unknown family, or one without a comparison; lists the families that have one.
    """
    from embodrl.specs import MODELS

    known = [spec.name for spec in MODELS.all() if spec.parity or spec.name in COMPARISONS]
    words = re.sub(r"[^a-z0-9]+", "_", directory.name.lower())
    named = [name for name in known if f"_{name}_" in f"_{words}_"]
    chosen = family if family is not None else max(named, key=len, default=None)
    if chosen in known:
        return chosen
    what = (
        f"no model family '{family}' can be compared"
        if family
        else f"the name of {directory} belongs to no model family"
    )
    near = meant(family or words, known)
    raise UsageError(
        f"{what}; known: {', '.join(known)}",
        (f"did you mean '{near}'? " if near else "") + "rename the folder after its family, or give --family NAME",
    )


def run(directory: Path, family: str, how: Arithmetic, debug: bool = False) -> ParityOutcome:
    """Run a fixture; a damaged or mismatched one is an outcome, not an exception."""
    from embodrl.specs import MODELS

    compare = import_object(COMPARISONS.get(family) or MODELS.entry(family).parity)
    try:
        comparisons = how.run(compare, directory)
    except EmbodrlError as error:
        problem = error.message
    except (LookupError, ValueError, TypeError, RuntimeError) as error:
        # A recording of another layout: unknown names or shapes.
        problem = f"not a fixture of {family}: {type(error).__name__}: {error}"
    else:
        return ParityOutcome(directory, family, comparisons, "" if comparisons else "nothing was compared")
    if debug:
        traceback.print_exc()
    return ParityOutcome(directory, family, error=problem)


def show(outcomes: list[ParityOutcome]) -> None:
    """Print a table of the outputs to stdout, and fixtures that could not run to stderr."""
    head = ("fixture", "family", "output", "max error", "tolerance", "verdict")
    table = [
        (
            outcome.directory.name,
            outcome.family,
            one.name,
            f"{one.max_error:.1e}",
            f"{one.tolerance:.0e}" if math.isfinite(one.tolerance) else "-",
            verdict,
        )
        for outcome in outcomes
        for one in outcome.comparisons
        for verdict in ["ok" if one.ok else "OUT OF TOLERANCE"]
    ]
    table += [(o.directory.name, o.family, "", "", "", "ERROR") for o in outcomes if o.error]
    widths = [max(len(row[i]) for row in [head, *table]) for i in range(len(head))]
    for row in [head, *table]:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    failed = [outcome for outcome in outcomes if not outcome.ok]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} fixtures are reproduced within their tolerances")
    for outcome in failed:
        if outcome.error:
            hint = "record or copy the fixture again, or name its family with --family"
            print(f"error: {outcome.directory}: {outcome.error}\n  hint: {hint}", file=sys.stderr)
