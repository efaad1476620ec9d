"""``~`` in paths is the home directory: no shell expands it after ``key=``, and no directory is named so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from embodrl.config import load_config
from embodrl.config.check import model_of, section_model, shipped_schemas, with_every_section
from embodrl.errors import ConfigError

ELSEWHERE = {"rollout.remote.weights_dir"}
"""Paths of another machine."""
NO_PATHS = {"env.success_fn", "env.suite"}
WORDS = ("directory", "file of", "interpreter", "certificate chain", "private key")


@pytest.mark.parametrize("written", ["~/x y", "'~/x y'", '"~/x y"'])
def test_the_home_directory_is_expanded_with_and_without_quotes(
    written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(["env=toy", "model.warm_start=null", f"runner.output_dir={written}"]).config
    assert config.runner.output_dir == str(tmp_path / "x y")


def test_of_several_homes_only_a_sweep_is_left_to_the_parser() -> None:
    with pytest.raises(ConfigError):
        load_config(["env=toy", "runner.output_dir=~/a,~/b"])


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        inner = model_of(info.annotation)
        if inner is not None:
            yield from _paths(inner, f"{prefix}{name}.")
        elif "str" in str(info.annotation) and any(word in str(info.description) for word in WORDS):
            yield prefix + name


def test_every_setting_that_is_a_path_expands_the_home_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found: set[str] = set()
    for schema in map(with_every_section, shipped_schemas()):
        for key in set(_paths(schema)) - found - ELSEWHERE - NO_PATHS:
            found.add(key)
            section, _, name = key.rpartition(".")
            model = section_model(section, schema)
            assert model is not None
            assert getattr(model.model_validate({name: "~/x"}), name) == str(tmp_path / "x"), key
    assert found >= {
        "runner.output_dir",
        "collect.output_dir",
        "sft.output_dir",
        "model.warm_start",
        "model.model_path",
    }
