"""GR00T as a policy, beyond what every policy promises: robots, cameras, files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file

from embodrl.config.schema import ValueHeadConfig
from embodrl.errors import CheckpointError, EmbodrlError, HubError
from embodrl.hub import HubName
from embodrl.models.flow import fetched_tokenizer as hub
from embodrl.models.flow.flow_spec import FlowConfig, SiglipConfig
from embodrl.models.gr00t import build as gr00t_build
from embodrl.models.gr00t.policy import Gr00tPolicy
from embodrl.models.gr00t.spec import Gr00tArchitectureConfig, Gr00tModelConfig
from embodrl.models.load_report import LoadReport
from embodrl.models.registry import build_policy
from embodrl.types import Observation, SamplingParams

ARCHITECTURE = Gr00tArchitectureConfig(
    image_size=16,
    patch_size=8,
    siglip=SiglipConfig(width=16, depth=2, num_heads=2, mlp_dim=24),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    dit_num_layers=3,
    dit_num_heads=2,
    dit_head_dim=10,
    dit_output_dim=12,
    vl_num_layers=1,
    vl_num_heads=4,
    vl_head_dim=8,
    max_state_dim=6,
    action_horizon=4,
    num_future_tokens=2,
)
TEXTS = ("push the cube to the goal", "pick up the small red cube and lift it over the box", "pull")
SAMPLING = SamplingParams()
EMBEDDING, LM_HEAD = gr00t_build.EMBEDDING, gr00t_build.LM_HEAD


def build_with_report(seed: int = 3, method: str = "flow_sde", **changes) -> tuple[Gr00tPolicy, LoadReport]:
    options = {"warm_start": None, "gr00t": ARCHITECTURE, "num_action_chunks": 2, **changes}
    config = Gr00tModelConfig(model_type="gr00t", flow=FlowConfig(method=method, num_steps=3), **options)
    policy, report = build_policy(config, device="cpu", dtype=torch.float32, seed=seed)
    assert isinstance(policy, Gr00tPolicy)
    return policy, report


def build(**changes) -> Gr00tPolicy:
    """Return a policy without zeros that would hide errors behind them."""
    policy = build_with_report(**changes)[0]
    noise = generator(7)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
    return policy


def observation(batch: int = 3, cameras: int = 1, state_dim: int = 5) -> Observation:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, cameras, 16, 16, 3), dtype=np.uint8)
    texts = [TEXTS[i % len(TEXTS)] for i in range(batch)]
    return Observation(images, rng.random((batch, state_dim), np.float32), texts, np.zeros(batch, np.int32))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def policy() -> Gr00tPolicy:
    return build()


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise"])
@pytest.mark.parametrize("value", [ValueHeadConfig(), ValueHeadConfig(input="suffix", output="action")])
def test_training_reproduces_the_rollout_row_by_row(method, value):
    policy = build(method=method, value_head=value)
    seen = observation(cameras=2)
    rollout = policy.predict_action_batch(seen, "train", SAMPLING, generator())
    assert rollout.actions.shape == rollout.logprobs.shape == (3, 2, 7)
    assert rollout.values.shape == (3, 2 if value.output == "action" else 1)
    again = policy.evaluate_actions(rollout.forward_inputs, SAMPLING)
    close(again.logprobs, rollout.logprobs)
    close(again.values, rollout.values)
    for row in range(3):
        inputs = {name: tensor[row : row + 1] for name, tensor in rollout.forward_inputs.items()}
        alone = policy.evaluate_actions(inputs, SAMPLING)
        close(alone.logprobs, rollout.logprobs[row : row + 1])
        close(alone.values, rollout.values[row : row + 1])
    halves = [{n: torch.cat([t[1:], t[:1]]) for n, t in rollout.forward_inputs.items()}]
    close(policy.evaluate_actions(halves[0], SAMPLING).logprobs.roll(1, dims=0), rollout.logprobs)


def test_values_read_images_prompt_and_state_without_padding(policy):
    """The mean over real tokens of each row, computed one row at a time without padding, and the state's token."""
    inputs = policy.preprocess(observation())
    with torch.no_grad():
        features = policy.prefix_features(policy.encode(inputs))
        for row in range(3):
            one = {name: value[row : row + 1] for name, value in inputs.items()}
            context = policy.encode(one)
            assert context.mask is None
            close(features[row, :32], context.features[0].mean(dim=0))
            close(features[row, 32:], context.state[0, 0])
    assert features.shape == (3, 32 + 20)


