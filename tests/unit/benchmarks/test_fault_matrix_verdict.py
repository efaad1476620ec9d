"""What the matrix of faults calls wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "fault_matrix.py"


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fault_matrix_under_test", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_a_run_continues_or_ends_as_it_should(matrix: ModuleType) -> None:
    fine = matrix.Cell("simulator", "stop", 20.5, "continues", 143, 5, 0, "restart 1")
    assert matrix.wrongs(fine) == []
    assert matrix.wrongs(matrix.Cell("driver", "kill", 0.3, "ends with -9", -9, 2, 0, "")) == []
    assert matrix.wrongs(dataclasses.replace(fine, fault="slow", detected_s=None)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"left": 2}, "2 processes"),
        ({"detected_s": 31.0}, "after 31 s"),
        ({"detected_s": None}, "never found"),
        ({"outcome": "HANGS", "exit_code": None}, "HANGS"),
        ({"outcome": "ends with 1", "exit_code": 1}, "should continue"),
        ({"exit_code": 0}, "exit code 0"),
    ],
)
def test_what_is_wrong_is_named(matrix: ModuleType, change: dict[str, object], words: str) -> None:
    cell = matrix.Cell("simulator", "stop", 20.5, "continues", 143, 5, 0, "restart 1")
    assert any(words in reason for reason in matrix.wrongs(dataclasses.replace(cell, **change)))
