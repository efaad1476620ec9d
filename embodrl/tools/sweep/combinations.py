"""Expands arguments with several values into runs."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from embodrl.config.compose import MAX_ARGUMENT
from embodrl.errors import ConfigError, ConfigProblem

MAX_RUNS = 1000
_GLOB = re.compile(r"[^=]+=\s*glob\(")


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep.

    Attributes:
        name: unique name from its distinguishing values, e.g. ``seed-1_algorithm-grpo``.
        overrides: its arguments, one value each.
    """

    name: str
    overrides: tuple[str, ...]


def expand_sweep(texts: list[str]) -> list[SweptRun]:
    """Return every combination of the values in ``key=1,2,3``, ``key=range(0,3)`` and ``key=choice(a,b)``.

    The last argument varies fastest. Arguments that can't be parsed are kept, and reported by the check of each run.

    Raises:
        ConfigError: unsupported sweep syntax, too many runs, or no argument with several values.
    """
    columns = [_values(text) for text in texts]
    swept = [index for index, values in enumerate(columns) if len(values) > 1]
    if not swept:
        hint = "give an argument several values: runner.seed=0,1,2; start a single run with `embodrl train`"
        raise ConfigError([ConfigProblem("(arguments)", "have one value each", hint=hint, code="sweep-single")])
    number = 1
    for values in columns:
        number *= len(values)
    if number > MAX_RUNS:
        hint = "give fewer values, or several sweeps"
        message = f"stand for {number} runs, at most {MAX_RUNS} are allowed"
        raise ConfigError([ConfigProblem("(arguments)", message, hint=hint, code="sweep-size")])
    keys = [texts[index].lstrip("+").partition("=")[0] for index in swept]
    short = [key.rpartition(".")[2] for key in keys]
    labels = short if len(set(short)) == len(short) else keys
    runs = [
        SweptRun(_name(labels, [chosen[index] for index in swept]), tuple(chosen))
        for chosen in itertools.product(*columns)
    ]
    return _unique(runs)


def _values(text: str) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if len(text) > MAX_ARGUMENT:
        return [text]
    if _GLOB.match(text):  # Hydra needs its own search path to parse it
        raise _without_values(text)
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):
        return [text]
    if not override.is_sweep_override():
        return [text]
    if not (override.is_choice_sweep() or override.is_range_sweep()):
        raise _without_values(text)
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _without_values(text: str) -> ConfigError:
    hint = "list the values: key=1,2,3, key=range(0,3) or key=choice(a,b)"
    key = text.partition("=")[0]
    origin = f"command line: {text}"
    return ConfigError([ConfigProblem(key, "has no list of values", origin, hint=hint, code="sweep-kind")])


def _name(labels: list[str], arguments: list[str]) -> str:
    values = [re.sub(r"[^A-Za-z0-9._-]+", "-", argument.partition("=")[2]).strip("-.") for argument in arguments]
    return "_".join(f"{label}-{value}" for label, value in zip(labels, values, strict=True))[:120]


def _unique(runs: list[SweptRun]) -> list[SweptRun]:
    """Number the run names that differ only in characters unfit for file names."""
    counts = {run.name: sum(other.name == run.name for other in runs) for run in runs}
    return [
        SweptRun(f"{index}_{run.name}", run.overrides) if counts[run.name] > 1 else run
        for index, run in enumerate(runs)
    ]
