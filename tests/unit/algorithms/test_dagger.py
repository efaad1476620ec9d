"""Who acts while an expert labels, and what of it is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code

from embodrl.algorithms.dagger import beta_of, dagger, distance
from embodrl.config import load_config
from embodrl.config.load import load_run
from embodrl.config.schema import DaggerConfig
from embodrl.data.replay import MAX_WORDS, ReplayBuffer, decode_words, encode_words, labelled_frames
from embodrl.errors import ConfigError, EmbodrlError, EnvTimeout
from embodrl.trainer.files import export_policy
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.corrector import ExpertCorrector
from embodrl.workers.experts import ScriptedExperts, load_experts
from embodrl.workers.policy import build_policy

B = 4


def test_the_expert_acts_less_and_less() -> None:
    assert [beta_of(0.8, 0.5, version) for version in range(3)] == [0.8, 0.4, 0.2]


def test_the_distance_of_chunks_is_their_root_mean_square() -> None:
    labels = np.zeros((2, 1, 2), np.float32)
    np.testing.assert_allclose(distance(np.array([[[3, 4]], [[0, 0]]], np.float32), labels), [12.5**0.5, 0])


def test_the_expert_keeps_control_for_some_steps() -> None:
    held = np.array([0, 2, 1, 0])
    held = dagger(np.array([True, False, False, False]), held, 3)
    assert held.tolist() == [3, 1, 0, 0]
    assert dagger(np.zeros(4, np.bool_), held, 3).tolist() == [2, 0, 0, 0]


class Pool:
    """Experts whose action is a constant."""

    spec = SimpleNamespace(num_envs=B)

    def __init__(self) -> None:
        self.started: list[list[int]] = []
        self.fault: Exception | None = None

    def expert_reset(self, rows: np.ndarray) -> None:
        self.started.append(rows.tolist())

    def expert_actions(self) -> np.ndarray:
        if self.fault is not None:
            raise self.fault
        return np.full((B, 2), 0.5, np.float32)


def seen() -> Observation:
    images = np.arange(B * 12, dtype=np.uint8).reshape(B, 1, 2, 2, 3)
    return Observation(images, np.ones((B, 3), np.float32), ["push it"] * B, np.zeros(B, np.int32))


def output(version: int = 0) -> PolicyOutput:
    actions = np.zeros((B, 1, 2), np.float32)
    actions[1] = 0.5  # as the expert
    return PolicyOutput(actions, torch.zeros(B, 1, 2), None, {}, version)


def corrector(**settings: Any) -> tuple[ExpertCorrector, Pool]:
    pool = Pool()
    experts = ScriptedExperts(pool)  # pyright: ignore[reportArgumentType]
    result = ExpertCorrector(DaggerConfig(**settings), experts, B)
    result.begin(np.arange(B))
    assert pool.started == [[0, 1, 2, 3]]
    return result, pool


def test_everything_is_labelled_whoever_acts() -> None:
    experts, _ = corrector(beta=1.0, beta_decay=0.0)
    first, columns = experts.correct(seen(), output(version=0))
    assert (first.actions == 0.5).all() and (columns["source"] == 1).all() and columns["chosen"].all()
    later, columns = experts.correct(seen(), output(version=1))
    assert (later.actions[0] == 0).all() and (columns["source"] == 0).all() and columns["chosen"].all()
    assert (columns["labels"] == 0.5).all()
    half, _ = corrector(beta=0.5)
    acts = torch.stack([half.correct(seen(), output())[1]["source"] for _ in range(100)])
    assert 0.4 < acts.float().mean() < 0.6
    again, _ = corrector(beta=0.5)
    assert torch.equal(acts, torch.stack([again.correct(seen(), output())[1]["source"] for _ in range(100)]))


def test_a_gate_hands_over_and_labels_only_then() -> None:
    experts, _ = corrector(gate_threshold=0.3, gate_steps=2)
    close = PolicyOutput(np.full((B, 1, 2), 0.4, np.float32), torch.zeros(B, 1, 2), None, {})
    rows: list[list[bool]] = []
    for each in (output(), close, close):
        corrected, columns = experts.correct(seen(), each)
        assert torch.equal(columns["chosen"], columns["source"] == 1)
        assert ((corrected.actions == 0.5).all((1, 2)) | ~columns["chosen"].numpy()).all()
        rows.append(columns["chosen"].tolist())
    assert rows == [[True, False, True, True], [True, False, True, True], [False] * 4]


def test_a_lost_process_gives_no_labels() -> None:
    experts, pool = corrector()
    pool.fault = EnvTimeout("gone", "wait", code="env-timeout")
    corrected, columns = experts.correct(seen(), output())
    assert not columns["chosen"].any() and np.array_equal(corrected.actions, output().actions)
    pool.fault = None
    experts.after(SimpleNamespace(done=np.array([True, False, False, True])))  # pyright: ignore[reportArgumentType]
    assert pool.started[-1] == [0, 3] and experts.correct(seen(), output())[1]["chosen"].all()


class Rollout(dict[str, Any]):
    """Two steps; the second chunk of environment 1 was lost."""

    valid = torch.ones(2, B, 1, dtype=torch.bool)
    valid[1, 1] = False


def test_labels_are_stored_with_what_was_seen() -> None:
    experts, _ = corrector(gate_threshold=0.3)
    steps = [experts.correct(seen(), output())[1] for _ in range(2)]
    batch = Rollout(expert={name: torch.stack([step[name] for step in steps]) for name in steps[0]})
    batch.valid[1, 0] = False
    frames = labelled_frames(batch)  # pyright: ignore[reportArgumentType]
    store = ReplayBuffer(100, 10**9)
    store.add_frames(frames)
    assert len(store) == store.stored == 5  # environments 0, 2 and 3, less the lost one
    found = store.inputs(torch.tensor([0, 1]))
    assert torch.equal(found["images"], torch.from_numpy(seen().images[[0, 2]]))
    assert decode_words(found["words"].numpy()) == ["push it", "push it"]


def test_words_survive_and_long_ones_are_refused() -> None:
    words = ["pick up the cube", "", "schön"]
    assert decode_words(encode_words(words)) == words
    with raises_code("instruction-too-long"):
        encode_words(["x" * (MAX_WORDS + 1)])


def test_a_policy_labels_in_place_of_a_scripted_expert(tmp_path: Path) -> None:
    loaded = load_config(["env=toy", "model=mlp", "runner.seed=3"])
    teacher = build_policy(loaded.config, torch.device("cpu"))
    teacher.seen_state_dim = 3
    export_policy(teacher, tmp_path / "policy", loaded.config)
    settings = ["env=toy", "model=cnn", "algorithm=dagger", f"algorithm.dagger.expert={tmp_path / 'policy'}"]
    experts = load_experts(load_config(settings).config)
    observation = seen()
    labels = experts.actions(observation)
    expected = teacher.predict(observation.images, observation.instruction, observation.state)
    np.testing.assert_array_equal(labels, expected[:, 0])
    corrector = ExpertCorrector(DaggerConfig(beta=0.0), experts, B)
    corrector.begin(np.arange(B))
    small = replace(output(), actions=np.zeros((B, 1, labels.shape[1]), np.float32))
    _, columns = corrector.correct(observation, small)
    np.testing.assert_array_equal(columns["labels"].numpy()[:, 0], labels)
    with raises_code("expert-state", EmbodrlError):
        experts.actions(replace(observation, state=np.ones((B, 4), np.float32)))
    (tmp_path / "config.yaml").write_text(load_config(settings).to_yaml())
    (tmp_path / "policy").rename(tmp_path / "elsewhere")
    assert load_run(tmp_path / "config.yaml", verb="eval", resuming=True)
    with raises_code("dagger-expert-exists"):  # before a resumed run starts its simulators
        load_run(tmp_path / "config.yaml", verb="train", resuming=True)


@pytest.mark.parametrize(
    "others",
    [
        ["algorithm=hil_serl", "algorithm.off_policy.intervention_device=keyboard"],
        ["algorithm=hil_serl", "store.url={tmp}/store"],
    ],
)
def test_a_policy_that_nobody_asks_is_refused(others: list[str], tmp_path: Path) -> None:
    settings = ["env=toy", "model=mlp", *(text.format(tmp=tmp_path) for text in others)]
    with pytest.raises(ConfigError) as caught:
        load_config([*settings, f"algorithm.dagger.expert={tmp_path}"], verb="train")
    (found,) = [problem for problem in caught.value.problems if problem.key == "algorithm.dagger.expert"]
    assert "no effect" in found.message
    with pytest.raises(ConfigError) as caught:
        load_config(["env=toy", "model=mlp", "algorithm.dagger.expert=x"], verb="store")
    assert "setting-of-another-verb" in {problem.code for problem in caught.value.problems}


def test_a_policy_may_be_the_expert_where_no_script_is(tmp_path: Path) -> None:
    settings = ["env=gymnasium", "model=mlp", "algorithm=dagger"]
    for more, refused in ([], True), ([f"algorithm.dagger.expert={tmp_path}"], False):  # which is no policy, either
        with pytest.raises(ConfigError) as caught:
            load_config([*settings, *more], verb="train")
        assert ("experts-show-the-tasks" in {problem.code for problem in caught.value.problems}) == refused