def test_cameras_are_reported_apart(policy):
    inputs = policy.preprocess(observation(1, cameras=2))
    with torch.no_grad():
        one = policy.encode(inputs).features
        two = policy.encode({**inputs, "images": inputs["images"].flip(1)}).features
    assert (one - two).abs().max() > 1e-3


def test_training_times_are_those_of_the_public_recipe(policy):
    """t = (s - b) / s for b from Beta(1.5, 1), so 1 - t has the mean 0.6 / 0.999 and the median 2^(-2/3) / 0.999."""
    torch.manual_seed(0)
    tau = policy.training_times(20000).double()
    assert tau.dtype == torch.float64 and tau.min() > 0 and tau.max() <= 1 / 0.999
    assert abs(tau.mean() - 0.6 / 0.999) < 0.01
    assert abs(tau.median() - 0.5 ** (2 / 3) / 0.999) < 0.01


def test_the_loss_counts_real_action_dimensions(policy):
    assert (policy.padded_action_dim, policy.loss_action_dims()) == (8, 7)
    actions = torch.rand(3, 4, 7, generator=generator()) * 2 - 1
    batch = policy.sft_inputs(observation(), actions)
    close(batch["target"][..., :7], actions)
    assert not batch["target"][..., 7].any()
    with torch.no_grad():
        x = batch["tau"][:, None, None] * batch["noise"] + (1 - batch["tau"][:, None, None]) * batch["target"]
        v, _ = policy.velocity(policy.encode(batch))(x, batch["tau"])
        loss, _ = policy.sft_loss(batch)
        close(loss, (v - (batch["noise"] - batch["target"]))[..., :7].square().mean())
        assert not torch.isclose(loss, (v - (batch["noise"] - batch["target"])).square().mean(), atol=1e-4)


def test_only_the_encoder_of_the_robot_gets_gradients():
    policy = build()
    inputs = policy.predict_action_batch(observation(), "train", SAMPLING, generator()).forward_inputs
    policy.evaluate_actions(inputs, SAMPLING).logprobs.sum().backward()
    used = policy.model.action_head.state_encoder.layer1.W.grad
    assert used[policy.embodiment].abs().max() > 0 and not used[1 - policy.embodiment].any()


def test_the_head_is_the_last_layer_of_the_decoder():
    policy = build(trainable="head", add_value_head=False)
    names = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert names == {f"model.action_head.action_decoder.layer2.{name}" for name in ("W", "b")}


@pytest.mark.long  # 150 updates
def test_imitation_learns_one_batch():
    """After it, sampling in the direction of data gives the actions that were shown."""
    wider = ARCHITECTURE.model_copy(update={"dit_num_heads": 4, "dit_head_dim": 16, "dit_output_dim": 32})
    policy = build_with_report(gr00t=wider)[0]
    torch.manual_seed(0)
    actions = torch.tensor([[-0.5, 0.0, 0.5, 1.0, -1.0, 0.25, 0.75]]).repeat(8, 4, 1)
    optimizer = torch.optim.Adam([p for group in policy.trainable_groups().values() for p in group], 3e-3)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss, _ = policy.sft_loss(policy.sft_inputs(observation(8), actions))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
    found = policy.predict_action_batch(observation(), "eval", SAMPLING).actions
    assert np.abs(found - actions[:3, :2].numpy()).mean() < 0.25


def test_the_files_are_those_of_the_public_layout(tmp_path):
    build(method="flow_noise").save_pretrained(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "experiment_cfg/metadata.json"),
        *("value_head.safetensors", "noise_head.safetensors"),
    }


def test_heads_that_are_not_wanted_are_reported(tmp_path):
    build(method="flow_noise").save_pretrained(tmp_path / "saved")
    _, report = build_with_report(warm_start=str(tmp_path / "saved"), add_value_head=False)
    assert set(report.ignored) == {"value_head.safetensors", "noise_head.safetensors"} and report.ok


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def rewrite(directory: Path, change) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


