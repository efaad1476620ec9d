import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from toy_policy import ToyPolicy

from embodrl.config import load_config
from embodrl.config.schema import (
    ActorConfig,
    CameraConfig,
    Config,
    EnvConfig,
    ModelConfig,
    OptimConfig,
    SftConfig,
)
from embodrl.data.batch import Batch
from embodrl.data.demos import DemoEpisode, Demos
from embodrl.data.imitation import (
    DatasetBatches,
    FrameBatches,
    MixedBatches,
    check_demos,
    check_mixed_facts,
    hold_out,
    load_further_demos,
    shift_images,
)
from embodrl.data.raw import RawWriter, load_raw
from embodrl.errors import EmbodrlError
from embodrl.fields import Fields
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.learners.imitation import HeldOut, engine_config, learning_rate
from embodrl.learners.imitation_update import ImitationUpdate
from embodrl.runs import sft as verb
from embodrl.runs.sft import sft
from embodrl.specs import LOSSES
from embodrl.trainer import imitation_parts
from embodrl.trainer.files import offline_lines
from embodrl.trainer.imitation_parts import step_text


def demos(num_frames: int) -> Demos:
    images = np.zeros((num_frames, 1, 4, 4, 3), np.uint8)
    images[:, 0, 0, 0, 0] = np.arange(num_frames)
    half = num_frames // 2
    episode = (np.arange(num_frames) >= half).astype(np.int64)
    last = np.where(episode == 0, half - 1, num_frames - 1)
    actions = np.arange(num_frames, dtype=np.float32)[:, None]
    return Demos(images, 10 * actions, actions, episode, last, ["first", "second"], episode, ["a", "b"])


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine():
    settings = SftConfig(lr=0.8, lr_warmup_steps=4, max_steps=12)
    assert [learning_rate(settings, step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert learning_rate(settings, 6) == pytest.approx(0.4 * (1 + math.sqrt(0.5)))  # a quarter of the way: 45 degrees
    assert learning_rate(settings, 8) == pytest.approx(0.4)
    assert learning_rate(settings, 12) == pytest.approx(0.0)
    assert learning_rate(SftConfig(lr=0.8, lr_warmup_steps=0, max_steps=2), 0) == pytest.approx(0.8)


def test_shifted_pictures_repeat_their_edges():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 2, 5, 6, 3)).astype(np.uint8)
    shifted = shift_images(images, 1, np.random.default_rng(1))
    assert shifted.shape == images.shape and shifted.dtype == np.uint8
    seen = set()
    for before, after in zip(images, shifted, strict=True):
        found = [
            (dy, dx)
            for dy in (-1, 0, 1)
            for dx in (-1, 0, 1)
            if (after == before[:, np.clip(np.arange(5) + dy, 0, 4)][:, :, np.clip(np.arange(6) + dx, 0, 5)]).all()
        ]
        assert len(found) == 1  # both cameras by the same way
        seen.add(found[0])
    assert len(seen) == 9
    assert shift_images(images, 0, rng) is images


def test_every_frame_is_seen_once_an_epoch():
    stream = FrameBatches(demos(12), SftConfig(batch_size=4), 2, seed=0)
    epochs = []
    for _ in range(2):
        frames = []
        for _ in range(3):
            observation, actions, inside = stream.next()
            which = observation.images[:, 0, 0, 0, 0]
            assert actions.shape == (4, 2, 1) and inside.shape == (4, 2)
            np.testing.assert_array_equal(actions[:, 0, 0].numpy(), which)
            assert observation.instruction == ["first" if frame < 6 else "second" for frame in which]
            np.testing.assert_array_equal(inside[:, 1].numpy(), ~np.isin(which, [5, 11]))
            frames += which.tolist()
        assert sorted(frames) == list(range(12))
        epochs.append(frames)
    assert epochs[0] != epochs[1]


def test_a_batch_may_be_larger_than_the_data_and_the_seed_decides():
    settings = SftConfig(batch_size=10)
    first = FrameBatches(demos(4), settings, 1, seed=3).next()[1].numpy()
    np.testing.assert_array_equal(first, FrameBatches(demos(4), settings, 1, seed=3).next()[1].numpy())
    assert not np.array_equal(first, FrameBatches(demos(4), settings, 1, seed=4).next()[1].numpy())
    assert np.bincount(first[:, 0, 0].astype(int)).tolist().count(0) == 0


