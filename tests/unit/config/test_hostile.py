"""Configuration files, mappings and arguments that are huge, deep, endless or of a wrong type are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from embodrl.config import load_config
from embodrl.config.nodes import MAX_FILE_BYTES
from embodrl.errors import ConfigError, ConfigProblem

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
ITSELF: dict[str, Any] = {}
ITSELF["env"] = ITSELF


def problems(overrides: list[str], source: Path | dict[Any, Any] | None) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, source)
    assert len(caught.value.report()) < 20_000 and "\x1b" not in caught.value.report()
    return caught.value.problems


FILES = {
    "ten levels of ten aliases": (LAUGHS, "config-yaml-size", 1),
    "an alias of itself": ("env: &a {b: *a}\n", "config-yaml-depth", 1),
    "5000 brackets": ("a: " + "[" * 5000 + "]" * 5000, "config-yaml-depth", 0),
    "30 brackets": ("\na: " + "[" * 30 + "]" * 30, "config-yaml-depth", 2),
    "an integer as key": ("\n1: 2\n", "config-unknown-key", 2),
    "a mapping as key": ("\n{a: b}: 2\n", "config-yaml-key", 2),
    "inf": ("actor:\n  optim: {lr: 1e999}\n", "config-range", 2),
    "5000 digits": ("\nrunner: {seed: " + "9" * 5000 + "}\n", "config-yaml-size", 2),
    "a long text": ("\nrunner: {name: " + "x" * 5000 + "}\n", "config-yaml-size", 2),
    "control characters": ('\nrunner: {name: "\\x1b[2J/"}\n', "name-is-one-directory", 2),
    "a huge file": ("#" * (MAX_FILE_BYTES + 1), "config-yaml-size", 0),
    "a path that no system allows": ("env:\n  python: " + "x" * 4000, "interpreter-exists", 2),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    text, code, line = FILES[name]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    found = next(problem for problem in problems([], path) if problem.code == code)
    assert found.origin.startswith(f"{path}:{line}" if line else str(path))


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("a\0b")):
        assert [problem.code for problem in problems([], path)] == ["config-file-unreadable"]


MAPPINGS: dict[str, tuple[dict[Any, Any], str]] = {
    "itself": (ITSELF, "config-mapping-size"),
    "an object": ({"runner": {"name": object()}}, "config-mapping-type"),
    "a set": ({"env": {"tasks": {"reach-red"}}}, "config-mapping-type"),
    "bytes": ({"runner": {"name": b"x"}}, "config-mapping-type"),
    "a long text": ({"runner": {"name": "x" * 5000}}, "config-mapping-size"),
    "100000 items": ({"env": {"tasks": ["a"] * 100_000}}, "config-mapping-size"),
    "an integer as key": ({1: 2}, "config-unknown-key"),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_hostile_mapping_is_refused(name: str) -> None:
    mapping, code = MAPPINGS[name]
    assert code in [problem.code for problem in problems([], mapping)]


def test_paths_in_a_mapping_are_text(tmp_path: Path) -> None:
    assert load_config([], {"env": "toy", "runner": {"output_dir": tmp_path}}).config.runner.output_dir == str(tmp_path)


@pytest.mark.parametrize(
    ("argument", "code"),
    [
        ("a=" + "[" * 3000 + "]" * 3000, "argument-syntax"),
        ("runner.name=" + "x" * 100_000, "argument-size"),
        ("a." * 30 + "b=1", "argument-size"),
    ],
)
def test_a_hostile_argument_is_refused(argument: str, code: str) -> None:
    assert [problem.code for problem in problems([argument], None)] == [code]


EXTENSIONS = {
    "extension_that_exits": ("import sys\nsys.exit(3)\n", "function-exit", "sys.exit(3)"),
    "extension_that_is_gone": ("import os\nos._exit(4)\n", "function-exit", "os._exit(4)"),
    "extension_that_raises": ("1 / 0\n", "extension-import", "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_that_exits_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, code, says = EXTENSIONS[name]
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = problems([f"extensions=[{name}]"], None)
    assert (problem.key, problem.code) == ("extensions", code)
    assert name in problem.message and says in problem.message


def test_an_extension_that_registers_nothing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "extension_without_entries.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):  # the second time it is imported already
        (note,) = load_config(["env=toy", "model.warm_start=null", "extensions=[extension_without_entries]"]).notes
        assert note.code == "extension-registers-nothing"
    assert [problem.code for problem in problems(["extensions=[os]"], None)] == ["extension-import"]


def test_a_list_of_a_thousand_wrong_items_is_reported_in_part(tmp_path: Path) -> None:
    found = problems([], {"env": {"cameras": ["a"] * 1000}})
    assert 1 <= len(found) <= 60
