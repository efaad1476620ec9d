"""Remake ``recordings/pi0_fast`` with lerobot 0.6.1's PI0FastPytorch.

    python -m venv lerobot && lerobot/bin/pip install torch==2.13.0 transformers==5.19.0 scipy
    git clone --depth 1 --branch v0.6.1 https://github.com/huggingface/lerobot source
    lerobot/bin/python tests/parity/record/pi0_fast.py --source source/src --check

modeling_pi0_fast.py, pi_gemma.py and vla_utils.py are run as they are, but for an argument that transformers'
create_causal_mask no longer takes. PaliGemma's sizes, which the public class sets itself, are replaced by small ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from common import RECORDINGS, Outputs, inputs_of, load_weights, main, modules_of
from torch import Tensor, nn
from transformers import PaliGemmaConfig

FAMILY = "pi0_fast"
SIZES = json.loads((RECORDINGS / FAMILY / "config.json").read_text())["embodrl"]["inputs"]


def small(config: PaliGemmaConfig) -> PaliGemmaConfig:
    """Return the configuration that the public class makes, with other sizes."""
    vision, width, words = SIZES["siglip"], SIZES["vlm"]["width"], SIZES["vocab_size"]
    config.text_config.vocab_size, config.image_token_id = words, words - 1
    config.text_config.pad_token_id = 0
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    sizes = {
        "hidden_size": vision["width"],
        "intermediate_size": vision["mlp_dim"],
        "num_hidden_layers": vision["depth"],
        "num_attention_heads": vision["num_heads"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "projection_dim": width,
    }
    for name, value in sizes.items():
        setattr(config.vision_config, name, value)
    config.projection_dim = config.hidden_size = width
    return config


def build(fast: ModuleType, gemma: ModuleType, bos: int) -> nn.Module:
    mask = gemma.create_causal_mask
    gemma.create_causal_mask = lambda *, cache_position, **given: mask(**given)
    words = SimpleNamespace(bos_token_id=bos, convert_tokens_to_ids=lambda word: -1)  # never the end of the actions
    settings = SimpleNamespace(paligemma_variant="small", dtype="float32", compile_model=False, max_action_tokens=10)
    whole = fast.PaliGemmaForConditionalGenerationWithPiGemma
    with (
        mock.patch.object(fast, "get_gemma_config", lambda variant: fast.GemmaConfig(**SIZES["vlm"])),
        mock.patch.object(
            fast, "PaliGemmaForConditionalGenerationWithPiGemma", lambda config: whole(config=small(config))
        ),
    ):
        return fast.PI0FastPytorch(settings, paligemma_tokenizer=words).eval()


def make(source: Path, new: bool) -> tuple[Outputs, Outputs]:
    level = "lerobot.policies"
    names = (f"{level}.common.vla_utils", f"{level}.pi_gemma", f"{level}.pi0_fast.modeling_pi0_fast")
    helpers, gemma, fast = modules_of(source, *names)
    helpers.OPENPI_ATTENTION_MASK_VALUE = -2.3819763e38  # of lerobot.utils.constants, which is not run
    io = inputs_of(FAMILY)
    model = build(fast, gemma, int(io["sentence"][0, 0]))
    weights = load_weights(model, FAMILY, new, "model.")
    images = list(io["images"].unbind(1))
    there = [torch.ones(len(image), dtype=torch.bool) for image in images]
    prompt = (images, there, io["lang"], io["lang_mask"].bool())
    logits: list[Tensor] = []
    model.paligemma_with_expert.paligemma.lm_head.register_forward_hook(lambda *call: logits.append(call[-1]))
    loss = model.forward(*prompt, io["sentence"], io["written"].bool())["loss"]
    outputs = {"logits": logits[-1], "loss": loss}
    sentence = io["sentence"][:, :1]
    for _ in range(io["gen"].shape[1]):
        model.forward(*prompt, sentence, torch.ones_like(sentence, dtype=torch.bool))
        sentence = torch.cat([sentence, logits[-1][:, -1:].argmax(-1)], 1)
    decoded = model.sample_actions_fast_kv_cache(*prompt, max_decoding_steps=io["decoded"].shape[1])
    return weights, {**outputs, "gen": sentence[:, 1:], "decoded": decoded}


if __name__ == "__main__":
    main(FAMILY, make, __doc__)
