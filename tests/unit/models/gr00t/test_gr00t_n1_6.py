"""GR00T N1.6: its pictures beside transformers' SigLIP 2, names of the public checkpoint, and the prompt.

NVIDIA's code of it needs a GPU's attention kernels and no recording of it was available, so its parts are compared with
modules of transformers and with values by hand; the action head is that of N1.5 and N1.7, which have recordings.
"""

from __future__ import annotations

import pytest
import torch
from expect import raises_code
from gr00t_files import N1_7, sidecars
from tiny_families import build
from transformers import Siglip2VisionConfig, Siglip2VisionModel

from embodrl.errors import CheckpointError
from embodrl.models.gr00t import eagle3
from embodrl.models.gr00t.config_n1_6_n1_7 import Gr00tN16Config
from embodrl.models.gr00t.dit import TransformerSpec
from embodrl.models.gr00t.modeling import Gr00tN16Model
from embodrl.models.gr00t.qwen3_vl import VisionSpec

PUBLIC = {name: value for name, value in N1_7.items() if name != "vl_self_attention_cfg"}
PUBLIC |= {"model_type": "Gr00tN1d6", "model_name": "nvidia/Eagle-Block2A-2B-v2", "action_horizon": 50}
PUBLIC |= {"max_action_dim": 128, "max_state_dim": 128}
EAGLE = "backbone.model"


@pytest.fixture(scope="module")
def model() -> Gr00tN16Model:
    with torch.device("meta"):
        return Gr00tN16Model(Gr00tN16Config.from_dict(PUBLIC, sidecars()))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{EAGLE}.vision_model.vision_model.embeddings.patch_embedding.weight", (1152, 588)),
        (f"{EAGLE}.vision_model.vision_model.embeddings.position_embedding.weight", (256, 1152)),
        (f"{EAGLE}.vision_model.vision_model.encoder.layers.26.self_attn.out_proj.weight", (1152, 1152)),
        (f"{EAGLE}.vision_model.vision_model.post_layernorm.bias", (1152,)),
        (f"{EAGLE}.mlp1.0.weight", (4608,)),
        (f"{EAGLE}.mlp1.1.weight", (2048, 4608)),
        (f"{EAGLE}.mlp1.3.bias", (2048,)),
        (f"{EAGLE}.language_model.model.embed_tokens.weight", (151680, 2048)),
        (f"{EAGLE}.language_model.model.layers.15.mlp.down_proj.weight", (2048, 6144)),
        ("action_head.model.transformer_blocks.30.attn1.to_v.weight", (1536, 2048)),
        ("action_head.state_encoder.layer1.W", (32, 128, 1024)),
        ("action_head.action_decoder.layer2.W", (32, 1024, 128)),
        ("action_head.vlln.bias", (2048,)),
    ],
)
def test_public_name(model: Gr00tN16Model, name: str, shape: tuple[int, ...]) -> None:
    assert tuple(model.state_dict()[name].shape) == shape


def test_neither_attention_over_features_nor_future_tokens(model: Gr00tN16Model) -> None:
    names = set(model.state_dict())
    assert not any("vl_self_attention" in name or "future_tokens" in name or ".layers.27." in name for name in names)
    assert sum(p.numel() for p in model.parameters()) == 2_960_729_840
    assert model.config.head.vl == TransformerSpec(0, 0, 0) and model.config.head.text_every == 2


@pytest.mark.parametrize("side", [32, 24])
def test_the_tower_is_siglip_2(side: int) -> None:
    """Pictures of the grid that the positions were learned for, and of another."""
    spec = VisionSpec(16, 3, 2, 24, 4, 2, 64)
    tower = eagle3.Eagle3Tower(spec, pooling_head=False).eval()
    tower.init_weights(torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    config = Siglip2VisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_patches=64, patch_size=4
    )
    reference = Siglip2VisionModel(config).eval()
    reference.load_state_dict(tower.vision_model.state_dict(), strict=False)
    pixels = torch.randn(2, 3, side, side, generator=noise)
    grid = side // 4
    patches = [
        pixels[:, :, y : y + 4, x : x + 4].permute(0, 2, 3, 1).flatten(1)
        for y in range(0, side, 4)
        for x in range(0, side, 4)
    ]
    shapes = torch.tensor([[grid, grid]] * 2)
    with torch.no_grad():
        wanted = reference(torch.stack(patches, 1), torch.ones(2, grid**2, dtype=torch.long), shapes).last_hidden_state
        found = tower(pixels)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_four_patches_make_a_token() -> None:
    patches = torch.arange(2 * 16, dtype=torch.float32).reshape(1, 16, 2)  # patch p has channels 2p and 2p + 1
    tokens = eagle3.merged(patches, 4, 2)
    assert tokens.shape == (1, 4, 8)
    assert tokens[0, 0].tolist() == [0, 2, 8, 10, 1, 3, 9, 11]  # patches 0, 1, 4, 5, channel by channel
    assert tokens[0, 1].tolist() == [4, 6, 12, 14, 5, 7, 13, 15]


def test_the_prompt_has_the_instruction_before_the_images() -> None:
    processor = build("gr00t_n1_6").processor  # type: ignore[attr-defined]
    image = "<img>" + "<IMG_CONTEXT>" * 4 + "</img>"
    assert processor.chat("Push the CUBE!", 2) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\npush the cube<image 1>{image}<image 2>{image}<|im_end|>\n"
    )


def test_pictures_are_resized_to_whole_tiles() -> None:
    config = Gr00tN16Config.from_dict(PUBLIC, sidecars())
    assert (config.image_size, config.tokens_per_image, config.patches_per_image) == (252, 81, 324)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model_type": "Gr00tN1d7"}, "checkpoint-family"),
        ({"model_type": "gr00t_n1_5"}, "checkpoint-family"),
        ({"model_name": "nvidia/Cosmos-Reason2-2B"}, "checkpoint-unsupported"),
    ],
)
def test_other_versions_are_refused(changes: dict[str, object], code: str) -> None:
    with raises_code(code, CheckpointError):
        Gr00tN16Config.from_dict({**PUBLIC, **changes}, sidecars())
