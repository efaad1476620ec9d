"""Names, shapes and size of the public GR00T N1.5 checkpoint, on the meta device; configurations that are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises_code
from runs import script

from embodrl.errors import CheckpointError
from embodrl.models.common.config_file import fields_of
from embodrl.models.gr00t.config import Gr00tConfig
from embodrl.models.gr00t.modeling import Gr00tModel

PUBLIC: dict[str, Any] = {
    "model_type": "gr00t_n1_5",
    "architectures": ["GR00T_N1_5"],
    "action_dim": 32,
    "action_horizon": 16,
    "hidden_size": 2048,
    "compute_dtype": "bfloat16",
    "backbone_cfg": {
        "eagle_path": "NVEagle/eagle_er-qwen3_1_7B-Siglip2_400M_stage1_5_128gpu_er_v7_1mlp_nops",
        "project_to_dim": None,
        "reproject_vision": False,
        "select_layer": 12,
        "tune_llm": False,
        "tune_visual": True,
    },
    "action_head_cfg": {
        "action_dim": 32,
        "action_horizon": 16,
        "add_pos_embed": True,
        "backbone_embedding_dim": 2048,
        "diffusion_model_cfg": {
            "attention_head_dim": 48,
            "cross_attention_dim": 2048,
            "dropout": 0.2,
            "final_dropout": True,
            "interleave_self_attention": True,
            "norm_type": "ada_norm",
            "num_attention_heads": 32,
            "num_layers": 16,
            "output_dim": 1024,
            "positional_embeddings": None,
        },
        "hidden_size": 1024,
        "input_embedding_dim": 1536,
        "max_action_dim": 32,
        "max_state_dim": 64,
        "noise_beta_alpha": 1.5,
        "noise_beta_beta": 1.0,
        "noise_s": 0.999,
        "num_inference_timesteps": 4,
        "num_target_vision_tokens": 32,
        "num_timestep_buckets": 1000,
        "use_vlln": True,
        "vl_self_attention_cfg": {
            "attention_head_dim": 64,
            "num_attention_heads": 32,
            "num_layers": 4,
            "positional_embeddings": None,
        },
    },
}
ROBOTS = {"gr1": fields_of({}, "x")}
EAGLE = "backbone.eagle_model"
VISION = f"{EAGLE}.vision_model.vision_model"
QWEN = f"{EAGLE}.language_model"


@pytest.fixture(scope="module")
def model() -> Gr00tModel:
    with torch.device("meta"):
        return Gr00tModel(Gr00tConfig.from_dict(PUBLIC, {}))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{VISION}.embeddings.patch_embedding.weight", (1152, 3, 14, 14)),
        (f"{VISION}.embeddings.position_embedding.weight", (256, 1152)),
        (f"{VISION}.encoder.layers.26.mlp.fc1.weight", (4304, 1152)),
        (f"{VISION}.encoder.layers.26.self_attn.out_proj.bias", (1152,)),
        (f"{VISION}.post_layernorm.weight", (1152,)),
        (f"{VISION}.head.attention.in_proj_weight", (3456, 1152)),
        (f"{VISION}.head.probe", (1, 1, 1152)),
        (f"{EAGLE}.mlp1.0.weight", (2048, 1152)),
        (f"{EAGLE}.mlp1.0.bias", (2048,)),
        (f"{QWEN}.model.embed_tokens.weight", (151680, 2048)),
        (f"{QWEN}.model.layers.11.self_attn.q_proj.weight", (2048, 2048)),
        (f"{QWEN}.model.layers.11.self_attn.k_proj.weight", (1024, 2048)),
        (f"{QWEN}.model.layers.11.self_attn.q_norm.weight", (128,)),
        (f"{QWEN}.model.layers.11.mlp.down_proj.weight", (2048, 6144)),
        (f"{QWEN}.model.norm.weight", (2048,)),
        (f"{QWEN}.lm_head.weight", (151680, 2048)),
        ("action_head.model.timestep_encoder.timestep_embedder.linear_1.weight", (1536, 256)),
        ("action_head.model.transformer_blocks.0.attn1.to_k.weight", (1536, 2048)),
        ("action_head.model.transformer_blocks.15.attn1.to_k.weight", (1536, 1536)),
        ("action_head.model.transformer_blocks.15.attn1.to_out.0.weight", (1536, 1536)),
        ("action_head.model.transformer_blocks.15.ff.net.0.proj.weight", (6144, 1536)),
        ("action_head.model.transformer_blocks.15.norm1.linear.weight", (3072, 1536)),
        ("action_head.model.proj_out_2.weight", (1024, 1536)),
        ("action_head.state_encoder.layer1.W", (32, 64, 1024)),
        ("action_head.state_encoder.layer2.b", (32, 1536)),
        ("action_head.action_encoder.W1.W", (32, 32, 1536)),
        ("action_head.action_encoder.W2.W", (32, 3072, 1536)),
        ("action_head.action_encoder.W3.b", (32, 1536)),
        ("action_head.action_decoder.layer2.W", (32, 1024, 32)),
        ("action_head.future_tokens.weight", (32, 1536)),
        ("action_head.position_embedding.weight", (1024, 1536)),
        ("action_head.vlln.weight", (2048,)),
        ("action_head.vl_self_attention.transformer_blocks.3.norm3.bias", (2048,)),
        ("action_head.vl_self_attention.transformer_blocks.3.ff.net.2.weight", (2048, 8192)),
    ],
)
def test_public_name(model, name, shape):
    assert tuple(model.state_dict()[name].shape) == shape


def test_no_other_groups_and_no_more_layers(model):
    names = set(model.state_dict())
    assert {name.split(".")[0] for name in names} == {"backbone", "action_head"}
    assert {name.split(".")[2] for name in names if name.startswith(EAGLE)} == {
        "vision_model",
        "language_model",
        "mlp1",
    }
    assert {name.split(".")[1] for name in names if name.startswith("action_head")} == {
        *("model", "state_encoder", "action_encoder", "action_decoder", "future_tokens"),
        *("vlln", "vl_self_attention", "position_embedding"),
    }
    assert not any(".layers.12." in name for name in names if QWEN in name)
    assert not any(".layers.27." in name or "transformer_blocks.16." in name for name in names)


def test_published_sizes(model):
    """Users of the checkpoint report these numbers: of all parameters, and of the two transformers of its head."""

    def count(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    assert count(model) == 2_724_163_520
    assert count(model.action_head.model) == 550_386_688
    assert count(model.action_head.vl_self_attention) == 201_433_088
    unused = sum(parameter.numel() for parameter in model.unused_parameters())
    assert unused == 151680 * 2048 + 15_238_352
    assert all(parameter.is_meta for parameter in model.parameters())


def test_construction_needs_no_memory(tmp_path):
    code = (
        "import resource, torch\n"
        "from test_gr00t_layout import PUBLIC\n"
        "from embodrl.models.gr00t.config import Gr00tConfig\n"
        "from embodrl.models.gr00t.modeling import Gr00tModel\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "with torch.device('meta'):\n"
        "    Gr00tModel(Gr00tConfig.from_dict(PUBLIC, {}))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    (tmp_path / "construct.py").write_text(code)
    done = script(tmp_path / "construct.py", search_path=Path(__file__).parent)
    assert int(done.stdout) < 300_000  # KiB; the weights alone would be 10 GB


def test_config_survives_a_round_trip():
    config = Gr00tConfig.from_dict(PUBLIC, ROBOTS)
    written = config.to_dict()
    for key in ("action_dim", "compute_dtype", "model_type", "hidden_size"):
        assert written[key] == PUBLIC[key]
    for key, value in PUBLIC["action_head_cfg"].items():
        if not isinstance(value, dict):
            assert written["action_head_cfg"][key] == value
    assert written["backbone_cfg"] == PUBLIC["backbone_cfg"]
    again = Gr00tConfig.from_dict(written, ROBOTS)
    for part in ("siglip", "qwen", "head", "system_prompt", "embodiment_ids", "metadata"):
        assert getattr(again, part) == getattr(config, part)


U = "checkpoint-unsupported"


@pytest.mark.parametrize(
    ("path", "value", "code", "names"),
    [
        (("model_type",), "gr00t_n1", "checkpoint-family", ["'gr00t_n1'", "'gr00t_n1_5'"]),
        (("backbone_cfg", "project_to_dim"), 1536, U, ["project_to_dim", 1536]),
        (("backbone_cfg", "select_layer"), None, "policy-file", ["'select_layer'"]),
        (("action_head_cfg", "use_vlln"), False, U, ["use_vlln"]),
        (("action_head_cfg", "input_embedding_dim"), 1024, U, [1024, 1536]),
        (("action_head_cfg", "backbone_embedding_dim"), 1536, U, [1536, 2048]),
        (("action_head_cfg", "max_state_dim"), None, "policy-file", ["'max_state_dim'"]),
        (
            ("action_head_cfg", "diffusion_model_cfg", "interleave_self_attention"),
            False,
            U,
            ["interleave_self_attention"],
        ),
        (
            ("action_head_cfg", "vl_self_attention_cfg", "positional_embeddings"),
            "sinusoidal",
            U,
            ["positional_embeddings"],
        ),
    ],
)
def test_other_models_are_refused(path, value, code, names):
    raw = copy.deepcopy(PUBLIC)
    holder = raw
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with raises_code(code, CheckpointError, *names):
        Gr00tConfig.from_dict(raw, {})
