"""Remake ``recordings/openvla_oft`` with moojink/openvla-oft's modules, of commit 213c5ff.

    python -m venv oft
    oft/bin/pip install torch torchvision transformers==4.40.1 tokenizers==0.19.1 timm==0.9.10 peft==0.11.1 diffusers
    git clone https://github.com/moojink/openvla-oft source && git -C source checkout 213c5ff
    oft/bin/python tests/parity/record/openvla_oft.py --source source --check

modeling_prismatic.py, film_vit_wrapper.py, action_heads.py and projectors.py are run as they are, with small towers.
Attention of Llama is made bidirectional as the project's fork of transformers does it, and the check that a prompt ends
with Llama's id 29871 is passed over, as the vocabulary has none. The state is normalised by the formula of its
``normalize_proprio``. ``--new`` draws the weights of model.safetensors; FiLM, head and projector stay the recording's.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import RECORDINGS, Outputs, inputs_of, load_weights, main, modules_of
from peft import LoraConfig, get_peft_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaModel

FAMILY = "openvla_oft"
DIRECTORY = RECORDINGS / FAMILY
CONFIG = json.loads((DIRECTORY / "config.json").read_text())
WIDTH, LORA_RANK, IMAGES = CONFIG["text_config"]["hidden_size"], 20, 2


def tower(model_id: str, **given: Any) -> VisionTransformer:
    """Take the place of ``timm.create_model``: the two kinds of towers, small."""
    sizes = {"img_size": 28, "patch_size": 14, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 0}
    if "dinov2" in model_id:
        return VisionTransformer(**sizes, mlp_ratio=2, init_values=1e-5, reg_tokens=4, no_embed_class=True)
    return VisionTransformer(**sizes, mlp_ratio=2, class_token=False, global_pool="map")


def everyone_sees_everyone(self: LlamaModel, attention_mask: Tensor, inputs: Tensor, *others: Any) -> Tensor:
    """Take the place of ``LlamaModel._update_causal_mask``; there is no padding."""
    length = inputs.shape[1]
    return inputs.new_zeros(len(inputs), 1, length, length)


def build(prismatic: ModuleType, configuration: ModuleType, film: ModuleType, new: bool) -> tuple[nn.Module, Outputs]:
    known = {name: value for name, value in CONFIG.items() if name not in ("model_type", "image_sizes")}
    derived = ("timm_model_ids", "timm_override_act_layers", "hf_llm_id")
    config = configuration.OpenVLAConfig(**{name: value for name, value in known.items() if name not in derived})
    config._attn_implementation = "eager"
    with mock.patch.object(prismatic.timm, "create_model", tower):
        vla = prismatic.OpenVLAForActionPrediction(config).float().eval()
    weights = load_weights(vla, FAMILY, new)
    vla.vision_backbone.set_num_images_in_input(IMAGES)
    lora = LoraConfig(r=LORA_RANK, lora_alpha=16, target_modules="all-linear", init_lora_weights="gaussian")
    wrapped = get_peft_model(vla, lora)
    wrapped.model.vision_backbone = film.FiLMedPrismaticVisionBackbone(wrapped.vision_backbone, wrapped.llm_dim)
    return wrapped.model.eval(), weights


def load_part(module: nn.Module, name: str) -> None:
    stored = torch.load(DIRECTORY / f"{name}--3_checkpoint.pt", weights_only=True)
    module.load_state_dict({key.removeprefix("module."): value for key, value in stored.items()})
    module.eval()


def make(source: Path, new: bool) -> tuple[Outputs, Outputs]:
    level = ("prismatic.vla.constants", "prismatic.training.train_utils", "prismatic.extern.hf.configuration_prismatic")
    own = ("extern.hf.modeling_prismatic", "models.film_vit_wrapper", "models.action_heads", "models.projectors")
    *_, configuration, prismatic, film, heads, projectors = modules_of(source, *level, *(f"prismatic.{n}" for n in own))
    vla, weights = build(prismatic, configuration, film, new)
    head, projector = heads.L1RegressionActionHead(WIDTH, WIDTH, 7), projectors.ProprioProjector(WIDTH, 8)
    for part, name in (
        (vla.vision_backbone, "vision_backbone"),
        (head, "action_head"),
        (projector, "proprio_projector"),
    ):
        load_part(part, name)
    io, [stats] = inputs_of(FAMILY), CONFIG["norm_stats"].values()
    low, high = (np.array(stats["proprio"][name]) for name in ("q01", "q99"))
    state = np.clip(2 * (io["state"].numpy() - low) / (high - low + 1e-8) - 1, -1, 1)
    prismatic.torch = SimpleNamespace(**{**vars(torch), "all": lambda condition: True})
    normalized: list[Tensor] = []
    head.model.register_forward_hook(lambda *call: normalized.append(call[-1]))
    ids = io["ids"]
    with mock.patch.object(LlamaModel, "_update_causal_mask", everyone_sees_everyone):
        actions, hidden = vla.predict_action(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=io["pv"],
            proprio=state,
            proprio_projector=projector,
            action_head=head,
            use_film=True,
        )
    return weights, {"ah": hidden, "normalized": normalized[-1], "a": torch.from_numpy(actions)}


if __name__ == "__main__":
    main(FAMILY, make, __doc__)