@pytest.mark.parametrize("include_state", [False, True])
def test_the_state_is_that_of_the_frame_and_only_given_if_wanted(include_state):
    stream = FrameBatches(demos(12), SftConfig(batch_size=12), 1, seed=0, include_state=include_state)
    observation, actions, _ = stream.next()
    assert observation.state.dtype == np.float32
    np.testing.assert_array_equal(observation.state, 10 * actions[:, 0].numpy() if include_state else np.zeros((12, 0)))


def config(action_dim: int = 1, include_state: bool = False, cameras: int = 1) -> Config:
    views = tuple(CameraConfig(name=f"camera {i}") for i in range(cameras))
    env = EnvConfig(include_state=include_state, cameras=views)
    return Config(env=env, model=ModelConfig(action_dim=action_dim))


def test_demonstrations_of_this_robot_pass():
    check_demos(demos(4), config())
    check_demos(demos(4), config(include_state=True))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"action_dim": 7}, "sft-action-dim"),
        ({"cameras": 2}, "sft-num-cameras"),
        ({"include_state": True}, "sft-no-state"),
    ],
)
def test_demonstrations_of_another_robot_are_refused(changes, code):
    found = demos(4)
    found.state = found.state[:, :0]
    with raises_code(code):
        check_demos(found, config(**changes))


def test_a_stream_that_is_restored_continues_bit_exactly():
    settings = SftConfig(batch_size=5, random_shift_px=1)
    stream = FrameBatches(demos(12), settings, 2, seed=0)
    for _ in range(3):
        stream.next()
    saved = stream.state()
    expected = [stream.next() for _ in range(4)]
    other = FrameBatches(demos(12), settings, 2, seed=7)
    other.load_state(*saved)
    for observation, actions, inside in expected:
        found = other.next()
        np.testing.assert_array_equal(found[0].images, observation.images)
        assert found[1].equal(actions) and found[2].equal(inside)


def mixed(weights: tuple[float, ...] | None, seed: int = 0, batch_size: int = 8) -> MixedBatches:
    """Twelve frames, of which the first four are one dataset and the others another."""
    settings = SftConfig(batch_size=batch_size, further_data=("other",), data_weights=weights)
    return MixedBatches(demos(12), [4, 8], settings, 1, seed)


