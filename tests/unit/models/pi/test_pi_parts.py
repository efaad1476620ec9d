"""The parts of pi0 and pi0.5 against other implementations and numbers worked out by hand; and the full size."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GemmaConfig, SiglipVisionConfig
from transformers import GemmaModel as ReferenceGemma
from transformers import SiglipVisionModel as ReferenceSiglip

from embodrl.models.common.attention import attention
from embodrl.models.common.images import resize_with_pad
from embodrl.models.common.patches import SiglipSpec
from embodrl.models.flow.gemma import AdaptiveRMSNorm, GemmaModel, GemmaRMSNorm, GemmaSpec, rotary, rotate
from embodrl.models.flow.siglip import SiglipTower
from embodrl.models.flow.time_embedding import time_embedding
from embodrl.models.openpi.config import PUBLIC, PiConfig
from embodrl.models.pi.modeling import PiModel

SIGLIP = SiglipSpec(image_size=28, patch_size=14, width=32, depth=2, num_heads=2, mlp_dim=48)
GEMMA = GemmaSpec(width=24, depth=2, mlp_dim=40, num_heads=4, num_kv_heads=2, head_dim=8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randomize(module: nn.Module, scale: float = 0.3) -> None:
    noise = generator(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise) * scale)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu"])
def test_siglip_is_the_one_of_transformers(activation: str):
    ours = SiglipTower(SIGLIP)
    randomize(ours)
    settings = {"image_size": 28, "patch_size": 14, "hidden_size": 32, "intermediate_size": 48}
    config = SiglipVisionConfig(
        **settings, num_hidden_layers=2, num_attention_heads=2, hidden_act=activation, vision_use_head=False
    )
    reference = ReferenceSiglip(config).eval()
    names = reference.state_dict()
    level = "" if any(name.startswith("vision_model.") for name in names) else "vision_model."
    reference.load_state_dict({name.removeprefix(level): value for name, value in ours.state_dict().items()})
    pixels = torch.randn(2, 3, 28, 28, generator=generator())
    error = (ours(pixels) - reference(pixels).last_hidden_state).abs().max()
    assert error < 1e-5 if activation == "gelu_pytorch_tanh" else error > 1e-5


@torch.no_grad()
def test_gemma_is_the_one_of_transformers():
    """Grouped heads, rotary positions, norms with 1 + weight, and keys and values kept from a first part."""
    ours = GemmaModel(GEMMA, vocab_size=30)
    randomize(ours)
    reference = ReferenceGemma(
        GemmaConfig(
            vocab_size=30,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    ).eval()
    reference.load_state_dict(ours.state_dict())
    ids = torch.randint(0, 30, (2, 7), generator=generator())
    wanted = reference(input_ids=ids).last_hidden_state
    x, rope = ours.embed(ids), rotary(torch.arange(7)[None], 8, torch.float32)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    cache, last = ours.encode(x, rope, causal)
    assert len(cache) == 2 and cache[0][0].shape == (2, 2, 7, 8)
    torch.testing.assert_close(ours.finish(last, rope, causal), wanted, rtol=0, atol=1e-5)
    head, tail = (tuple(part[:, :, side] for part in rope) for side in (slice(0, 4), slice(4, 7)))
    known, _ = ours.encode(x[:, :4], head, causal[:4, :4])
    found = ours.decode(x[:, 4:], tail, known, causal[4:])
    torch.testing.assert_close(found, wanted[:, 4:], rtol=0, atol=1e-5)
    extended, _ = ours.encode(x[:, 4:], tail, causal[4:], known)
    for new, whole in zip(extended, cache, strict=True):
        torch.testing.assert_close(new[0], whole[0], rtol=0, atol=1e-5)


def test_rotation_by_hand():
    # Position 1, E = 4: angles 1 and 1/100; coordinate 0 turns with 2, 1 with 3.
    turned = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4), rotary(torch.ones(1, 1), 4, torch.float32))
    c, s, d, u = math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)
    wanted = torch.tensor([c - 3 * s, 2 * d - 4 * u, 3 * c + s, 4 * d + 2 * u])
    torch.testing.assert_close(turned.flatten(), wanted, rtol=0, atol=1e-6)


def test_norms_by_hand():
    x = torch.tensor([[[3.0, 4.0]]])  # mean square 12.5
    plain = GemmaRMSNorm(2)
    plain.weight.data = torch.tensor([1.0, -0.5])
    root = math.sqrt(12.5)
    torch.testing.assert_close(plain(x)[0], torch.tensor([[[6 / root, 2 / root]]]))
    assert plain(x)[1] is None
    adaptive = AdaptiveRMSNorm(2, 1)
    adaptive.dense.weight.data = torch.tensor([[1.0], [0.0], [0.0], [2.0], [0.5], [0.0]])
    adaptive.dense.bias.data = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 1.0])
    normed, gate = adaptive(x, torch.tensor([[2.0]]))  # scale (2, 0), shift (.1, 4), gate (1, 1)
    torch.testing.assert_close(normed, torch.tensor([[[9 / root + 0.1, 4 / root + 4.0]]]))
    torch.testing.assert_close(gate, torch.tensor([[[1.0, 1.0]]]))


def test_time_embedding_by_hand():
    found = time_embedding(torch.tensor([0.3, 1.0]), 6)
    periods = [4e-3, math.sqrt(4e-3 * 4.0), 4.0]
    for row, tau in enumerate((float(torch.tensor(0.3)), 1.0)):
        phases = [2 * math.pi * tau / period for period in periods]
        wanted = [math.sin(p) for p in phases] + [math.cos(p) for p in phases]
        np.testing.assert_allclose(found[row].numpy(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads_on_cpu(masked: bool):
    q, k, v = (torch.randn(2, h, s, 8, generator=generator(h)) for h, s in ((4, 5), (2, 7), (2, 7)))
    mask = torch.rand(2, 1, 5, 7, generator=generator()) < 0.7 if masked else None
    if mask is not None:
        mask[..., 0] = True
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, mask), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(48, 64), (37, 100), (50, 37), (64, 64), (480, 640), (30, 30), (33, 64)])
def test_black_bars(shape: tuple[int, int]):
    images = np.random.default_rng(0).integers(1, 256, (2, *shape, 3), dtype=np.uint8)
    found = resize_with_pad(torch.from_numpy(images), 64, 64).numpy()
    ratio = max(shape[0], shape[1]) / 64
    height, width = int(shape[0] / ratio), int(shape[1] / ratio)
    for image, result in zip(images, found, strict=True):
        canvas = Image.new("RGB", (64, 64), 0)
        inner = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
        canvas.paste(inner, (int((64 - width) / 2), int((64 - height) / 2)))
        np.testing.assert_array_equal(result, np.asarray(canvas))


# Full size ------------------------------------------------------------------------------------------------------------


def full(config: PiConfig) -> PiModel:
    with torch.device("meta"):
        return PiModel(config)


def gemma_parameters(width: int, mlp: int, norm: int) -> int:
    attention_size = 2 * width * 8 * 256 + 2 * width * 256
    return 18 * (attention_size + 3 * width * mlp + 2 * norm) + norm


@pytest.mark.parametrize(("config", "billions"), [(PUBLIC["pi0"], 3.24), (PUBLIC["pi05"], 3.35)])
def test_full_size_takes_no_memory(config: PiConfig, billions: float):
    model = full(config)
    assert all(parameter.is_meta for parameter in model.parameters()) and not list(model.buffers())
    total = sum(parameter.numel() for parameter in model.parameters())
    vision = 3 * 14 * 14 * 1152 + 1152 + 256 * 1152 + 2 * 1152
    vision += 27 * (4 * (1152 * 1152 + 1152) + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152)
    language = 257152 * 2048 + gemma_parameters(2048, 16384, 2048) + 1152 * 2048 + 2048
    adaptive = config.variant == "pi05"
    expert = gemma_parameters(1024, 4096, 3 * 1024 * 1025 if adaptive else 1024)
    heads = 32 * 1024 + 1024 + 1024 * 32 + 32
    heads += 2 * (1024 * 1024 + 1024) if adaptive else 3 * 1024 * 1024 + 2 * 1024 + 32 * 1024 + 1024
    assert total == vision + language + expert + heads
    assert total / 1e9 == pytest.approx(billions, abs=0.1)


def test_names_are_openpis():
    vlm, expert = "paligemma_with_expert.paligemma.model", "paligemma_with_expert.gemma_expert.model"
    tower = f"{vlm}.vision_tower.vision_model"
    common = {
        f"{tower}.embeddings.patch_embedding.weight": (1152, 3, 14, 14),
        f"{tower}.embeddings.position_embedding.weight": (256, 1152),
        f"{tower}.encoder.layers.26.self_attn.out_proj.bias": (1152,),
        f"{tower}.encoder.layers.0.mlp.fc1.weight": (4304, 1152),
        f"{tower}.post_layernorm.weight": (1152,),
        f"{vlm}.multi_modal_projector.linear.weight": (2048, 1152),
        f"{vlm}.language_model.embed_tokens.weight": (257152, 2048),
        f"{vlm}.language_model.layers.17.self_attn.k_proj.weight": (256, 2048),
        f"{vlm}.language_model.norm.weight": (2048,),
        f"{expert}.layers.17.self_attn.q_proj.weight": (2048, 1024),
        f"{expert}.layers.0.mlp.down_proj.weight": (1024, 4096),
        "action_in_proj.weight": (1024, 32),
        "action_out_proj.bias": (32,),
    }
    own = {
        "pi0": {
            f"{expert}.norm.weight": (1024,),
            "state_proj.weight": (1024, 32),
            "action_time_mlp_in.weight": (1024, 2048),
            "action_time_mlp_out.bias": (1024,),
        },
        "pi05": {
            f"{expert}.norm.dense.weight": (3072, 1024),
            f"{expert}.layers.3.input_layernorm.dense.bias": (3072,),
            "time_mlp_in.weight": (1024, 1024),
            "time_mlp_out.bias": (1024,),
        },
    }
    shapes = {c.variant: {n: tuple(v.shape) for n, v in full(c).state_dict().items()} for c in PUBLIC.values()}
    for variant, found in shapes.items():
        assert {name: found.get(name) for name in {**common, **own[variant]}} == {**common, **own[variant]}
    assert not set(own["pi0"]) & set(shapes["pi05"]) and not set(own["pi05"]) & set(shapes["pi0"])


# Random weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_random_weights_listen_to_everything(variant: str):
    """Noise level, state, picture and prompt reach the first velocities; and no layer starts dead."""
    config = PiConfig(variant, SIGLIP, GEMMA, GEMMA, 30, max_action_dim=5, action_horizon=3, num_images=1)
    model = PiModel(config)
    model.init_weights(generator())
    inputs = {
        "pixels": torch.rand(1, 1, 3, 28, 28, generator=generator()) * 2 - 1,
        "ids": torch.tensor([[1, 5, 9]]),
        "prompt_mask": torch.ones(1, 3, dtype=torch.bool),
        "state": torch.ones(1, 5),
    }
    x, tau = torch.randn(1, 3, 5, generator=generator(1)), torch.tensor([0.5])

    def velocity(tau: Tensor = tau, **changes: Tensor) -> Tensor:
        return model.velocity(model.encode(**{**inputs, **changes}), x, tau)[0]

    first = velocity()
    assert 1e-3 < float(first.detach().std()) < 0.5
    others = {"tau": torch.tensor([0.9]), "ids": torch.tensor([[1, 6, 9]]), "pixels": -inputs["pixels"]}
    others |= {"state": -inputs["state"]} if variant == "pi0" else {}
    for name, value in others.items():
        assert (velocity(**{name: value}) - first).abs().max() > 1e-5, name
    first.square().sum().backward()
    dead = [n for n, p in model.named_parameters() if p.grad is not None and not bool(p.grad.any())]
    assert not dead


def test_without_antialiasing_as_lerobot():
    """torch's interpolation, as lerobot calls it; only the rounding to whole levels is added."""
    images = np.random.default_rng(3).integers(0, 256, (2, 90, 128, 3), dtype=np.uint8)
    found = resize_with_pad(torch.from_numpy(images), 64, 64, antialias=False)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    inner = torch.nn.functional.interpolate(
        pixels, size=(45, 64), mode="bilinear", align_corners=False, antialias=False
    )
    wanted = torch.nn.functional.pad(inner, (0, 0, 9, 10)).permute(0, 2, 3, 1)
    assert (found.float() - wanted).abs().max() <= 0.5
    assert (found.float() - resize_with_pad(torch.from_numpy(images), 64, 64).float()).abs().mean() > 5
