"""Runs whose graph has the name of an algorithm, as graphs once had."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from embodrl.config import load_config
from embodrl.config.load import load_run


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_the_loss_says_the_graph_of_a_run_that_names_its_algorithm(tmp_path: Path, name: str) -> None:
    whole = yaml.safe_load(load_config(["env=toy", "model=mlp"]).to_yaml())
    whole["pipeline"]["name"] = name
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    loaded = load_run(tmp_path / "config.yaml", resuming=True)
    assert loaded.config.pipeline.name is None
    assert [note.code for note in loaded.notes] == ["pipeline-renamed"]