@pytest.mark.parametrize(("weights", "share"), [((3.0, 1.0), 0.75), ((0.5, 0.5), 0.5), (None, 1 / 3)])
def test_datasets_are_drawn_by_weight_and_each_is_shuffled_by_itself(weights, share):
    stream = mixed(weights)
    drawn = np.concatenate([stream.next()[1][:, 0, 0].numpy() for _ in range(300)]).astype(int)
    first = drawn < 4
    assert first.mean() == pytest.approx(share, abs=0.04)  # three standard deviations of 2400 draws: 0.03
    for members, size in ((drawn[first], 4), (drawn[~first], 8)):
        whole = members[: len(members) // size * size].reshape(-1, size)
        assert (np.sort(whole, axis=1) == whole.min() + np.arange(size)).all(), "each frame once per epoch"
    assert min(np.bincount(first.reshape(-1, 8).sum(axis=1), minlength=9)[3:6]) > 0, "mixed within batches"


def test_a_mixture_that_is_restored_continues_bit_exactly():
    stream = mixed((0.7, 0.3))
    for _ in range(5):
        stream.next()
    saved = stream.state()
    expected = [stream.next()[1] for _ in range(6)]
    again = mixed((0.7, 0.3), seed=7)
    again.load_state(*saved)
    assert all(again.next()[1].equal(actions) for actions in expected)
    assert not mixed((0.7, 0.3), seed=1).next()[1].equal(mixed((0.7, 0.3)).next()[1])


def written(directory: Path, action_dim: int = 2, state_dim: int = 3, side: int = 8, cameras: int = 1) -> Path:
    """A dataset of one episode of two frames."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (2, cameras, side, side, 3)).astype(np.uint8)
    state, actions = np.zeros((2, state_dim), np.float32), np.zeros((2, action_dim), np.float32)
    with RawWriter(directory) as writer:
        writer.add(DemoEpisode(images, state, actions, "do it", "task", 0, True))
        writer.close({})
    return directory


@pytest.mark.parametrize(
    ("other", "says"),
    [({"action_dim": 3}, "action dimensions: 3, not 2"), ({"state_dim": 1}, "state dimensions: 1, not 3"),
     ({"cameras": 2}, "cameras: 2, not 1")],
)  # fmt: skip
def test_datasets_that_do_not_agree_are_not_mixed(other: dict[str, int], says: str, tmp_path: Path):
    first, second = written(tmp_path / "first"), written(tmp_path / "second", **other)
    chosen = config(action_dim=2, include_state=True).model_copy(
        update={"sft": SftConfig(data_dir=str(first), further_data=(str(second),))}
    )
    with raises_code("sft-data-differ", EmbodrlError, says):
        check_mixed_facts(chosen)
    same = written(tmp_path / "same")
    check_mixed_facts(chosen.model_copy(update={"sft": SftConfig(data_dir=str(first), further_data=(str(same),))}))


def test_images_of_another_size_are_not_mixed(tmp_path: Path):
    large = written(tmp_path / "large", side=16)
    chosen = config(action_dim=2, include_state=True)
    settings = SftConfig(data_dir=str(written(tmp_path / "first")), further_data=(str(large),), check_robot=False)
    with raises_code("sft-data-differ", EmbodrlError, "images"):
        load_further_demos(chosen.model_copy(update={"sft": settings}), load_raw(tmp_path / "first"))


@pytest.mark.parametrize("memory_gb", [1e-9, 3e-6])
def test_datasets_on_disk_give_the_batches_of_those_in_memory(memory_gb: float, tmp_path: Path):
    """Two episodes of 384 bytes each, one of which is held out, and one of 384: 768, 384, then 768 and 384 joined."""
    first, second = tmp_path / "first", tmp_path / "second"
    rng = np.random.default_rng(0)
    for directory, count in ((first, 2), (second, 1)):
        with RawWriter(directory) as writer:
            for number in range(count):
                images = rng.integers(0, 255, (2, 1, 8, 8, 3)).astype(np.uint8)
                actions = rng.normal(size=(2, 2)).astype(np.float32)
                writer.add(DemoEpisode(images, actions, actions, f"do {number}", "task", 0, True))
            writer.close({})
    settings = SftConfig(data_dir=str(first), further_data=(str(second),), val_episodes=1, batch_size=3)
    settings = settings.model_copy(update={"data_weights": (1.0, 2.0), "random_shift_px": 1})
    chosen = config(action_dim=2, include_state=True)
    streams, held_out, lines = [], [], ([], [])
    for limit, told in zip((None, memory_gb), lines, strict=True):
        one = chosen.model_copy(update={"sft": settings.model_copy(update={"memory_gb": limit})})
        joined, sizes, apart = verb.load_data(one, tmp_path, told.append)
        assert sizes == [2, 2] and apart is not None
        streams.append(MixedBatches(joined, sizes, one.sft, 2, 5, True))
        held_out.append(apart)
    assert not any("on disk" in line for line in lines[0])
    assert sum("on disk" in line for line in lines[1]) == (4 if memory_gb == 1e-9 else 0)
    for _ in range(8):
        (seen, actions, inside), (found, others, mask) = (stream.next() for stream in streams)
        np.testing.assert_array_equal(seen.images, found.images)
        assert actions.equal(others) and inside.equal(mask) and seen.instruction == found.instruction
    assert streams[0].demos.checksum == streams[1].demos.checksum and held_out[0].checksum == held_out[1].checksum


def test_memory_of_images_is_a_setting_of_imitation():
    assert load_config(["env=toy", "sft.memory_gb=2"], verb="sft").config.sft.memory_gb == 2
    with raises_code("setting-of-another-verb", EmbodrlError, "sft.memory_gb"):
        load_config(["env=toy", "sft.memory_gb=2"], verb="train")


def test_a_stream_of_other_demonstrations_is_not_continued():
    saved = FrameBatches(demos(40), SftConfig(batch_size=3), 1, seed=0)
    saved.next()
    with raises_code("sft-other-demonstrations"):
        FrameBatches(demos(4), SftConfig(batch_size=3), 1, seed=0).load_state(*saved.state())


def test_a_dataset_that_was_replaced_is_not_continued(caplog):
    """As large as it was: only its content tells."""
    settings = SftConfig(batch_size=3)
    stream = DatasetBatches(demos(12), settings, 1, seed=0)
    stream.next()
    saved = stream.state()
    again = DatasetBatches(demos(12), settings, 1, seed=0)
    again.load_state(*saved)
    assert again.next()[1].equal(stream.next()[1])
    replaced = demos(12)
    replaced.actions = replaced.actions + 0.01
    for other in (replaced, demos(40)):
        with raises_code("sft-other-demonstrations"):
            DatasetBatches(other, settings, 1, seed=0).load_state(*saved)
    assert not caplog.records
    DatasetBatches(demos(12), settings, 1, seed=0).load_state(saved[0]["rng"], saved[1])
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_step_is_adamw_on_the_weighted_loss_and_leaves_the_value_head_alone():
    policy, twin = ToyPolicy(), ToyPolicy()
    twin.load_state_dict(policy.state_dict())
    settings = OptimConfig(lr=0.01, weight_decay=0.1)
    actor = ActorConfig(precision="fp32", micro_batch_size=2, global_batch_size=6, optim=settings)
    engine = NativeTrainEngine(policy, EngineOptions(actor, 10), "cpu")
    update = ImitationUpdate(engine, Config())
    generator = torch.Generator().manual_seed(3)
    parameters = [p for name, part in twin.parts().items() if name != "value_head" for p in part.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=settings.betas)
    for _ in range(3):
        inputs = {
            "features": torch.randn(6, 6, generator=generator),
            "tokens": torch.randint(7, (6, 2, 3), generator=generator),
            "action_mask": torch.rand(6, 2, generator=generator) < 0.7,
        }
        metrics = update.step(Batch(inputs), 0.01, 0.0)
        update.complete()
        loss, _ = twin.sft_loss(inputs)  # of the whole batch at once
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
        adamw.step()
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(policy.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    assert engine.version == 3


def test_fine_tuning_that_fails_at_its_start_leaves_no_directory(tmp_path):
    output = tmp_path / "out"
    settings = [f"sft.data_dir={tmp_path / 'missing'}", f"sft.output_dir={output}", "runner.logger.console=off"]
    with raises_code("dataset-missing"):
        sft(load_config(["env=toy", "model.warm_start=null", *settings]))
    assert not output.exists()
    output.mkdir()
    (output / "mine.txt").write_text("kept")
    with raises_code("dataset-missing"):
        sft(load_config(["env=toy", "model.warm_start=null", *settings]))
    assert (output / "mine.txt").read_text() == "kept"


def test_a_decoding_that_the_policy_lacks_is_refused_before_the_first_step(tmp_path, monkeypatch):
    policy = ToyPolicy()
    monkeypatch.setattr(ToyPolicy, "decodings", ("greedy",))
    for name in ("check_mixed_facts", "check_range", "check_instructions"):
        monkeypatch.setattr(verb, name, lambda *_: None)
    monkeypatch.setattr(verb, "load_checked_demos", lambda *_: demos(8))
    monkeypatch.setattr(verb, "policy_with_statistics", lambda config, *_: (config, policy))
    monkeypatch.setattr(imitation_parts, "start_engine", lambda *_: pytest.fail("it has started"))
    settings = [
        "env.eval.decoding=sampled",
        f"sft.data_dir={tmp_path}",
        f"sft.output_dir={tmp_path / 'out'}",
        "runner.logger.console=off",
    ]
    with raises_code("policy-has-no-decoding"):
        sft(load_config(["env=toy", "model.warm_start=null", *settings]))


def whole(num_episodes: int) -> Demos:
    """Return episodes of three frames each, whose actions are the numbers of their frames."""
    count = 3 * num_episodes
    columns = {
        "images": np.zeros((count, 1, 4, 4, 3), np.uint8),
        "state": np.zeros((count, 0), np.float32),
        "actions": np.arange(count, dtype=np.float32)[:, None],
    }
    return Demos.of_episodes(columns, [3] * num_episodes, ["go"] * num_episodes, ["task"] * num_episodes)


def test_the_last_episodes_are_held_out_and_never_trained_on() -> None:
    settings = SftConfig(val_episodes=2, batch_size=4)
    trained, held_out = hold_out(whole(5), settings)
    assert held_out is not None and (trained.num_episodes, held_out.num_episodes) == (3, 2)
    stream = FrameBatches(trained, settings, 2, seed=0)
    seen = {float(action) for _ in range(20) for action in stream.next()[1].flatten()}
    assert seen == set(range(9)) and held_out.actions[:, 0].tolist() == list(range(9, 15))
    assert held_out.last.tolist() == [2, 2, 2, 5, 5, 5]
    assert hold_out(whole(5), SftConfig())[1] is None
    with raises_code("sft-val-episodes"):
        hold_out(whole(2), settings)


def test_the_held_out_loss_is_that_of_all_its_frames_and_disturbs_no_random_state(monkeypatch) -> None:
    policy = ToyPolicy()
    generator = torch.Generator().manual_seed(1)
    inputs = {"features": torch.randn(6, 6, generator=generator), "tokens": torch.zeros(6, 2, 3, dtype=torch.long)}
    drawn: list[float] = []

    def sft_inputs(observation: Any, actions: torch.Tensor) -> dict[str, torch.Tensor]:
        drawn.append(float(torch.rand(())))
        rows = actions[:, 0, 0].long()
        return {name: tensor[rows] for name, tensor in inputs.items()}

    monkeypatch.setattr(policy, "sft_inputs", sft_inputs)
    monkeypatch.setattr(ToyPolicy, "action_horizon", 2, raising=False)
    run = config().model_copy(
        update={"sft": SftConfig(batch_size=4), "actor": ActorConfig(precision="fp32", own_process=False)}
    )
    engine: Any = SimpleNamespace(fetch=lambda: None)
    measure = HeldOut(run, policy, engine, whole(2))
    torch.manual_seed(7)
    expected_next = torch.rand(())
    torch.manual_seed(7)
    first, again = measure(), measure()
    assert torch.rand(()) == expected_next and first == again and drawn[:2] == drawn[2:]
    mask = torch.tensor([[True, True], [True, True], [True, False]] * 2)
    loss, _ = policy.sft_loss({**inputs, "action_mask": mask}, run.sft.label_smoothing_bins)
    assert first["sft/val_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


def test_the_line_of_a_step_has_the_rate_and_the_held_out_loss() -> None:
    row = {"loss": 0.25, "l1": 0.5, "grad_norm": 1.0, "lr": 3.94e-4, "sft/val_loss": 0.75}
    assert step_text(row) == "loss 0.250 held-out loss 0.750 l1 0.500 grad_norm 1.000 lr 3.9e-04"


def test_what_follows_imitation_is_named() -> None:
    simulated = load_config(["env=toy", "model.warm_start=null"], verb="sft").config
    assert verb.next_lines(simulated, Path("out"))[0] == "next: embodrl eval out"
    mere_data = simulated.model_copy(update={"env": simulated.env.model_copy(update={"env_type": "dataset"})})
    lines = " ".join(verb.next_lines(mere_data, Path("out")))
    assert "embodrl data check data/demos --policy out/policy" in lines and "embodrl serve out" in lines
    assert "embodrl eval" not in lines and "--held-out" not in lines
    holding = mere_data.model_copy(update={"sft": SftConfig(val_episodes=2)})
    assert verb.next_lines(holding, Path("out"))[0].endswith("--policy out/policy --held-out")


def test_an_offline_run_of_weights_and_biases_is_named() -> None:
    given = load_config(["env=toy", "model.warm_start=null"]).config
    assert offline_lines(given, Path("out")) == []
    logger = given.runner.logger.model_copy(update={"wandb_mode": "offline"})
    offline = given.model_copy(update={"runner": given.runner.model_copy(update={"logger": logger})})
    [line] = offline_lines(offline, Path("my runs/a"))
    assert "wandb sync 'my runs/a/wandb'/offline-run-*" in line


def test_imitation_has_no_critics_of_an_off_policy_algorithm() -> None:
    loaded = load_config(["env=toy", "model=mlp", "algorithm=sac"], verb="sft")
    algorithm = engine_config(loaded.config, torch.device("cpu")).algorithm
    assert not LOSSES.entry(algorithm.loss_type).off_policy and algorithm.adv_type != "none"


def test_settings_of_evaluations_are_noted_where_there_are_none() -> None:
    keys = {note.key for note in load_config(["env=toy", "runner.eval_async=true"], verb="sft").notes}
    assert "runner.eval_async" in keys
    asked = ["env=toy", "runner.eval_async=true", "sft.eval_interval=5"]
    assert "runner.eval_async" not in {note.key for note in load_config(asked, verb="sft").notes}


def test_a_dataset_that_was_replaced_is_found_before_anything_is_built(monkeypatch, tmp_path):
    stream = DatasetBatches(demos(12), SftConfig(batch_size=3), 1, seed=0)
    state = Fields({"data_rng": stream.state()[0]}, "state.json")
    monkeypatch.setattr(verb, "prepare_imitation", lambda session: None)
    monkeypatch.setattr(verb, "load_checked_demos", lambda *_: demos(40))
    monkeypatch.setattr(verb, "_bring_up", lambda *parts: pytest.fail("it was built"))
    session: Any = SimpleNamespace(config=config(), directory=tmp_path, checkpoint=SimpleNamespace(state=state))
    with raises_code("sft-other-demonstrations"):
        verb.work(session)
