"""Offload between phases does not change a run."""

import pytest
from runs import TINY, embodrl, metrics

pytestmark = pytest.mark.slow


def test_a_run_is_the_same_with_offload_and_without(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(TINY)
    rows = {}
    for setting in ("true", "false"):
        run = tmp_path / setting
        outcome = embodrl("train", "--config", config, f"runner.output_dir={run}", f"actor.enable_offload={setting}")
        assert outcome.code == 0, outcome.stderr
        rows[setting] = metrics(run)
    moved = [{name: row.pop(name) for name in list(row) if name.startswith("memory/")} for row in rows["true"]]
    assert rows["true"] == rows["false"] and len(moved) == 5
    assert all(m["memory/before_offload_mib"] > m["memory/after_offload_mib"] == 0 for m in moved[1:])
