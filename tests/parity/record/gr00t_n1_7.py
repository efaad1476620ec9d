"""Remake ``recordings/gr00t_n1_7`` with lerobot's GR00TN17, of commit 7427f31801f9 (0.6.2).

    python -m venv lerobot && lerobot/bin/pip install torch==2.13.0 transformers==5.19.0 diffusers==0.42.1
    git clone https://github.com/huggingface/lerobot source && git -C source checkout 7427f31801f9
    lerobot/bin/python tests/parity/record/gr00t_n1_7.py --source source/src --check

groot_n1_7.py and cross_attention_dit.py are run as they are; Cosmos-Reason2's configuration is replaced by a small one.
Rows are run one by one, without their padding, which would influence them.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from common import RECORDINGS, Outputs, inputs_of, load_weights, main, modules_of
from torch import Tensor, nn
from transformers import Qwen3VLConfig
from transformers.feature_extraction_utils import BatchFeature

FAMILY = "gr00t_n1_7"
CONFIG = json.loads((RECORDINGS / FAMILY / "config.json").read_text())
SIZES = CONFIG["embodrl"]
VISION = SIZES["vision"]


def hub_config() -> Qwen3VLConfig:
    """Return the configuration of the vision-language model, as the hub's one at other sizes."""
    text = dict(SIZES["qwen"])
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    return Qwen3VLConfig(
        image_token_id=SIZES["image_token_id"],
        video_token_id=SIZES["image_token_id"] + 1,
        vision_start_token_id=SIZES["image_token_id"] + 2,
        vision_end_token_id=SIZES["image_token_id"] + 3,
        tie_word_embeddings=True,
        text_config={**text, "rope_scaling": rope, "attention_bias": False, "tie_word_embeddings": True},
        vision_config={
            "deepstack_visual_indexes": [0, 1, 2],
            "depth": VISION["depth"],
            "hidden_size": VISION["width"],
            "intermediate_size": VISION["mlp_dim"],
            "num_heads": VISION["num_heads"],
            "num_position_embeddings": VISION["num_positions"],
            "out_hidden_size": text["hidden_size"],
            "patch_size": VISION["patch_size"],
            "spatial_merge_size": VISION["merge_size"],
            "temporal_patch_size": 2,
        },
    )


def patches(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[V*h*w,*]`` patches of images ``[V,3,H,W]`` in the order of transformers' processor, and their grids."""
    size, merge = VISION["patch_size"], VISION["merge_size"]
    cameras, side = len(pixels), pixels.shape[-1] // size
    frames = pixels[:, None].expand(-1, 2, -1, -1, -1)  # a picture is a film of two equal frames
    blocks = frames.reshape(cameras, 2, 3, side // merge, merge, size, side // merge, merge, size)
    ordered = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(cameras * side * side, -1)
    return ordered, torch.tensor([[1, side, side]] * cameras)


def build(groot: ModuleType) -> nn.Module:
    names = ("embodrl", "origin", "model_type")
    config = groot.GR00TN17Config(**{name: value for name, value in CONFIG.items() if name not in names})
    with (
        mock.patch.object(groot, "_register_with_transformers", lambda: None),
        mock.patch.object(groot, "_cosmos_reason2_qwen3_vl_config", hub_config),
    ):
        return groot.GR00TN17(config, load_backbone_weights=False).float().eval()


def run(model: nn.Module, io: Outputs, row: int) -> Outputs:
    """Return the outputs of one row, without a batch dimension and without padding."""
    there = io["attention_mask"][row].bool()
    pixels, grid = patches(io["pixels"][row])
    ids = io["input_ids"][row][there][None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "image_grid_thw": grid}
    seen = model.backbone(inputs)
    features = seen["backbone_features"].clone()
    part = slice(row, row + 1)
    known = {"state": io["state"][part], "embodiment_id": io["emb"][part]}
    with mock.patch.object(torch, "randn", lambda *size, **options: io["noise"][part]):
        sampled = model.action_head.get_action(BatchFeature(data=dict(seen)), BatchFeature(data=known))
    velocity: list[Tensor] = []
    hook = model.action_head.action_decoder.register_forward_hook(lambda *call: velocity.append(call[-1]))
    x, time = io["x"][part], (io["t"][part] + 0.5) / model.action_head.num_timestep_buckets
    with (  # x lies on the straight line from itself to itself, at any time
        mock.patch.object(torch, "randn", lambda *size, **options: x),
        mock.patch.object(model.action_head, "sample_time", lambda *size, **options: time),
    ):
        training = BatchFeature(data={**known, "action": x, "action_mask": torch.ones_like(x)})
        model.action_head(BatchFeature(data=dict(seen)), training)
    hook.remove()
    return {
        "features": features[0],
        "vl": sampled["backbone_features"][0],
        "v": velocity[0][0, -x.shape[1] :],
        "sampled": sampled["action_pred"][0],
    }


def make(source: Path, new: bool) -> tuple[Outputs, Outputs]:
    level = "lerobot.policies.groot"
    _, groot = modules_of(source, f"{level}.action_head.cross_attention_dit", f"{level}.groot_n1_7")
    model = build(groot)
    weights = load_weights(model, FAMILY, new)
    io = inputs_of(FAMILY)
    outputs = {name: torch.zeros_like(io[name]) for name in ("features", "vl", "v", "sampled")}
    for row, mask in enumerate(io["attention_mask"].bool()):
        for name, value in run(model, io, row).items():
            outputs[name][row][mask if name in ("features", "vl") else slice(None)] = value
    return weights, outputs


if __name__ == "__main__":
    main(FAMILY, make, __doc__)
