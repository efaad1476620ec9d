"""Paired comparison of evaluations on the same episodes, from eval.json to a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from embodrl.errors import OutputError
from embodrl.fields import Fields, read_fields
from embodrl.reporting.eval_report import UNPERTURBED
from embodrl.reporting.metrics_file import METRICS_FILE
from embodrl.reporting.paired import PairedFigures, change_text, compare_pairs
from embodrl.tools.compare.comparison import run_names

JSON_FILE = "eval.json"
SAME = ("environment", "tasks", "step limit")
"""Settings that must match for episodes of one seed to be the same."""
ACTIONS = "actions"
"""Decoding of the main figures, which must match: otherwise the difference is not one between policies."""
Outcomes = dict[tuple[str, int], bool]
"""Episode id: task and seed."""


class EvalComparison(TypedDict):
    """An evaluation compared with the first; ``parts`` has all unperturbed episodes, each task and each axis."""

    first: str
    second: str
    parts: dict[str, PairedFigures]


def is_evaluation(directory: Path) -> bool:
    """Whether a directory was written by `embodrl eval` and is not a run."""
    return (directory / JSON_FILE).is_file() and not (directory / METRICS_FILE).is_file()


def comparison_of(directories: Sequence[Path]) -> list[EvalComparison]:
    """Compare evaluations with the first one.

    Raises:
        OutputError: only one evaluation, or different environments, tasks or step limits, or no common episode.
        FileFormatError: an eval.json is damaged.
    """
    if len(directories) < 2:
        raise OutputError("there is only one evaluation", "name two or more", code="evals-not-comparable")
    first, *others = [read_fields(path / JSON_FILE, follow_links=False) for path in directories]
    names = run_names(directories)
    for name, other in zip(names[1:], others, strict=True):
        for key in (*SAME, ACTIONS):
            values = [each.fields("settings").content.get(key) for each in (first, other)]
            if values[0] != values[1]:
                raise OutputError(
                    f"{names[0]} and {name} differ in {key}: {values[0]} and {values[1]}",
                    "compare evaluations with the same env.eval.decoding; eval.json of `all` compares its own decodings"
                    if key == ACTIONS
                    else "compare evaluations of the same episodes",
                    code="evals-not-comparable",
                )
        if not _outcomes(first).keys() & _outcomes(other).keys():
            raise OutputError(
                f"{names[0]} and {name} have no episode in common",
                "use the same env.eval.seed",
                code="evals-not-comparable",
            )
    return [
        {"first": names[0], "second": name, "parts": _parts(first, other)}
        for name, other in zip(names[1:], others, strict=True)
    ]


def _outcomes(content: Fields) -> Outcomes:
    episodes = content.objects("per_episode")
    return {(episode.text("task"), episode.integer("seed")): episode.flag("success") for episode in episodes}


def _parts(first: Fields, second: Fields) -> dict[str, PairedFigures]:
    plain = _outcomes(first), _outcomes(second)
    found = {UNPERTURBED: compare_pairs(*plain)}
    tasks = dict.fromkeys(task for task, _ in plain[0])
    if len(tasks) > 1:
        found |= {task: compare_pairs(*(_of_task(each, task) for each in plain)) for task in tasks}
    axes = [each.fields("axes", {}) for each in (first, second)]
    shared = [name for name in axes[0].content if name in axes[1].content]
    return found | {f"axis {name}": compare_pairs(*(_outcomes(each.fields(name)) for each in axes)) for name in shared}


def _of_task(outcomes: Mapping[tuple[str, int], bool], task: str) -> Outcomes:
    return {key: solved for key, solved in outcomes.items() if key[0] == task}


def rows_of(compared: EvalComparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the heads and rows of a table."""
    heads = ("episodes", "pairs", "difference", "only first", "only second", "p")
    rows = [
        (
            *(name, str(part["pairs"]), change_text(part)),
            *(str(part["only_first"]), str(part["only_second"]), f"{part['p_value']:.3f}"),
        )
        for name, part in compared["parts"].items()
    ]
    return heads, rows
