"""Names and shapes of the public 7B checkpoint, on the meta device; configurations that are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from expect import raises_code

from embodrl.errors import CheckpointError, UnknownNameError
from embodrl.models.common.init import sincos_2d
from embodrl.models.common.vit import VisionTransformer, VitSpec
from embodrl.models.openvla.config import OpenVLAConfig
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.models.registry import SupportedModel

PUBLIC = {
    "model_type": "openvla",
    "vision_backbone_id": "dinosiglip-vit-so-224px",
    "llm_backbone_id": "llama2-7b-pure",
    "arch_specifier": "no-align+fused-gelu-mlp",
    "image_resize_strategy": "resize-naive",
    "use_fused_vision_backbone": True,
    "pad_token_id": 32000,
    "pad_to_multiple_of": 64,
    "n_action_bins": 256,
    "text_config": {"model_type": "llama", "vocab_size": 32064},
}


PARAMETERS_7B = 7_541_237_184


@pytest.fixture(scope="module", params=["openvla", "openvla_oft"])
def shapes(request) -> dict[str, tuple[int, ...]]:
    """OpenVLA-OFT has the same weights; only its attention is not causal."""
    with torch.device("meta"):
        model = OpenVLAModel(OpenVLAConfig.from_dict(PUBLIC), causal=request.param == "openvla")
    assert all(value.is_meta for value in model.state_dict().values())  # nothing is allocated
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def public_names() -> set[str]:
    """The names in the index of openvla-7b's shards, spelt out by their rule."""

    def both(*modules: str) -> list[str]:
        return [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]

    block = both("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    tower = ["pos_embed", *both("patch_embed.proj", "norm")]
    dino = [*tower, "cls_token", "reg_token"]
    dino += [f"blocks.{i}.{n}" for i in range(24) for n in (*block, "ls1.scale_factor", "ls2.scale_factor")]
    pool = ["latent", *both("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")]
    siglip = [*tower, *(f"attn_pool.{n}" for n in pool), *(f"blocks.{i}.{n}" for i in range(27) for n in block)]
    layer = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    llama = [f"model.layers.{i}.{n}.weight" for i in range(32) for n in layer]
    llama += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    return {
        *(f"vision_backbone.featurizer.{n}" for n in dino),
        *(f"vision_backbone.fused_featurizer.{n}" for n in siglip),
        *(f"projector.{n}" for n in both("fc1", "fc2", "fc3")),
        *(f"language_model.{n}" for n in llama),
    }


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vision_backbone.featurizer.cls_token", (1, 1, 1024)),
        ("vision_backbone.featurizer.reg_token", (1, 4, 1024)),
        ("vision_backbone.featurizer.pos_embed", (1, 256, 1024)),
        ("vision_backbone.featurizer.patch_embed.proj.weight", (1024, 3, 14, 14)),
        ("vision_backbone.featurizer.blocks.23.ls2.scale_factor", (1024,)),
        ("vision_backbone.featurizer.blocks.23.mlp.fc1.weight", (4096, 1024)),
        ("vision_backbone.fused_featurizer.pos_embed", (1, 256, 1152)),
        ("vision_backbone.fused_featurizer.blocks.26.attn.qkv.bias", (3456,)),
        ("vision_backbone.fused_featurizer.blocks.26.mlp.fc2.weight", (1152, 4304)),
        ("vision_backbone.fused_featurizer.attn_pool.latent", (1, 1, 1152)),
        ("vision_backbone.fused_featurizer.attn_pool.kv.weight", (2304, 1152)),
        ("vision_backbone.fused_featurizer.norm.weight", (1152,)),
        ("projector.fc1.weight", (8704, 2176)),
        ("projector.fc2.weight", (4096, 8704)),
        ("projector.fc3.bias", (4096,)),
        ("language_model.model.embed_tokens.weight", (32064, 4096)),
        ("language_model.model.layers.31.mlp.down_proj.weight", (4096, 11008)),
        ("language_model.model.norm.weight", (4096,)),
        ("language_model.lm_head.weight", (32064, 4096)),
    ],
)
def test_public_names_and_shapes(shapes, name, shape):
    assert shapes[name] == shape


def test_public_size(shapes):
    """Tensors: DINOv2 14 a block and 7, SigLIP 12 a block, 5 and 13 in the pool, projector 6, Llama 9 a layer and 3."""
    assert len(shapes) == (24 * 14 + 7) + (27 * 12 + 5 + 13) + 6 + (32 * 9 + 3)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == PARAMETERS_7B
    assert shapes.keys() == public_names()


def test_public_ids():
    config = OpenVLAConfig.from_dict(PUBLIC)
    assert (config.action_vocab_size, config.first_action_id, config.prompt_end_id) == (32000, 31744, 29871)
    again = OpenVLAConfig.from_dict(config.to_dict())
    assert (again.dino, again.siglip, again.llama) == (config.dino, config.siglip, config.llama)


U = "checkpoint-unsupported"


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        ({"model_type": "llava"}, "checkpoint-family", "'llava'"),
        ({"vision_backbone_id": "siglip-vit-so400m", "use_fused_vision_backbone": False}, U, "siglip-vit-so400m"),
        ({"image_resize_strategy": "letterbox"}, U, "'letterbox'"),
        ({"arch_specifier": "gelu-mlp"}, U, "'gelu-mlp'"),
        ({"vision_backbone_id": "dinosiglip-vit-so-384px"}, U, "dinosiglip-vit-so-384px"),
    ],
)
def test_other_models_are_refused(change, code, name):
    with raises_code(code, CheckpointError, name):
        OpenVLAConfig.from_dict({**PUBLIC, **change})


def test_patch_embedding_equals_the_convolution():
    vit = VisionTransformer(VitSpec(24, 8, 10, 2, 2, 12))
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    want = vit.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
    torch.testing.assert_close(vit.patch_embed(pixels), want, rtol=0, atol=1e-5)


def test_position_table_tells_places_apart():
    table = sincos_2d(4, 18)[0]
    assert table.shape == (16, 18) and (table[:, 16:] == 0).all()
    distance = torch.cdist(table, table) + torch.eye(16) * 9
    assert distance.min() > 0.1
    assert table[1, 0] == 0 and table[4, 0] == pytest.approx(0.8414710)  # sin(column 0), then sin(row 1)


def test_supported_models():
    assert SupportedModel.OPENVLA == "openvla" and SupportedModel.OPENVLA in SupportedModel.members()
    with raises_code("unknown-name", UnknownNameError, "'openvlaa'", "'openvla'"):
        SupportedModel("openvlaa")
    with raises_code("name-taken"):
        SupportedModel.register("openvla", "somewhere:else")


def test_registry_imports_no_torch():
    code = "import sys, embodrl.models.registry as r; r.SupportedModel('openvla'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
