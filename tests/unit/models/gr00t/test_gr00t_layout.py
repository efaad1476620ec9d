"""Names, shapes and size of the public GR00T N1.5 checkpoint, on the meta device; configurations that are refused."""

from __future__ import annotations

import copy
from pathlib import Path

import gr00t_files
import pytest
import torch
from expect import raises_code
from gr00t_files import N1_5 as PUBLIC
from runs import script

from embodrl.errors import CheckpointError
from embodrl.models.common.config_file import fields_of
from embodrl.models.gr00t.config import Gr00tConfig
from embodrl.models.gr00t.modeling import Gr00tModel

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
        "from gr00t_files import N1_5 as PUBLIC\n"
        "from embodrl.models.gr00t.config import Gr00tConfig\n"
        "from embodrl.models.gr00t.modeling import Gr00tModel\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "with torch.device('meta'):\n"
        "    Gr00tModel(Gr00tConfig.from_dict(PUBLIC, {}))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    (tmp_path / "construct.py").write_text(code)
    done = script(tmp_path / "construct.py", search_path=Path(gr00t_files.__file__).parent)
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
