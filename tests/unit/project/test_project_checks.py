"""The scripts behind `make lint` and the check of an installation."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

import embodrl

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SCRIPTS / name))


def test_cuda_libraries_and_torchvision_are_unwanted_beside_a_cpu_torch() -> None:
    unwanted = load("check_install.py")["unwanted"]
    names = ["torch", "nvidia-cublas-cu12", "nvidia_cudnn_cu12", "nvidia-ml-py", "triton", "torchvision", "numpy"]
    assert set(unwanted(names, "cpu")) == {"nvidia-cublas-cu12", "nvidia-cudnn-cu12", "triton", "torchvision"}
    assert unwanted(names, "cuda") == {}


def test_classes_that_want_to_be_two_and_packed_assignments_are_refused() -> None:
    checks = load("check_sizes.py")
    shape, problems_of, stale = (checks[name] for name in ("Shape", "problems_of", "stale"))
    arguments = ", ".join(f"a{index}" for index in range(7))
    source = (
        f"class Wide:\n    def __init__(self, {arguments}):\n        self.a = a0\n        self.b, self.c = a1, a2\n"
    )
    [problem] = problems_of("a.py", ast.parse(source), {})
    assert problem.startswith("a.py:1: class Wide")
    assert list(problems_of("a.py", ast.parse(source), {"a.py:Wide": shape(arguments=7)})) == []
    assert len(list(problems_of("a.py", ast.parse("a, b, c = 1, 2, 3"), {}))) == 1
    assert list(problems_of("a.py", ast.parse("a, b = 1, 2\na, b, c = values()"), {})) == []
    assert list(stale({"a.py:Wide": shape(1, 3, 7)}, {"a.py:Wide": shape(arguments=7)})) == []
    assert len(list(stale({"a.py:Wide": shape(1, 3, 7)}, {"a.py:Wide": shape(arguments=8)}))) == 1
    assert len(list(stale({}, {"a.py:Wide": shape(arguments=8)}))) == 1
    found = checks["repeated"]({"Kind": ["a.py", "b.py"], "_Kind": ["a.py", "b.py"], "Other": ["a.py"]})
    assert [line.partition(" stands")[0] for line in found] == ["class Kind"]


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("see " + "/ho" + "me/someone/file", True),
        ("see " + "/wo" + "rk/file", True),
        ("the docs/wo" + "rk/ folder", False),
        ("index at https://py" + "pi.example", True),
        ("a plain line", False),
    ],
)
def test_text_tied_to_a_machine_is_refused(line: str, refused: bool) -> None:
    problems = load("check_text.py")["problems_of"]("a.md", "first\n" + line)
    assert len(problems) == (1 if refused else 0)
    assert all(problem.startswith("a.md:2: ") for problem in problems)


def test_version_to_cite_is_that_of_the_package() -> None:
    citation = (SCRIPTS.parent / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {embodrl.__version__}" in citation
