"""Rewards of LeRobot datasets that other software wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expect import raises_code

from embodrl.data.load import load_demos
from embodrl.errors import EmbodrlError
from embodrl.learners.replay import check_rewards, no_rewards, with_data
from embodrl.pipelines.load import load_config

pytest.importorskip("pyarrow")
from lerobot_files import LENGTH, build

LAST = np.arange(LENGTH) == LENGTH - 1


def dataset(root: Path, **more: np.ndarray) -> Path:
    def add(columns: dict[str, Any]) -> None:
        columns.update({f"next.{name}": values for name, values in more.items()})

    def describe(info: dict[str, Any]) -> None:
        kinds = {f"next.{name}": str(values.dtype) for name, values in more.items()}
        info["features"].update({name: {"dtype": kind, "shape": [1]} for name, kind in kinds.items()})

    return build(root, columns=add, info=describe)


@pytest.mark.parametrize(
    ("more", "terminated", "success"),
    [
        ({"done": LAST}, LAST, None),
        ({"done": LAST, "truncated": LAST}, LAST & False, None),
        ({"done": LAST, "success": LAST}, LAST, True),
        ({"done": LAST, "success": LAST & False}, LAST & False, False),
        ({"terminated": LAST, "success": LAST & False}, LAST, False),
    ],
)
def test_transitions_are_made_of_what_there_is(
    tmp_path: Path, more: dict[str, np.ndarray], terminated: np.ndarray, success: bool | None
) -> None:
    demos = load_demos(dataset(tmp_path / "d", reward=LAST.astype(np.float32), **more))
    assert demos.outcomes is not None and list(demos.success) == [success] * 2
    np.testing.assert_array_equal(demos.outcomes.executed, demos.actions)
    np.testing.assert_array_equal(demos.outcomes.rewards, np.tile(LAST, 2))
    np.testing.assert_array_equal(demos.outcomes.terminated, np.tile(terminated, 2))
    run = load_config(["env=toy", "model=mlp", "env.state=full", "env.include_state=true"], verb="collect").config
    check_rewards(tmp_path / "d", run)


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    path = dataset(tmp_path / "d", reward=LAST.astype(np.float32))
    assert load_demos(path).outcomes is None
    with raises_code("demos-no-rewards", EmbodrlError, "no column next.terminated or next.done", "action, next.reward"):
        raise no_rewards(str(path))


def test_rewards_that_are_no_numbers_do_not_matter_to_imitation(tmp_path: Path) -> None:
    demos = load_demos(dataset(tmp_path / "d", reward=np.full(LENGTH, np.nan, np.float32), done=LAST))
    assert demos.outcomes is None and len(demos.actions) == 2 * LENGTH


def test_offline_learning_reads_features_under_other_names(tmp_path: Path) -> None:
    given = ["env=toy", "model=mlp", "env.state=full", "algorithm=iql", f"algorithm.off_policy.demos={tmp_path}"]
    config = load_config([*given, "sft.keys={action: actions}", "sft.check_robot=false"], None, "train").config
    read = with_data(config, "there")
    assert (read.sft.data_dir, read.sft.keys, read.sft.check_robot) == ("there", {"action": "actions"}, False)
    loaded = load_config(["env=toy", "model=mlp", "env.state=full", "sft.keys={action: actions}"], None, "train")
    assert [note.key for note in loaded.notes if note.code == "layout-of-data-that-is-not-read"] == ["sft.keys"]
