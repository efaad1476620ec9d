"""Wrong configurations of the model families; see config_cases.py."""

from __future__ import annotations

from config_case import Wrong

FAMILIES = [
    Wrong("patches of pi", "model.pi.patch_size", "pi-dimensions-fit", ("model.pi.patch_size=12", "model=pi0")),
    Wrong(
        "vision heads of pi",
        "model.pi.siglip.num_heads",
        "pi-dimensions-fit",
        ("model.pi.siglip.num_heads=5", "model=pi05"),
    ),
    Wrong("key heads of pi", "model.pi.num_kv_heads", "pi-dimensions-fit", ("model.pi.num_kv_heads=3", "model=pi0")),
    Wrong("odd heads of pi", "model.pi.head_dim", "pi-dimensions-fit", ("model.pi.head_dim=33", "model=pi0")),
    Wrong("odd expert of pi", "model.pi.expert_width", "pi-dimensions-fit", ("model.pi.expert_width=97", "model=pi0")),
    Wrong(
        "more actions than predicted",
        "model.num_action_chunks",
        "pi-dimensions-fit",
        ("model.num_action_chunks=10", "model=pi0"),
    ),
    Wrong(
        "no room for an action",
        "model.action_dim",
        "pi-dimensions-fit",
        ("model.action_dim=7", "model=pi0", "model.pi.max_action_dim=6"),
    ),
    Wrong(
        "no slot for a camera",
        "env.cameras",
        "pi-dimensions-fit",
        ("env.cameras=[{name: base_camera}, {name: b, eye: [1,1,1], target: [0,0,0]}]", "model=pi0"),
    ),
    Wrong(
        "two cameras for one",
        "env.cameras",
        "model-sees-the-cameras",
        ("env.cameras=[{name: base_camera}, {name: b, eye: [1,1,1], target: [0,0,0]}]",),
    ),
    Wrong(
        "heads of pi0-FAST",
        "model.pi0_fast.num_kv_heads",
        "pi0-fast-dimensions-fit",
        ("model.pi0_fast.num_kv_heads=3", "model=pi0_fast"),
    ),
    Wrong(
        "an advantage for each action of pi0-FAST",
        "algorithm.reward_type",
        "tokens-are-of-the-chunk",
        ("algorithm.reward_type=action_level", "model.value_head.output=action", "model=pi0_fast"),
        more=("model.value_head.output",),
    ),
    Wrong(
        "patches of GR00T",
        "model.gr00t.patch_size",
        "gr00t-dimensions-fit",
        ("model.gr00t.patch_size=12", "model=gr00t"),
    ),
    Wrong(
        "heads of GR00T",
        "model.gr00t.num_key_value_heads",
        "gr00t-dimensions-fit",
        ("model.gr00t.num_key_value_heads=3", "model=gr00t"),
    ),
    Wrong(
        "widths of GR00T",
        "model.gr00t.vl_head_dim",
        "gr00t-dimensions-fit",
        ("model.gr00t.vl_head_dim=30", "model=gr00t"),
    ),
    Wrong(
        "no range of noise",
        "model.flow.noise_std_min",
        "noise-range-is-not-empty",
        ("model.flow.noise_std_min=0.2", "model=pi0", "model.flow.method=flow_noise"),
    ),
    Wrong(
        "value input of flow policies",
        "model.value_head.input",
        "value-input-exists",
        ("model.value_head.input=suffix",),
    ),
    Wrong("no expert to train", "model.trainable", "part-can-train-alone", ("model.trainable=action_expert",)),
    Wrong(
        "proprioception without a state",
        "model.use_proprio",
        "state-is-there",
        ("model.use_proprio=true", "model=openvla_oft"),
        names="env.include_state",
    ),
    Wrong(
        "an L1 head under PPO",
        "model.action_head",
        "l1-head-has-no-density",
        ("model.action_head=l1", "model=openvla_oft"),
    ),
    Wrong(
        "weights that are not shipped",
        "model.warm_start",
        "family-has-shipped-weights",
        ("model.warm_start=builtin", "model=gr00t"),
    ),
]
