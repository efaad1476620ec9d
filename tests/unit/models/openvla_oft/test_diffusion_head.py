"""OpenVLA-OFT's diffusion head: the schedule, what a pass reads, imitation, denoising and files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from tiny_families import build, generator, observation, tiny_config
from torch import Tensor
from transformers import LlamaForCausalLM

import embodrl
from embodrl.errors import CheckpointError, ConfigError, EmbodrlError
from embodrl.models.common.checkpoint import write_json
from embodrl.models.openvla_oft.ddim import denoise, signal_levels, without_noise
from embodrl.models.openvla_oft.modeling import step_embedding
from embodrl.models.registry import build_policy
from embodrl.types import Observation, SamplingParams

FAMILY = "openvla_oft"
SMALLEST = Path(__file__).parents[4] / "benchmarks" / "smallest_run.yaml"
DIFFUSION = {"action_head": "diffusion", "use_proprio": True, "diffusion_steps": 8, "denoising_steps": 8}
SAMPLING = SamplingParams()


def made(**changes: object) -> Any:
    return build(FAMILY, **{**DIFFUSION, "add_value_head": False, **changes})


def seen(batch: int = 3) -> Observation:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, 2, 16, 16, 3), dtype=np.uint8)
    base = observation(FAMILY, batch)
    return Observation(images, rng.uniform(-1, 1, (batch, 5)).astype(np.float32), base.instruction, base.task_id)


# The schedule --------------------------------------------------------------------------------------------------------


def test_levels_of_three_steps_by_hand() -> None:
    """``f(u) = cos^2(pi/2 (u + 0.008) / 1.008)``: f(0) 0.999845, f(1/3) 0.742768, f(2/3) 0.246410, f(1) 0."""
    levels = signal_levels(3)
    assert levels[:2] == pytest.approx((0.742768 / 0.999845, 0.246410 / 0.999845), abs=2e-6)
    assert levels[2] == pytest.approx(levels[1] * 0.001)  # beta is 0.999 at most, so that some signal is left


def test_levels_of_the_public_schedule() -> None:
    """Those of diffusers' ``DDIMScheduler(num_train_timesteps=50, beta_schedule="squaredcos_cap_v2")``."""
    levels = signal_levels(50)
    assert len(levels) == 50 and list(levels) == sorted(levels, reverse=True)

    def f(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    # The product telescopes, but for the last beta, which is bounded.
    assert levels[24] == pytest.approx(f(0.5) / f(0.0)) and levels[48] == pytest.approx(f(0.98) / f(0.0))
    assert levels[49] == pytest.approx(f(0.98) / f(0.0) * 0.001)


def test_two_steps_of_denoising_by_hand() -> None:
    """Of four steps every second: at 2 and 0. The predicted actions are bounded, and the noise is not."""
    levels = signal_levels(4)
    asked: list[tuple[float, int]] = []

    def predict(noisy: Tensor, step: Tensor) -> Tensor:
        asked.append((float(noisy), int(step)))
        return torch.full_like(noisy, 0.5)

    found = denoise(predict, torch.full((1, 1, 1), 2.0), 4, 2)
    first = min(1.0, (2.0 - math.sqrt(1 - levels[2]) * 0.5) / math.sqrt(levels[2]))
    assert first == 1.0
    second = math.sqrt(levels[0]) + math.sqrt(1 - levels[0]) * 0.5
    assert asked == [(2.0, 2), (pytest.approx(second), 0)]
    last = (second - math.sqrt(1 - levels[0]) * 0.5) / math.sqrt(levels[0])
    assert float(found) == pytest.approx(last) and last == pytest.approx(1.0)


def test_a_network_that_knows_the_noise_is_denoised_to_the_action() -> None:
    action = torch.tensor([[[0.3, -0.8]]])

    def predict(noisy: Tensor, step: Tensor) -> Tensor:
        level = torch.tensor(signal_levels(50))[step]
        return (noisy - level.sqrt() * action) / (1 - level).sqrt()

    for taken in (50, 10, 1):
        torch.testing.assert_close(denoise(predict, torch.randn(1, 1, 2), 50, taken), action, rtol=0, atol=1e-3)


def test_the_step_is_embedded_by_hand() -> None:
    """Frequencies of 1, 10000^(-1/2) and 10000^-1."""
    found = step_embedding(torch.tensor([3]), 6)
    phases = [3.0, 0.03, 0.0003]
    wanted = [*(math.sin(x) for x in phases), *(math.cos(x) for x in phases)]
    torch.testing.assert_close(found, torch.tensor([wanted]))


# The network ---------------------------------------------------------------------------------------------------------


def test_the_loss_matches_the_definition() -> None:
    """The sequence put together by hand, through transformers' own attention without a causal mask."""
    policy = made()
    model = policy.model
    batch = policy.sft_inputs(seen(1), torch.linspace(-0.9, 0.9, 14).view(1, 2, 7))
    level = signal_levels(8)[int(batch["step"])]
    noisy = math.sqrt(level) * batch["target"] + math.sqrt(1 - level) * batch["noise"]
    llama = LlamaForCausalLM(model.language_model.spec.public(causal=False))
    llama.load_state_dict(model.language_model.state_dict())
    llama.config._attn_implementation = "eager"
    states = {name: dict(part.named_parameters()) for name, part in policy.parts().items()}

    def project(name: str, x: Tensor) -> Tensor:
        weights = states[name]
        inner = torch.nn.functional.gelu(x @ weights["fc1.weight"].T + weights["fc1.bias"])
        return inner @ weights["fc2.weight"].T + weights["fc2.bias"]

    with torch.no_grad():
        patches = model.projector(model.vision_backbone(policy._pixels(batch["images"])))
        state = project("proprio_projector", batch["proprio"])[:, None]
        time = step_embedding(batch["step"], 32)[:, None]
        chunk = project("noisy_action_projector", noisy.view(1, 14, 1))
        ids = batch["input_ids"][:, batch["attention_mask"][0].bool()]
        text = llama.model.embed_tokens(ids)
        stop = llama.model.embed_tokens(torch.tensor([[2]]))
        sequence = torch.cat([text[:, :1], patches, state, time, text[:, 1:], chunk, stop], dim=1)
        everything = torch.zeros(1, 1, sequence.shape[1], sequence.shape[1])
        hidden = llama.model(inputs_embeds=sequence, attention_mask=everything).last_hidden_state
        first = sequence.shape[1] - 1 - 14 - 1  # one position earlier
        found = policy.action_head.noise_predictor.mlp_resnet(hidden[:, first : first + 14].reshape(1, 2, 7 * 32))
    loss, scalars = policy.sft_loss(batch)
    torch.testing.assert_close(loss.detach(), (found - batch["noise"]).square().mean(), rtol=1e-4, atol=1e-5)
    clean = ((noisy - math.sqrt(1 - level) * found) / math.sqrt(level)).clamp(-1, 1)
    torch.testing.assert_close(scalars["l1"], (clean - batch["target"]).abs().mean(), rtol=1e-3, atol=1e-4)
    assert torch.equal(without_noise(noisy, found, torch.tensor(level)), clean)


@torch.no_grad()
def test_excluded_actions_do_not_count() -> None:
    """Of three actions that count, two are a whole row's: its loss has two thirds of the weight."""
    policy = made()
    batch = policy.sft_inputs(seen(), torch.linspace(-0.9, 0.9, 42).view(3, 2, 7))
    mask = torch.tensor([[True, True], [True, False], [False, False]])

    def loss(rows: slice, chosen: Tensor) -> Tensor:
        return policy.sft_loss({name: value[rows] for name, value in batch.items()} | {"action_mask": chosen})[0]

    first, second = (loss(slice(n, n + 1), mask[n : n + 1]) for n in (0, 1))
    torch.testing.assert_close(loss(slice(None), mask), (2 * first + second) / 3, rtol=1e-4, atol=1e-5)


def test_it_imitates() -> None:
    """The loss falls, both parts of the head learn, and the denoised chunk comes near what was shown."""
    torch.manual_seed(0)
    policy = made(diffusion_steps=4, denoising_steps=4)
    shown = torch.linspace(-0.9, 0.9, 42).view(3, 2, 7)
    rows, actions = seen().select(np.arange(24) % 3), shown.repeat(8, 1, 1)

    def distance() -> float:
        chosen = policy.predict_action_batch(seen(), "eval", SAMPLING, compute_values=False).actions
        return float(np.abs(chosen - shown.numpy()).mean())

    before = distance()
    used = [p for group in policy.trainable_groups().values() for p in group]
    assert not {id(p) for p in used} & {id(p) for p in policy.unused_parameters()}
    optimizer = torch.optim.Adam(used, 1e-2)
    losses: list[float] = []
    for _ in range(45):
        optimizer.zero_grad()
        loss, _ = policy.sft_loss(policy.sft_inputs(rows, actions))
        loss.backward()
        losses.append(float(loss.detach()))
        assert all(
            p.grad is not None
            for part in (policy.action_head, policy.noisy_action_projector)
            for p in part.parameters()
        )
        optimizer.step()
    assert np.mean(losses[-5:]) < 0.5 * losses[0], losses
    assert distance() < 0.7 * before


def test_it_acts_alike_again_and_among_others() -> None:
    policy = made(denoising_steps=3, add_value_head=True)

    def act(rows: list[int]) -> np.ndarray:
        observation = seen().select(np.array(rows))
        return policy.predict_action_batch(observation, "eval", SAMPLING, compute_values=False).actions

    together = act([0, 1, 2])
    assert together.shape == (3, 2, 7) and together.dtype == np.float32
    np.testing.assert_array_equal(act([0, 1, 2]), together)
    for row in range(3):
        np.testing.assert_allclose(act([row]), together[row : row + 1], rtol=0, atol=1e-5)
    with torch.no_grad():
        assert policy.predict_values(seen()).shape == (3, 1)


def test_it_has_no_density() -> None:
    policy = made()
    with raises_code("policy-has-no-density", EmbodrlError, "diffusion"):
        policy.predict_action_batch(seen(), "train", SAMPLING, generator())


# Files ---------------------------------------------------------------------------------------------------------------


def load(path: Path, **changes: object) -> tuple[Any, Any]:
    settings = {**DIFFUSION, "add_value_head": False, "model_path": str(path), **changes}
    return build_policy(tiny_config(FAMILY, **settings), device="cpu", dtype=torch.float32, seed=9)


def test_it_survives_saving(tmp_path: Path) -> None:
    policy = made()
    policy.save_pretrained(tmp_path / "saved")
    again, report = load(tmp_path / "saved", denoising_steps=2)
    assert report.ok and not report.initialized and not report.ignored
    before, after = policy.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    with raises_code("oft-settings", CheckpointError, "model.diffusion_steps=8"):
        load(tmp_path / "saved", diffusion_steps=9)
    for head in ("l1", "tokens"):
        with raises_code("oft-component-unused", CheckpointError, "model.action_head=diffusion"):
            load(tmp_path / "saved", action_head=head)
    (tmp_path / "saved" / "noisy_action_projector.safetensors").unlink()
    with raises_code("oft-component-unused", CheckpointError, "model.action_head=l1"):
        load(tmp_path / "saved")


def test_the_public_files_load(tmp_path: Path) -> None:
    """Pickled, under the names of finetune.py's DDP; they do not say how many steps there are."""
    policy = made()
    policy.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["embodrl"].pop("diffusion_steps") == 8
    write_json(tmp_path / "config.json", config)
    names = {"action_head": set[str](), "noisy_action_projector": set[str]()}
    for part, found in names.items():
        (tmp_path / f"{part}.safetensors").unlink()
        state = {f"module.{key}": value for key, value in getattr(policy, part).state_dict().items()}
        torch.save(state, tmp_path / f"{part}--50000_checkpoint.pt")
        found.update(state)
    assert names["noisy_action_projector"] == {f"module.fc{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")}
    assert policy.noisy_action_projector.fc1.weight.shape == (32, 1)
    stem = "module.noise_predictor.mlp_resnet"
    layers = (
        "layer_norm1",
        "fc1",
        "layer_norm2",
        "fc2",
        *(f"mlp_resnet_blocks.{b}.ffn.{i}" for b in "01" for i in "01"),
    )
    assert names["action_head"] == {f"{stem}.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    again, report = load(tmp_path, diffusion_steps=50)
    assert report.ok
    for part in names:
        mine, theirs = getattr(policy, part).state_dict(), getattr(again, part).state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    (tmp_path / "action_head--50000_checkpoint.pt").unlink()
    with raises_code("oft-component-missing", CheckpointError, "action_head"):
        load(tmp_path)


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sft_and_eval_run_it(tmp_path: Path) -> None:
    toy = ["env=toy", "env.num_processes=1", "env.cameras=[{height: 16, width: 16}]"]
    embodrl.collect([*toy, "collect.num_episodes=6", f"collect.output_dir={tmp_path / 'demos'}"])
    steps = ("model.diffusion_steps=4", "model.denoising_steps=2")
    settings = [*toy, "model=openvla_oft", "model.action_head=diffusion", *steps]
    batches = ["sft.max_steps=30", "sft.batch_size=16", "sft.lr_warmup_steps=1", "sft.lr=1e-2", "sft.log_interval=1"]
    places = [f"sft.data_dir={tmp_path / 'demos'}", f"sft.output_dir={tmp_path / 'sft'}"]
    policy = embodrl.sft(SMALLEST, [*settings, *batches, *places]).policy_dir
    rows = [json.loads(line) for line in (tmp_path / "sft" / "sft_metrics.jsonl").read_text().splitlines()]
    assert np.mean([row["loss"] for row in rows[-5:]]) < 0.7 * rows[0]["loss"]
    chosen = [*settings, f"model.model_path={policy}", "env.eval.num_episodes=2"]
    assert len(embodrl.evaluate(SMALLEST, chosen, output_dir=tmp_path / "eval").episodes) == 2


@pytest.mark.slow
@pytest.mark.parametrize("head", ["l1", "diffusion"])
def test_a_policy_of_tokens_is_fine_tuned_into_one_with_a_head(tmp_path: Path, head: str) -> None:
    toy = ["env=toy", "env.num_processes=1", "env.cameras=[{height: 16, width: 16}]", "model=openvla_oft"]
    embodrl.collect([*toy[:3], "collect.num_episodes=4", f"collect.output_dir={tmp_path / 'demos'}"])
    few = ["sft.max_steps=1", "sft.batch_size=8", "sft.lr_warmup_steps=0", f"sft.data_dir={tmp_path / 'demos'}"]
    tokens = embodrl.sft(SMALLEST, [*toy, *few, f"sft.output_dir={tmp_path / 'tokens'}"]).policy_dir
    settings = [*toy, f"model.action_head={head}", f"sft.output_dir={tmp_path / head}", f"model.model_path={tokens}"]
    with raises_code("oft-component-missing", CheckpointError, "new_components"):
        embodrl.sft(SMALLEST, [*settings, *few])
    assert not (tmp_path / head).exists()
    made = embodrl.sft(SMALLEST, [*settings, *few, "model.new_components=true"]).policy_dir
    assert (made / "action_head.safetensors").is_file()
    chosen = [*toy, f"model.action_head={head}", f"model.model_path={made}", "env.eval.num_episodes=2"]
    assert len(embodrl.evaluate(SMALLEST, chosen, output_dir=tmp_path / "eval").episodes) == 2
    with raises_code("new-components-are-trained", ConfigError):
        embodrl.evaluate(SMALLEST, [*chosen, "model.new_components=true"], output_dir=tmp_path / "again")
