"""Labels of scripts/make_readme_figures.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from make_readme_figures import run_file, run_label


def test_runs_are_labelled_by_their_directory_and_records_by_their_name(tmp_path: Path) -> None:
    (tmp_path / "ppo-a").mkdir()
    assert run_file(str(tmp_path / "ppo-a")) == tmp_path / "ppo-a" / "metrics.jsonl"
    assert run_label(run_file(str(tmp_path / "ppo-a"))) == "ppo-a"
    assert run_label(tmp_path / "push_cube_seed_0.jsonl") == "push_cube_seed_0"
