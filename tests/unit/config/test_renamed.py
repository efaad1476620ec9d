"""Names of earlier versions are accepted, and noted."""

from pathlib import Path

import pytest

from embodrl.config import load_config, load_run


@pytest.mark.parametrize("argument", ["rollout=huggingface", "rollout.backend=huggingface"])
def test_a_former_name_on_the_command_line_means_the_present_one(argument: str) -> None:
    loaded = load_config(["env=toy", "model.warm_start=null", argument])
    assert loaded.config.rollout.backend == "native"
    notes = [note for note in loaded.notes if note.code == "renamed"]
    assert len(notes) == 1 and "native" in notes[0].hint and "command line" in notes[0].origin


def test_a_run_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(load_config(["env=toy"]).to_yaml().replace("  backend: native", "  backend: huggingface", 1))
    text = path.read_text()
    assert "backend: huggingface" in text
    assert load_run(path).config.rollout.backend == "native"
    assert "renamed" in [note.code for note in load_run(path).notes]
