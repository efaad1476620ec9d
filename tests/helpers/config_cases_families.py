"""Wrong configurations of the model families; see config_cases.py."""

from __future__ import annotations

from config_case import Wrong

FAMILIES = [
    Wrong("patches of pi", "model.pi.patch_size", "64 / 12 leaves 4", ("model.pi.patch_size=12", "model=pi0")),
    Wrong("vision heads of pi", "model.pi.siglip.num_heads", "leaves 1", ("model.pi.siglip.num_heads=5", "model=pi05")),
    Wrong("key heads of pi", "model.pi.num_kv_heads", "4 / 3 leaves 1", ("model.pi.num_kv_heads=3", "model=pi0")),
    Wrong("odd heads of pi", "model.pi.head_dim", "set it to 32 or 34", ("model.pi.head_dim=33", "model=pi0")),
    Wrong("odd expert of pi", "model.pi.expert_width", "an even number", ("model.pi.expert_width=97", "model=pi0")),
    Wrong(
        "more actions than predicted",
        "model.num_action_chunks",
        "model.pi.action_horizon is 5",
        ("model.num_action_chunks=10", "model=pi0"),
    ),
    Wrong(
        "no room for an action",
        "model.action_dim",
        "model.pi.max_action_dim is 6",
        ("model.action_dim=7", "model=pi0", "model.pi.max_action_dim=6"),
    ),
    Wrong(
        "no slot for a camera",
        "env.cameras",
        "model.pi.num_images is 1",
        ("env.cameras=[{name: base_camera}, {name: b, eye: [1,1,1], target: [0,0,0]}]", "model=pi0"),
    ),
    Wrong(
        "two cameras for one",
        "env.cameras",
        "openvla sees 1 camera,",
        ("env.cameras=[{name: base_camera}, {name: b, eye: [1,1,1], target: [0,0,0]}]",),
    ),
    Wrong("patches of GR00T", "model.gr00t.patch_size", "leaves 4", ("model.gr00t.patch_size=12", "model=gr00t")),
    Wrong(
        "heads of GR00T",
        "model.gr00t.num_key_value_heads",
        "leaves 1",
        ("model.gr00t.num_key_value_heads=3", "model=gr00t"),
    ),
    Wrong(
        "widths of GR00T",
        "model.gr00t.vl_head_dim",
        "4 heads x 30 = 120",
        ("model.gr00t.vl_head_dim=30", "model=gr00t"),
    ),
    Wrong(
        "no range of noise",
        "model.flow.noise_std_min",
        "below model.flow.noise_std_max = 0.16",
        ("model.flow.noise_std_min=0.2", "model=pi0", "model.flow.method=flow_noise"),
    ),
    Wrong(
        "value input of flow policies",
        "model.value_head.input",
        "pi0, pi05, gr00t, smolvla have it",
        ("model.value_head.input=suffix",),
    ),
    Wrong("no expert to train", "model.trainable", "all, lora, head", ("model.trainable=action_expert",)),
    Wrong(
        "proprioception without a state",
        "model.use_proprio",
        "env.include_state",
        ("model.use_proprio=true", "model=openvla_oft"),
    ),
    Wrong(
        "weights that nobody ships",
        "model.warm_start",
        "no weights of gr00t, only of openvla",
        ("model.warm_start=builtin", "model=gr00t"),
    ),
]
