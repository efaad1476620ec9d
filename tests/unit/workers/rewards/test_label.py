"""`embodrl label`: what is written beside a dataset, what a recap run reads of it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from demo_files import episode, write
from expect import raises_code
from tiny_families import build
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.data.labels import frame_numbers, read_indicator, sidecar, write_sidecar
from embodrl.data.load import load_demos
from embodrl.data.replay import EXPERT
from embodrl.errors import ConfigError, EmbodrlError, FileDamagedError
from embodrl.learners.offline.load import load_offline
from embodrl.models.common.observation_model import ObservationModel
from embodrl.pipelines.load import load_config
from embodrl.workers.rewards.label import LabelSettings, label, positive_frames
from embodrl.workers.rewards.observe import Fitting, held_out_episodes, spearman

QUICK = Fitting(inputs="state", steps=60, batch_size=32, lr=1e-2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Successes of four frames and failures of six, which the state tells apart."""
    directory = tmp_path_factory.mktemp("label") / "data"
    write(directory, "lerobot", *(episode(n % 2, 6 if n % 2 else 4, n % 2 == 0) for n in range(10)))
    return directory


def test_what_is_written(data: Path) -> None:
    result = label(data, LabelSettings(lookahead=2, positive=0.3, fitting=QUICK))
    returns, advantages = (
        pq.read_table(sidecar(data, kind, "recap")).to_pydict() for kind in ("returns", "advantages")
    )
    assert set(returns) == {"episode_index", "frame_index", "return", "reward", "done", "prompt"}
    assert returns["return"][:10] == [-3, -2, -1, 0, -11, -10, -9, -8, -7, -6]  # a failure costs the longest episode
    assert returns["reward"][8:10] == [-1, -6] and returns["done"][:5] == [False, False, False, True, False]
    assert advantages["frame_index"][:5] == [0, 1, 2, 3, 0] and advantages["episode_index"][3:5] == [0, 1]
    # Advantages follow from the values that are written, on the scale of the largest return.
    values = np.array(advantages["value_current"])
    assert values.min() >= -1 and values.max() <= 0
    assert advantages["value_next"][0] == advantages["value_current"][2] and advantages["value_next"][2] == 0
    expected = -2 / 11 + values[6] - values[4]
    assert advantages["advantage_continuous"][4] == pytest.approx(expected, abs=1e-6)
    assert advantages["num_valid_rewards"][:4] == [2, 2, 2, 1]
    positive = np.array(advantages["advantage"])
    threshold = np.percentile(advantages["advantage_continuous"], 70)
    assert (positive == (np.array(advantages["advantage_continuous"]) >= threshold - 1e-7)).all()
    assert result.positive_rate == pytest.approx(positive.mean()) and result.success_rate == 0.5
    assert result.spearman is not None and result.spearman > 0.3
    assert ObservationModel.load(data / "meta" / "value_recap").kind == "value"
    assert (read_indicator(data, "recap", load_demos(data)) == positive).all()


def test_every_task_has_its_best_share_and_corrections_are_positive(data: Path) -> None:
    """The advantages of one task are all above those of the other."""
    demos = load_demos(data)
    second = demos.episode >= 5
    acted_by = np.zeros(len(second), np.int64)
    acted_by[:3] = EXPERT
    two = replace(demos, tasks=["b"] * 5 + ["a"] * 5, acted_by=acted_by)
    advantages = torch.arange(len(second)).float()
    positive, thresholds = positive_frames(two, advantages, 0.25)
    best = np.concatenate(
        [part >= np.percentile(part, 75) for part in np.split(advantages.numpy(), [int((~second).sum())])]
    )
    assert (positive.numpy() == (best | (acted_by == EXPERT))).all() and best[~second].any()
    assert thresholds == {"a": advantages[second][best[second]].min(), "b": advantages[~second][best[~second]].min()}


def test_advantages_that_are_not_finite_are_refused(data: Path) -> None:
    advantages = torch.arange(50).float()
    advantages[7] = float("nan")
    with raises_code("label-advantages", EmbodrlError):
        positive_frames(load_demos(data), advantages, 0.25)


def test_a_run_reads_the_indicator(data: Path) -> None:
    label(data, LabelSettings(tag="other", fitting=QUICK))
    base = ["env=toy", "model=mlp", "algorithm=recap", "env.state=full", "env.cameras=[{height: 16, width: 16}]"]
    config = load_config([*base, f"algorithm.off_policy.demos={data}", "algorithm.offline.tag=other"]).config
    found, spec = load_offline(config, build("gaussian", add_value_head=False))
    assert spec is None and found.outcomes is None and found.positive is not None and len(found.positive) == 50
    assert config.model.condition == "positive"
    with raises_code("labels-are-there", ConfigError):
        load_config([*base, f"algorithm.off_policy.demos={data}", "algorithm.offline.tag=none"])


def test_labels_of_other_frames_are_refused(data: Path) -> None:
    demos = load_demos(data)
    columns = {**frame_numbers(demos), "advantage": np.ones(50, np.bool_)}
    write_sidecar(sidecar(data, "advantages", "short"), {name: column[:-1] for name, column in columns.items()})
    with raises_code("file-damaged", FileDamagedError):
        read_indicator(data, "short", demos)
    with raises_code("label-missing", EmbodrlError):
        read_indicator(data, "absent", demos)


def test_what_can_not_be_labelled_is_refused(data: Path, tmp_path: Path) -> None:
    write(tmp_path / "raw", "raw", episode(0, 3, True))
    with raises_code("label-format", EmbodrlError):
        label(tmp_path / "raw", LabelSettings())
    with raises_code("label-no-inputs", EmbodrlError):  # black pictures, and no state
        write(tmp_path / "blind", "lerobot", episode(0, 3, True, state_dim=0))
        label(tmp_path / "blind", LabelSettings(fitting=Fitting(steps=1)))


def test_the_command(data: Path, tmp_path: Path) -> None:
    arguments = ["label", str(data), "--inputs", "state", "--steps", "5", "--tag", "cli"]
    outcome = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "label.json")])
    assert outcome.exit_code == 0, outcome.output
    assert json.loads((tmp_path / "label.json").read_text())["frames"] == 50
    outcome = CliRunner().invoke(app, ["label", str(data), "--tag", "a/b"])
    assert outcome.exit_code == 2 and "label-tag" in outcome.output


def test_rank_correlations_and_held_out_episodes() -> None:
    left = np.array([1.0, 2.0, 2.0, 4.0])  # ranks 1, 2.5, 2.5, 4
    assert spearman(left, left**3) == pytest.approx(1.0) and spearman(left, -left) == pytest.approx(-1.0)
    assert spearman(left, np.array([4.0, 3.0, 2.0, 1.0])) == pytest.approx(-0.9486833)
    assert spearman(left, np.ones(4)) is None
    chosen = held_out_episodes([True] * 20 + [False], Fitting(held_out=0.1))
    assert chosen[:20].sum() == 2 and not chosen[20]
    assert not held_out_episodes([True, False], Fitting(held_out=0.0)).any()