def test_tied_embeddings_are_found_under_either_name(saved):
    plain = load_file(saved / "model.safetensors")[EMBEDDING]
    rewrite(saved, lambda w: w.update({LM_HEAD: w.pop(EMBEDDING)}))
    policy, report = build_with_report(warm_start=str(saved))
    assert report.aliased == {LM_HEAD: EMBEDDING} and not policy.unused_parameters()
    assert torch.equal(policy.model.state_dict()[EMBEDDING], plain)


def test_what_nothing_runs_is_kept(saved, tmp_path):
    """The public checkpoint has an output layer and a pooling head; they load, do not train and are saved again."""
    head = "backbone.eagle_model.vision_model.vision_model.head"
    shapes = {
        "probe": (1, 1, 16),
        "attention.in_proj_weight": (48, 16),
        "attention.in_proj_bias": (48,),
        "attention.out_proj.weight": (16, 16),
        "attention.out_proj.bias": (16,),
        "layernorm.weight": (16,),
        "layernorm.bias": (16,),
        "mlp.fc1.weight": (24, 16),
        "mlp.fc1.bias": (24,),
        "mlp.fc2.weight": (16, 24),
        "mlp.fc2.bias": (16,),
    }

    def add(weights: dict[str, torch.Tensor]) -> None:
        weights[LM_HEAD] = weights[EMBEDDING] + 1
        weights.update({f"{head}.{name}": torch.rand(shape) for name, shape in shapes.items()})

    before = build_with_report(warm_start=str(saved))[0].predict_action_batch(observation(), "eval", SAMPLING).actions
    rewrite(saved, add)
    policy, report = build_with_report(warm_start=str(saved))
    assert report.ok and not report.aliased
    assert len(policy.unused_parameters()) == 12
    assert not any(parameter.requires_grad for parameter in policy.unused_parameters())
    assert np.array_equal(policy.predict_action_batch(observation(), "eval", SAMPLING).actions, before)
    policy.save_pretrained(tmp_path / "again")
    first, second = (load_file(path / "model.safetensors") for path in (saved, tmp_path / "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_unfit_weights_are_refused(saved):
    lost = "action_head.model.proj_out_1.bias"
    rewrite(saved, lambda w: (w.pop(lost), w.update({"action_head.extra": torch.zeros(1), LM_HEAD: torch.zeros(2, 2)})))
    with raises_code("weights-mismatch", CheckpointError) as caught:
        build_with_report(warm_start=str(saved))
    for part in (f"missing: {lost}", "unexpected: action_head.extra", f"{LM_HEAD} \\(2, 2\\) instead of"):
        assert part.replace("\\", "") in caught.value.message


def test_unfit_configurations_are_refused(saved):
    bigger = ARCHITECTURE.model_copy(update={"hidden_size": 64, "vl_head_dim": 16})
    with raises_code("warm-start-size", CheckpointError, "qwen.hidden_size", "32", "64"):
        build_with_report(warm_start=str(saved), gr00t=bigger)
    with raises_code("statistics-size", CheckpointError, "7", "6"):
        build_with_report(warm_start=str(saved), action_dim=6)
    with raises_code("statistics-missing", CheckpointError, "'gr1'", "new_embodiment"):
        build_with_report(model_path=str(saved), unnorm_key="gr1")
    with raises_code("action-horizon", EmbodrlError, "4", "5"):
        build_with_report(model_path=str(saved), num_action_chunks=5)
    (saved / "experiment_cfg" / "metadata.json").unlink()
    with raises_code("policy-file", CheckpointError, "metadata.json"):
        build_with_report(model_path=str(saved))
    with raises_code("policy-not-found", CheckpointError):
        build_with_report(warm_start=str(saved.parent))


def test_a_robot_of_the_checkpoint_is_chosen(saved):
    """Statistics un-normalise actions and normalise states, and the robot has its own encoders."""
    metadata = {
        "gr1": {
            "statistics": {
                "action": {"arm": {"min": [0.0] * 6, "max": [4.0] * 6}, "hand": {"min": [1.0], "max": [1.0]}},
                "state": {"arm": {"min": [-1.0] * 5, "max": [1.0] * 5}},
            }
        },
        "new_embodiment": {"statistics": {"action": {"all": {"min": [-1.0] * 7, "max": [1.0] * 7}}}},
    }
    (saved / "experiment_cfg" / "metadata.json").write_text(json.dumps(metadata))
    raw = json.loads((saved / "config.json").read_text())
    raw["embodrl"]["embodiment_ids"] = {"gr1": 1, "new_embodiment": 1}
    (saved / "config.json").write_text(json.dumps(raw))
    runs = []
    for name in ("gr1", "new_embodiment"):
        policy, _ = build_with_report(model_path=str(saved), unnorm_key=name, add_value_head=False)
        runs.append(policy.predict_action_batch(observation(), "eval", SAMPLING, compute_values=False).actions)
    np.testing.assert_allclose(runs[0][..., :6], 2 * (runs[1][..., :6] + 1), atol=1e-5)
    np.testing.assert_allclose(runs[0][..., 6], 1.0)
    raw["embodrl"]["embodiment_ids"]["gr1"] = 0
    (saved / "config.json").write_text(json.dumps(raw))
    policy, _ = build_with_report(model_path=str(saved), unnorm_key="gr1", add_value_head=False)
    other = policy.predict_action_batch(observation(), "eval", SAMPLING, compute_values=False).actions
    assert np.abs(other - runs[0]).max() > 1e-2


def test_a_checkpoint_without_tokenizer_takes_the_public_one(saved, tmp_path, monkeypatch):
    """NVIDIA's checkpoint has no tokenizer files."""
    (tmp_path / "eagle").mkdir()
    (saved / "tokenizer.json").rename(tmp_path / "eagle" / "tokenizer.json")
    asked = []

    def fetch(name: HubName, patterns: Sequence[str]) -> Path:
        asked.append(name.repository)
        assert "merges.txt" in patterns and not any("safetensors" in part for part in patterns)
        if len(asked) > 1:
            raise HubError("no network")
        return tmp_path / "eagle"

    monkeypatch.setattr(hub, "fetch", fetch)
    policy, _ = build_with_report(model_path=str(saved))
    assert asked == [gr00t_build.EAGLE_TOKENIZER]
    assert policy.processor.tokenizer.encode("<img>") == [642]
    with raises_code("hub", CheckpointError) as caught:
        build_with_report(model_path=str(saved))
    assert "merges.txt" in caught.value.hint


def test_keys_of_a_robot_are_saved_with_the_policy(tmp_path: Path):
    arm, gripper = ({"min": [low] * n, "max": [low + 4.0] * n} for low, n in ((-2.0, 6), (0.0, 1)))
    build().save_pretrained(tmp_path / "first")
    metadata = {"libero_franka": {"statistics": {"action": {"gripper": gripper, "arm": arm}, "state": {}}}}
    (tmp_path / "first" / "experiment_cfg" / "metadata.json").write_text(json.dumps(metadata))
    raw = json.loads((tmp_path / "first" / "config.json").read_text())
    raw["embodrl"] |= {"embodiment_ids": {"libero_franka": 1}, "keys": {}}
    (tmp_path / "first" / "config.json").write_text(json.dumps(raw))
    with raises_code("gr00t-keys", CheckpointError, "'x'", "gripper", "arm"):  # RLinf's keys are others
        build_with_report(warm_start=str(tmp_path / "first"))
    chosen = {"gr00t": ARCHITECTURE.model_copy(update={"action_keys": ("arm", "gripper:binary")})}
    policy, report = build_with_report(warm_start=str(tmp_path / "first"), **chosen)
    assert report.conventions["keys of libero_franka"] == "settings model.gr00t.action_keys and state_keys"
    policy.save_pretrained(tmp_path / "second")
    again, report = build_with_report(warm_start=str(tmp_path / "second"))
    assert report.conventions["keys of libero_franka"] == "config.json"
    np.testing.assert_allclose(again.stats.unnormalize(np.full((1, 7), 0.75)), [[*([1.5] * 6), 1.0]])
