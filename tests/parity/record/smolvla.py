"""Remake ``recordings/smolvla`` with lerobot 0.4.4's VLAFlowMatching.

    python -m venv lerobot && lerobot/bin/pip install torch==2.13.0 transformers==5.19.0 num2words
    git clone --depth 1 --branch v0.4.4 https://github.com/huggingface/lerobot source
    lerobot/bin/python tests/parity/record/smolvla.py --source source/src --check

modeling_smolvla.py and smolvlm_with_expert.py are run as they are. The hub's configuration and tokenizer are replaced
by small ones here.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from common import RECORDINGS, Outputs, inputs_of, load_weights, main, modules_of
from transformers import SmolVLMConfig

FAMILY = "smolvla"
SIZES = json.loads((RECORDINGS / FAMILY / "config.json").read_text())["embodrl"]


def hub_config() -> SmolVLMConfig:
    """Return the configuration of the vision-language model, as the hub's one at other sizes."""
    vision, text = SIZES["siglip"], SIZES["vlm"]
    return SmolVLMConfig(
        scale_factor=SIZES["scale_factor"],
        vision_config={
            "hidden_size": vision["width"],
            "intermediate_size": vision["mlp_dim"],
            "num_hidden_layers": vision["depth"],
            "num_attention_heads": vision["num_heads"],
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
        },
        text_config={
            "model_type": "llama",
            "hidden_size": text["width"],
            "intermediate_size": text["mlp_dim"],
            "num_hidden_layers": text["depth"],
            "num_attention_heads": text["num_heads"],
            "num_key_value_heads": text["num_kv_heads"],
            "head_dim": text["head_dim"],
            "vocab_size": SIZES["vocab_size"],
            "rms_norm_eps": 1e-5,
            "pad_token_id": 0,
        },
    )


def settings() -> SimpleNamespace:
    """Return what VLAFlowMatching reads of SmolVLAConfig: its defaults, but for sizes."""
    return SimpleNamespace(
        vlm_model_name="hub",
        freeze_vision_encoder=True,
        train_expert_only=True,
        train_state_proj=True,
        load_vlm_weights=False,
        attention_mode="cross_attn",
        num_expert_layers=-1,
        num_vlm_layers=SIZES["vlm"]["depth"],
        self_attn_every_n_layers=SIZES["self_attention_every"],
        expert_width_multiplier=SIZES["expert"]["width"] / SIZES["vlm"]["width"],
        device="cpu",
        max_state_dim=SIZES["max_state_dim"],
        max_action_dim=SIZES["max_action_dim"],
        chunk_size=SIZES["action_horizon"],
        num_steps=SIZES["num_steps"],
        add_image_special_tokens=False,
        prefix_length=-1,
        compile_model=False,
        use_cache=True,
        min_period=4e-3,
        max_period=4.0,
        rtc_config=None,
    )


def make(source: Path, new: bool) -> tuple[Outputs, Outputs]:
    level = "lerobot.policies.smolvla"
    wrapped, flow = modules_of(source, f"{level}.smolvlm_with_expert", f"{level}.modeling_smolvla")
    flow.get_safe_dtype = lambda dtype, device: dtype  # as on a CPU
    tokenizer = SimpleNamespace(tokenizer=SimpleNamespace(fake_image_token_id=0, global_image_token_id=0))
    with (
        mock.patch.object(wrapped.AutoConfig, "from_pretrained", lambda name: hub_config()),
        mock.patch.object(wrapped.AutoProcessor, "from_pretrained", lambda name: tokenizer),
    ):
        model = flow.VLAFlowMatching(settings()).float().eval()
    weights = load_weights(model, FAMILY, new, "model.")
    io = inputs_of(FAMILY)
    images = list(io["images"].unbind(1))
    there = [io["lang_mask"].new_ones(len(io["state"])).bool()] * len(images)
    seen = (images, there, io["lang"], io["lang_mask"].bool(), io["state"])
    losses = model.forward(*seen, io["actions"], noise=io["noise"], time=io["time"])
    return weights, {"sampled": model.sample_actions(*seen, noise=io["noise"]), "losses": losses}


if __name__ == "__main__":
    main(FAMILY, make, __doc__)
