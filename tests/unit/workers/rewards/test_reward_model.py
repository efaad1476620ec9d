"""`embodrl reward train`: what is held out, how models are judged, what they pay, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_files import config, episode, write
from expect import raises_code
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.config.schema import Config
from embodrl.data.load import load_demos
from embodrl.errors import CheckpointError, ConfigError, EmbodrlError, UsageError
from embodrl.models.common.observation_model import ObservationModel
from embodrl.pipelines.load import load_config
from embodrl.workers.episode import Episode
from embodrl.workers.learned_reward import LearnedReward
from embodrl.workers.reward import RewardWorker
from embodrl.workers.rewards.label import LabelSettings, label
from embodrl.workers.rewards.observe import Fitting
from embodrl.workers.rewards.reward_model import (
    RewardTraining,
    auc,
    best_threshold,
    calibration_error,
    check_reward,
    judged_successes,
    split,
    train_reward,
)

QUICK = Fitting(inputs="state", steps=150, batch_size=32, lr=1e-2, held_out=0.4)


def walk(number: int, success: bool) -> object:
    """An episode of five frames that walks from 0 to 1, or half as far."""
    made = episode(number, 5, success)
    made.state[:] = np.linspace(0, 1 if success else 0.5, 5)[:, None]
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reward") / "data"
    write(directory, "lerobot", *(walk(n, n % 2 == 0) for n in range(20)))  # type: ignore[arg-type]
    return directory


@pytest.fixture(scope="module")
def classifier(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("models") / "success"
    found = train_reward(data, output, RewardTraining(fitting=QUICK)).judged
    assert (found.episodes, found.successes) == (4, 2)  # 40 % of ten successes and ten failures, half of it
    assert found.accuracy == found.auc == 1 and found.false_positives == found.false_negatives == 0
    return output


@pytest.fixture(scope="module")
def progress(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("models") / "progress"
    result = train_reward(data, output, RewardTraining("progress", fitting=QUICK))
    assert result.threshold is None and result.judged.spearman is not None and result.judged.spearman > 0.5
    return output


def judged_episode(places: list[float], chunk: int, num_actions: int) -> Episode:
    """An episode that begins at the first place, and is at the others after its chunks."""
    states = torch.tensor(places)[:, None].repeat(1, 4)
    images = torch.zeros(len(places), 1, 16, 16, 3, dtype=torch.uint8)
    return Episode(
        rewards=torch.zeros(num_actions),
        success=False,
        finished=True,
        task="reach-red",
        frames=images[1:, 0],
        policy_version=torch.zeros(len(places) - 1),
        instruction="reach the red square",
        actions=torch.zeros(num_actions, 7),
        states=states[1:],
        images=images[1:],
        start_images=images[0],
        start_state=states[0],
    )


def test_measures_agree_with_hand_computed_values() -> None:
    scores, labels = np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, True, False, True])
    assert auc(scores, labels) == pytest.approx(3.5 / 4)  # of four pairs three are right, one is a tie
    assert auc(scores, np.ones(4, np.bool_)) is None
    # bins [0.1], [0.4, 0.4], [0.9]: gaps of 0.1, 0.1 and 0.1
    assert calibration_error(scores, labels) == pytest.approx(0.1)
    assert best_threshold(np.array([0.1, 0.2, 0.8, 0.9]), np.array([False, False, True, True])) == pytest.approx(0.5)
    assert 0.2 < best_threshold(np.array([0.1, 0.2, 0.2, 0.9]), np.array([False, False, True, True])) < 0.9


def test_no_episode_is_used_twice() -> None:
    won = np.arange(40) % 2 == 0
    calibrating, judging = split(won, Fitting(held_out=0.4), "success", "data")
    assert not (calibrating & judging).any() and calibrating.sum() == judging.sum() == 8
    assert calibrating[won].sum() == judging[won].sum() == 4
    none, all_held = split(won, Fitting(held_out=0.4), "progress", "data")
    assert not none.any() and all_held.sum() == 16
    with raises_code("reward-few-episodes", EmbodrlError):
        split(np.array([True, False] * 2), Fitting(held_out=0.4), "success", "data")


def test_the_same_seed_gives_the_same_model(data: Path, classifier: Path, tmp_path: Path) -> None:
    train_reward(data, tmp_path / "again", RewardTraining(fitting=QUICK))
    left, right = (ObservationModel.load(path) for path in (classifier, tmp_path / "again"))
    assert left.threshold == right.threshold
    assert all(tensor.equal(right.state_dict()[name]) for name, tensor in left.state_dict().items())


def test_a_classifier_pays_its_judgement_of_the_last_observation(classifier: Path) -> None:
    reward = LearnedReward(str(classifier), chunk=2)
    assert reward(judged_episode([0, 0.5, 1.0], 2, 4)) == 1.0
    assert reward(judged_episode([0, 1.0, 0.4], 2, 4)) == 0.0


def test_progress_pays_what_each_chunk_adds(progress: Path) -> None:
    reward = LearnedReward(str(progress), chunk=2)
    paid = reward(judged_episode([0, 0.25, 0.75, 1.0], 2, 5))  # the last chunk has one action
    assert isinstance(paid, torch.Tensor) and paid.shape == (5,)
    states = torch.tensor([0, 0.25, 0.75, 1.0])[:, None].repeat(1, 4).numpy()
    images = np.zeros((4, 1, 16, 16, 3), np.uint8)
    values = reward.model.judge(reward.model.inputs(images, states, ["reach the red square"] * 4))
    assert paid[[0, 2]].tolist() == [0, 0]
    torch.testing.assert_close(paid[[1, 3, 4]], values.diff())
    assert float(paid.sum()) > 0.2


def test_recorded_episodes_are_paid_as_those_of_a_run(data: Path, classifier: Path, progress: Path) -> None:
    demos = load_demos(data)
    outcomes = LearnedReward(str(classifier), 1).relabel(demos).outcomes
    assert outcomes is not None
    expected = (np.arange(100) == demos.last) & (np.array(demos.success)[demos.episode])
    np.testing.assert_array_equal(outcomes.rewards, expected)
    reward = LearnedReward(str(progress), 1)
    relabelled = reward.relabel(demos).outcomes
    assert relabelled is not None
    paid = reward(judged_episode([0, 0.25, 0.5, 0.75, 1.0], 1, 4))
    np.testing.assert_allclose(relabelled.rewards[:4], np.asarray(paid), atol=1e-6)
    assert relabelled.rewards[4] == 0  # what the last action led to is not recorded


def test_labels_take_a_reward_model(data: Path, classifier: Path, progress: Path) -> None:
    own = label(data, LabelSettings(tag="judged", reward_model=classifier, lookahead=2, fitting=QUICK))
    assert own.success_rate == 0.5
    assert judged_successes(ObservationModel.load(classifier), load_demos(data)).tolist() == [True, False] * 10
    label(data, LabelSettings(tag="progress", reward_model=progress, lookahead=2))
    saved = ObservationModel.load(data / "meta" / "value_progress")
    given = ObservationModel.load(progress)
    assert all(tensor.equal(given.state_dict()[name]) for name, tensor in saved.state_dict().items())


def judged(model: Path, *more: str) -> Config:
    return load_config(["env=toy", "env.state=full", "env.include_state=true", f"reward.model={model}", *more]).config


def test_what_a_run_refuses(classifier: Path, progress: Path, data: Path, tmp_path: Path) -> None:
    assert judged(classifier).reward.judged
    with raises_code("reward-model-can-judge", ConfigError):
        judged(tmp_path / "none")
    with raises_code("reward-model-can-judge", ConfigError):
        judged(data)
    assert judged(classifier, "runner.max_staleness=1", "rollout.own_process=true").reward.judged
    for wrong in ("env.include_state=false", "rollout.workflow='embodrl.workers.workflows.workflow:ChunkWorkflow'"):
        with raises_code("reward-model-can-judge", ConfigError):
            judged(classifier, wrong)
    with raises_code("one-reward", ConfigError):
        judged(classifier, "reward.fn='test_rewards:steps'")
    rlpd = ["env=toy", "model=mlp", "algorithm=rlpd", f"algorithm.off_policy.demos={data}"]
    with raises_code("demonstrations-have-these-rewards", ConfigError):
        load_config([*rlpd, "reward.fn='test_rewards:steps'"])
    with raises_code("reward-output", UsageError):
        train_reward(data, data, RewardTraining())
    with raises_code("reward-window", UsageError):
        train_reward(data, tmp_path / "model", RewardTraining("progress", window=2))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text('{"model_type": "pi0"}')
    with raises_code("reward-output", UsageError):  # as a policy's directory is
        train_reward(data, tmp_path / "policy", RewardTraining())


def test_a_classifier_needs_successes_to_learn_from() -> None:
    won = np.array([True, True, *[False] * 20])
    with raises_code("reward-few-episodes", EmbodrlError):
        split(won, Fitting(held_out=0.9), "success", "data")


def test_labels_are_on_the_scale_of_the_progress_model(data: Path, progress: Path) -> None:
    with raises_code("label-scale", EmbodrlError):
        label(data, LabelSettings(tag="other", reward_model=progress, failure_penalty=3.0))
    with raises_code("label-fitting", UsageError):
        label(data, LabelSettings(tag="other", reward_model=progress, fitting=QUICK))
    label(data, LabelSettings(tag="scaled", reward_model=progress))
    made, judge = (ObservationModel.load(path).facts for path in (data / "meta" / "value_scaled", progress))
    assert made["scale"] == judge["scale"] > 1 and made["fitting"] == judge["fitting"]


def test_a_run_notices_another_environment_and_another_model(classifier: Path, progress: Path) -> None:
    worker, other = (RewardWorker(config(f"reward.model={path}"), ("reach-red",)) for path in (classifier, progress))
    worker.load_state(worker.state())
    with raises_code("checkpoint-other-settings", CheckpointError):
        worker.load_state(other.state())
    from embodrl.envs.toy.env import ToyVectorEnv

    worker.check(ToyVectorEnv(1, ["reach-red"], include_state=True, full_state=True).spec)
    for tasks, full in ((["reach-green"], True), (["reach-red"], False)):
        with raises_code("reward-other-environment", EmbodrlError):
            worker.check(ToyVectorEnv(1, tasks, include_state=True, full_state=full).spec)


def test_the_commands(data: Path, tmp_path: Path) -> None:
    output, out = tmp_path / "model", tmp_path / "reward.json"
    quick = ["--inputs", "state", "--steps", "5", "--held-out", "0.4"]
    outcome = CliRunner().invoke(app, ["reward", "train", str(data), "-o", str(output), *quick, "--json", str(out)])
    assert outcome.exit_code == 0, outcome.output
    made = json.loads(out.read_text())
    assert made["trained_on"] == 12 and made["calibrated_on"] == 4 and made["judged"]["episodes"] == 4
    outcome = CliRunner().invoke(app, ["reward", "check", str(output), str(data)])
    assert outcome.exit_code == 0 and "20 episodes, 10 of them successful" in outcome.output
    assert check_reward(output, data).episodes == 20
    outcome = CliRunner().invoke(app, ["reward", "train", str(data), "-o", str(output), "--kind", "value"])
    assert outcome.exit_code == 2


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "checksums.json"])
def test_a_flipped_byte_anywhere_in_a_reward_model_is_refused_by_name(
    classifier: Path, tmp_path: Path, name: str
) -> None:
    content = (classifier / name).read_bytes()
    for at in {0, len(content) // 3, len(content) // 2, len(content) - 3}:
        copy = tmp_path / f"{at}"
        shutil.copytree(classifier, copy)
        (copy / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(EmbodrlError) as raised:
            ObservationModel.load(copy)
        assert name in str(raised.value) or raised.value.code == "file-damaged"
