"""Settings of the published GR00T checkpoints, N1.5 and N1.7, and statistics of a robot."""

from __future__ import annotations

import copy
from typing import Any

from embodrl.models.common.config_file import fields_of
from embodrl.models.common.norm_stats import stats_sets
from embodrl.models.gr00t.sidecars import Sidecars

N1_5: dict[str, Any] = {
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
POSE = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
N1_7: dict[str, Any] = {
    "model_type": "Gr00tN1d7",
    "architectures": ["Gr00tN1d7"],
    "model_name": "nvidia/Cosmos-Reason2-2B",
    "backbone_model_type": "qwen",
    "backbone_embedding_dim": 2048,
    "select_layer": 16,
    "max_state_dim": 132,
    "max_action_dim": 132,
    "action_horizon": 40,
    "hidden_size": 1024,
    "input_embedding_dim": 1536,
    "state_history_length": 1,
    "add_pos_embed": True,
    "use_vlln": True,
    "max_seq_len": 1024,
    "max_num_embodiments": 32,
    "use_alternate_vl_dit": True,
    "attend_text_every_n_blocks": 2,
    "diffusion_model_cfg": {
        "positional_embeddings": None,
        "num_layers": 32,
        "num_attention_heads": 32,
        "attention_head_dim": 48,
        "norm_type": "ada_norm",
        "dropout": 0.2,
        "final_dropout": True,
        "output_dim": 1024,
        "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {
        "positional_embeddings": None,
        "num_layers": 4,
        "num_attention_heads": 32,
        "attention_head_dim": 64,
    },
    "num_inference_timesteps": 4,
    "num_timestep_buckets": 1000,
    "tune_llm": False,
}


def part(names: tuple[str, ...], steps: int = 1, **more: Any) -> dict[str, Any]:
    return {"delta_indices": list(range(steps)), "modality_keys": list(names), **more}


PROCESSOR: dict[str, Any] = {
    "processor_class": "Gr00tN1d7Processor",
    "processor_kwargs": {
        "modality_configs": {
            "libero_sim": {
                "video": part(("image", "wrist_image")),
                "state": part(POSE, sin_cos_embedding_keys=None, mean_std_embedding_keys=None),
                "action": part(POSE, 16, action_configs=None),
                "language": part(("annotation.human.action.task_description",)),
            }
        },
        "image_crop_size": [230, 230],
        "image_target_size": [256, 256],
        "shortest_image_edge": 256,
        "crop_fraction": 0.95,
        "use_albumentations": True,
        "use_percentiles": True,
        "use_relative_action": True,
        "formalize_language": True,
        "clip_outliers": True,
    },
}


def numbers(low: list[float], high: list[float]) -> dict[str, list[float]]:
    """The quantiles are the middle half of the range."""
    span = [(b - a) / 4 for a, b in zip(low, high, strict=True)]
    ends = {"min": low, "max": high, "mean": [0.0] * len(low), "std": [2.0] * len(low)}
    inner = ([a + s for a, s in zip(low, span, strict=True)], [b - s for b, s in zip(high, span, strict=True)])
    return ends | dict(zip(("q01", "q99"), inner, strict=True))


STATE = {name: numbers([-2.0, -4.0], [2.0, 4.0]) if name == "gripper" else numbers([-2.0], [2.0]) for name in POSE}
ACTION = {name: numbers([-2.0], [6.0]) for name in POSE}
STATISTICS: dict[str, Any] = {"libero_sim": {"state": STATE, "action": ACTION, "relative_action": {}}}


def sidecars(change: dict[str, Any] | None = None, statistics: Any = STATISTICS, **kwargs: Any) -> Sidecars:
    """NVIDIA's files for LIBERO, with changed entries of the robot and of the processor."""
    processor = copy.deepcopy(PROCESSOR)
    processor["processor_kwargs"] |= kwargs
    for name, entries in (change or {}).items():
        processor["processor_kwargs"]["modality_configs"]["libero_sim"][name] |= entries
    return Sidecars(fields_of(processor, "processor_config.json"), stats_sets(fields_of(statistics, "x")), {})
