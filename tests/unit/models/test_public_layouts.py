"""Public checkpoints at full size, without their weights: every file but the tensors' content, which is sparse.

Names and shapes are those of the published weights (see test_openvla_layout.py, tests/helpers/gr00t_files.py and
test_pi_parts.py, which spell them out), under each layout's prefix; loading is strict, on the meta device.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from gr00t_files import N1_5 as GR00T
from gr00t_files import N1_7 as GR00T_N1_7
from gr00t_files import PROCESSOR, STATISTICS, sidecars
from safetensors.torch import save_file
from test_openvla_layout import PUBLIC as OPENVLA
from tokenizers import Tokenizer, models

from embodrl.config.schema import model_settings
from embodrl.models.base import VLAPolicy
from embodrl.models.common.adapters import adapter_names
from embodrl.models.common.tokenizer import TINY_TOKENIZER
from embodrl.models.gr00t.build_n1_7 import QwenTokenizer
from embodrl.models.gr00t.config import Gr00tConfig
from embodrl.models.gr00t.config_n1_7 import Gr00tN17Config
from embodrl.models.gr00t.modeling import Gr00tModel, Gr00tN17Model
from embodrl.models.gr00t.processing import tiny_chat_tokenizer
from embodrl.models.load_report import LoadReport
from embodrl.models.openpi.config import PUBLIC as PI
from embodrl.models.openvla.config import OpenVLAConfig
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.models.pi.modeling import PiModel
from embodrl.models.pi0_fast.codec import TINY_CODEC
from embodrl.models.registry import build_policy
from embodrl.models.smolvla.config import SmolVlaConfig
from embodrl.models.smolvla.modeling import SmolVlaModel

Shapes = dict[str, tuple[int, ...]]
SHARD_TENSORS = 400


def shapes_of(model: torch.nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def write_sparse(path: Path, shapes: Shapes, kind: str = "BF16") -> None:
    """Write a safetensors file of the right size whose content takes no room on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * {"BF16": 2, "F32": 4}[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + place)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_shards(directory: Path, shapes: Shapes) -> None:
    names = list(shapes)
    parts = [names[start : start + SHARD_TENSORS] for start in range(0, len(names), SHARD_TENSORS)]
    index: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_sparse(directory / file, {name: shapes[name] for name in part})
        index |= dict.fromkeys(part, file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def load(family: str, directory: Path, **changes: Any) -> tuple[Any, LoadReport]:
    values = {"model_type": family, "model_path": str(directory), "num_action_chunks": 5, **changes}
    policy, report = build_policy(
        model_settings(family).model_validate(values), device="meta", dtype=torch.bfloat16, seed=0
    )
    assert report.ok and all(parameter.is_meta for parameter in policy.parameters())
    assert not [name for name in report.initialized if not name.startswith("value_head.")]
    return policy, report


def num_parameters(policy: VLAPolicy) -> int:
    own = {id(p) for name in ("value_head",) for p in getattr(policy, name).parameters()}
    return sum(p.numel() for p in policy.parameters() if id(p) not in own)


# OpenVLA -------------------------------------------------------------------------------------------------------------

POSE = 7
QUANTILES = {"q01": [-1.0] * POSE, "q99": [1.0] * POSE, "mask": [*([True] * 6), False]}
LIBERO_QUANTILES = {**QUANTILES, "min": [*([-1.0] * 6), 0.0], "max": [1.0] * POSE}


@functools.cache
def openvla_shapes() -> Shapes:
    with torch.device("meta"):
        return shapes_of(OpenVLAModel(OpenVLAConfig.from_dict(OPENVLA), causal=True))


@pytest.fixture(scope="module")
def llama_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Llama's size; only the ids matter here."""
    path = tmp_path_factory.mktemp("llama") / "tokenizer.json"
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(32000)}, unk_token="t0")).save(str(path))
    return path


def write_openvla(directory: Path, tokenizer: Path, norm_stats: dict[str, Any], fine_tuned: dict[str, Any]) -> None:
    write_shards(directory, openvla_shapes())
    write_json(directory / "config.json", {**OPENVLA, "norm_stats": norm_stats})
    if fine_tuned:
        write_json(directory / "dataset_statistics.json", fine_tuned)
    (directory / "tokenizer.json").symlink_to(directory / "real.json")
    (directory / "real.json").write_bytes(tokenizer.read_bytes())


def test_openvla_7b(tmp_path: Path, llama_tokenizer: Path):
    stats = {"bridge_orig": {"action": QUANTILES}, "fractal20220817_data": {"action": QUANTILES}}
    write_openvla(tmp_path, llama_tokenizer, stats, {})
    policy, report = load("openvla", tmp_path, unnorm_key="bridge_orig", num_action_chunks=1)
    assert num_parameters(policy) == 7_541_237_184 and policy.stats.key == "bridge_orig"
    assert report.conventions["resizing"] == "bicubic (default)"
    changed, report = load(
        "openvla", tmp_path, unnorm_key="bridge_orig", num_action_chunks=1, resize_filter="lanczos_jpeg"
    )
    assert changed.processor.resize_filter == "lanczos_jpeg" and "setting" in report.conventions["resizing"]


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_10"])
def test_openvla_of_libero(suite: str, tmp_path: Path, llama_tokenizer: Path):
    write_openvla(tmp_path, llama_tokenizer, {}, {suite: {"action": LIBERO_QUANTILES}})
    policy, report = load(
        "openvla", tmp_path, unnorm_key=suite, num_action_chunks=1, gripper="libero", center_crop=True
    )
    assert num_parameters(policy) == 7_541_237_184 and policy.own_section()["resize_filter"] == "lanczos_jpeg"
    assert report.conventions["resizing"] == f"lanczos_jpeg (dataset {suite})"


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_10"])
def test_openvla_oft_of_libero(suite: str, tmp_path: Path, llama_tokenizer: Path):
    """Haozhan72's and RLinf's full models: the key has a suffix that commands leave out."""
    write_openvla(tmp_path, llama_tokenizer, {}, {f"{suite}_no_noops": {"action": LIBERO_QUANTILES}})
    policy, _ = load("openvla_oft", tmp_path, unnorm_key=suite, num_action_chunks=8, gripper="libero")
    assert num_parameters(policy) == 7_541_237_184 and policy.stats.key == f"{suite}_no_noops"


RLINFS_TARGETS = ("proj", "qkv", "fc1", "fc2", "fc3", "q", "kv", "q_proj", "k_proj", "v_proj", "o_proj")
RLINFS_TARGETS += ("gate_proj", "up_proj", "down_proj", "lm_head")


def write_openvla_adapters(directory: Path, rank: int = 32) -> int:
    """Write RLinf's and RL4VLA's adapters: of all layers whose last name is a target, one of them a convolution."""
    factors: Shapes = {}
    for name, shape in openvla_shapes().items():
        module = name.removesuffix(".weight")
        if module != name and module.rpartition(".")[2] in RLINFS_TARGETS:
            down, up = adapter_names(module)
            factors |= {down: (rank, *shape[1:]), up: (shape[0], rank, *([1] * (len(shape) - 2)))}
    write_sparse(directory / "adapter_model.safetensors", factors, "F32")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": list(RLINFS_TARGETS)}
    write_json(directory / "adapter_config.json", {**config, "init_lora_weights": "gaussian"})
    return len(factors) // 2


def test_rlinfs_oft_of_maniskill_base_and_adapters(tmp_path: Path, llama_tokenizer: Path):
    base, adapters = tmp_path / "base", tmp_path / "lora"
    base.mkdir()
    adapters.mkdir()
    write_openvla(base, llama_tokenizer, {"bridge_orig": {"action": QUANTILES}}, {})
    count = write_openvla_adapters(adapters)
    _, report = load("openvla_oft", base, lora_path=str(adapters), unnorm_key="bridge_orig", num_action_chunks=8)
    assert report.conventions["adapters"].startswith(f"{count} merged in float32")
    with raises_code("adapter-base"):
        load("openvla_oft", adapters)


# pi0 and pi0.5 -------------------------------------------------------------------------------------------------------

EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
HEADS = {
    "paligemma_with_expert.paligemma.lm_head.weight": 2048,
    "paligemma_with_expert.gemma_expert.lm_head.weight": 1024,
}
OPENPI = {
    "action_dim": 32,
    "action_horizon": 50,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
}
NUMBERS = {"mean": [0.0] * POSE, "std": [1.0] * POSE, "q01": [-1.0] * POSE, "q99": [1.0] * POSE}
STATE = {name: [*values, values[0]] for name, values in NUMBERS.items()}


@functools.cache
def pi_shapes(variant: Any) -> Shapes:
    with torch.device("meta"):
        return shapes_of(PiModel(PI[variant]))


def write_openpi(directory: Path, variant: str, folder: str, config: dict[str, Any]) -> None:
    """One file, with the tied embedding under the name of the output layer."""
    shapes = {name: shape for name, shape in pi_shapes(variant).items() if name != EMBEDDING}
    write_sparse(
        directory / "model.safetensors", {**shapes, **{name: (257152, width) for name, width in HEADS.items()}}
    )
    write_json(directory / folder / "norm_stats.json", {"norm_stats": {"state": STATE, "actions": NUMBERS}})
    if config:
        write_json(directory / "config.json", config)
    (directory / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())


LIBERO, METAWORLD = "physical-intelligence/libero", "lerobot/metaworld_mt50"
RELATIVE, IN_PROMPT = "action dimensions relative to the state", "state in prompt"
PADDING = "padding of the state in prompt"
PARAMETERS = {"pi0": 3_238_048_528, "pi05": 3_353_433_872}


@pytest.mark.parametrize(
    ("variant", "folder", "horizon", "conventions"),
    [
        ("pi0", LIBERO, 50, {RELATIVE: f"6 (dataset {LIBERO})"}),
        ("pi05", LIBERO, 10, {IN_PROMPT: f"no (dataset {LIBERO})"}),
        ("pi05", METAWORLD, 5, {IN_PROMPT: f"no (dataset {METAWORLD})"}),
        ("pi0", f"assets/{LIBERO}", 50, {RELATIVE: f"6 (dataset {LIBERO})"}),
        ("pi05", "assets/droid", 50, {IN_PROMPT: "yes (default of pi0.5)", PADDING: "no (openpi)"}),
    ],
)
def test_rlinfs_and_openpis_pi(variant: str, folder: str, horizon: int, conventions: dict[str, str], tmp_path: Path):
    write_openpi(tmp_path, variant, folder, {**OPENPI, "action_horizon": horizon})
    policy, report = load(variant, tmp_path)
    assert num_parameters(policy) == PARAMETERS[variant] and conventions.items() <= report.conventions.items()
    assert policy.processor.config.antialias
    assert policy.model.state_dict()["action_out_proj.weight"].dtype == torch.float32


def test_the_output_of_openpis_train_pytorch(tmp_path: Path):
    write_openpi(tmp_path, "pi0", f"assets/{LIBERO}", {})
    with raises_code("policy-file") as refused:
        load("pi0", tmp_path)
    stated = refused.value.hint[refused.value.hint.index("{") :].partition("}")[0] + "}"
    write_json(tmp_path / "config.json", json.loads(stated))
    load("pi0", tmp_path)


@pytest.mark.parametrize(
    ("version", "config", "train", "padded"),
    [
        ("0.4", {"rtc_config": None}, {}, "yes"),
        ("0.5", {"rtc_config": None, "use_relative_actions": False}, {"cudnn_deterministic": False}, "no"),
    ],
)
@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_lerobots_pi(
    variant: str, version: str, config: dict[str, Any], train: dict[str, Any], padded: str, tmp_path: Path
):
    shapes = {f"model.{name}": shape for name, shape in pi_shapes(variant).items()}
    write_sparse(tmp_path / "model.safetensors", shapes, "F32")
    features = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 224, 224]} for name in ("image", "image2")
    }
    write_json(tmp_path / "config.json", {"type": variant, "chunk_size": 50, "input_features": features, **config})
    write_json(tmp_path / "train_config.json", train)
    mode = "MEAN_STD" if variant == "pi0" else "QUANTILES"
    normalizer = {
        "registry_name": "normalizer_processor",
        "config": {"eps": 1e-8, "norm_map": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}},
        "state_file": "policy_preprocessor_step_2_normalizer_processor.safetensors",
    }
    write_json(tmp_path / "policy_preprocessor.json", {"steps": [normalizer]})
    parts = {"observation.state": STATE, "action": NUMBERS}
    tensors = {f"{part}.{name}": torch.tensor(v) for part, numbers in parts.items() for name, v in numbers.items()}
    save_file(tensors, tmp_path / normalizer["state_file"])
    (tmp_path / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    policy, report = load(variant, tmp_path)
    assert num_parameters(policy) == PARAMETERS[variant]
    assert not policy.processor.config.antialias and "lerobot" in report.conventions["antialiased resizing"]
    assert load(variant, tmp_path, pi={"antialias": True})[0].processor.config.antialias
    kept = policy.processor.prompt("push_it", np.zeros(1)) != policy.processor.prompt("push it", np.zeros(1))
    assert kept == (variant == "pi0") == ("instructions cleaned" in report.conventions)
    if variant == "pi05":
        assert report.conventions[PADDING].startswith(padded), version


def test_lerobots_peft_over_pi05_base(tmp_path: Path):
    """Adapters, config.json and statistics of the fine-tuning lie in one directory, the base in another."""
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    for place in (base, tuned):
        place.mkdir()
    write_openpi(base, "pi05", "assets/droid", OPENPI)
    layers = [
        f"paligemma_with_expert.gemma_expert.model.layers.{i}.self_attn.{q}_proj" for i in range(18) for q in "qv"
    ]
    factors: Shapes = {}
    for module in (*layers, "action_in_proj", "action_out_proj"):
        rows, columns = pi_shapes("pi05")[f"{module}.weight"]
        down, up = adapter_names(f"model.{module}")
        factors |= {down: (16, columns), up: (rows, 16)}
    write_sparse(tuned / "adapter_model.safetensors", factors, "F32")
    write_json(
        tuned / "adapter_config.json", {"peft_type": "LORA", "r": 16, "base_model_name_or_path": "lerobot/pi05_base"}
    )
    write_json(
        tuned / "config.json", {"type": "pi05", "chunk_size": 30, "use_peft": True, "use_relative_actions": False}
    )
    mode = {
        "registry_name": "normalizer_processor",
        "config": {"norm_map": {"STATE": "IDENTITY", "ACTION": "IDENTITY"}},
    }
    write_json(tuned / "policy_preprocessor.json", {"steps": [mode]})
    policy, report = load("pi05", base, lora_path=str(tuned))
    assert policy.horizon == 30 and "of the adapters" in report.conventions["config.json"]
    assert report.conventions["adapters"].startswith("38 merged in float32")
    assert report.conventions["adapters"].endswith("trained on lerobot/pi05_base")


# pi0-FAST ------------------------------------------------------------------------------------------------------------

TEXT_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"


def pi0_fast_shapes(stored: Collection[str] = (TEXT_HEAD,)) -> Shapes:
    """PaliGemma's, with the tied embedding under one name or two."""
    shapes = {name: shape for name, shape in pi_shapes("pi05").items() if ".paligemma." in name and name != EMBEDDING}
    shapes |= dict.fromkeys(sorted(stored), (257152, 2048))
    return {f"model.{name}": shape for name, shape in shapes.items()}


def write_pi0_fast(directory: Path, stored: set[str], changes: dict[str, Any], mode: str) -> None:
    """Of lerobot/pi0fast-base and fine-tunes: PaliGemma's weights, processor files, no tokenizer of text."""
    write_sparse(directory / "model.safetensors", pi0_fast_shapes(stored))
    pictures = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 224, 224]} for name in ("base", "wrist")}
    settings = {"chunk_size": 10, "n_action_steps": 10, "max_decoding_steps": 256, "input_features": pictures}
    write_json(directory / "config.json", {"type": "pi0_fast", **settings, **changes})
    write_json(directory / "train_config.json", {})
    normalizer = {
        "registry_name": "normalizer_processor",
        "config": {"eps": 1e-8, "norm_map": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}},
        "state_file": "policy_preprocessor_step_3_normalizer_processor.safetensors",
    }
    write_json(directory / "policy_preprocessor.json", {"steps": [normalizer]})
    parts = {"observation.state": STATE, "action": NUMBERS}
    tensors = {f"{part}.{name}": torch.tensor(v) for part, numbers in parts.items() for name, v in numbers.items()}
    save_file(tensors, directory / str(normalizer["state_file"]))
    (directory / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    shutil.copytree(TINY_CODEC, directory / "action_tokenizer")


@pytest.mark.parametrize(
    ("version", "stored", "changes", "mode", "padded", "parameters"),
    [
        ("0.4", {TEXT_HEAD}, {"rtc_config": None}, "QUANTILES", "yes", 2_923_335_408),
        ("0.6", {TEXT_HEAD, EMBEDDING}, {"use_relative_actions": False}, "MEAN_STD", "no", 3_449_982_704),
    ],
)
def test_lerobots_pi0_fast(
    version: str, stored: set[str], changes: dict[str, Any], mode: str, padded: str, parameters: int, tmp_path: Path
):
    write_pi0_fast(tmp_path, stored, changes, mode)
    policy, report = load("pi0_fast", tmp_path)
    assert num_parameters(policy) == parameters and policy.model.config.tied == (version == "0.4")
    assert report.conventions[PADDING].startswith(padded) and not policy.processor.config.antialias
    assert policy.processor.config.normalization.actions == mode.lower() and policy.action_horizon == 10
    assert policy.max_tokens == 256 and policy.get_buffer("_choices")[:2].tolist() == [257023, 257022]
    dtypes = {name: value.dtype for name, value in policy.model.state_dict().items()}
    assert dtypes["paligemma_with_expert.paligemma.model.language_model.norm.weight"] == torch.float32
    assert dtypes[EMBEDDING] == torch.bfloat16


def test_relative_actions_of_pi0_fast_are_refused(tmp_path: Path):
    write_pi0_fast(tmp_path, {TEXT_HEAD}, {"use_relative_actions": True}, "QUANTILES")
    with raises_code("checkpoint-unsupported"):
        load("pi0_fast", tmp_path)


# SmolVLA -------------------------------------------------------------------------------------------------------------


def smolvla_shapes(config: Path) -> Shapes:
    with torch.device("meta"):
        shapes = shapes_of(SmolVlaModel(SmolVlaConfig.read(config)))
    public = "model.vlm_with_expert.vlm.model.vision_model."
    return {
        f"model.{n}".replace("model.vlm_with_expert.vlm.model.vision_tower.vision_model.", public): s
        for n, s in shapes.items()
    }


def test_smolvla_base(tmp_path: Path):
    write_json(tmp_path / "config.json", {"type": "smolvla", "chunk_size": 50})
    named = smolvla_shapes(tmp_path / "config.json")
    write_sparse(tmp_path / "model.safetensors", {**named, "model.vlm_with_expert.vlm.lm_head.weight": (49280, 960)})
    normalizer = {
        "registry_name": "normalizer_processor",
        "config": {"norm_map": {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}},
    }
    write_json(tmp_path / "policy_preprocessor.json", {"steps": [{**normalizer, "state_file": "stats.safetensors"}]})
    parts = {"observation.state": STATE, "action": NUMBERS}
    save_file(
        {f"{part}.{name}": torch.tensor(v) for part, numbers in parts.items() for name, v in numbers.items()},
        tmp_path / "stats.safetensors",
    )
    (tmp_path / "tokenizer.json").write_bytes(TINY_TOKENIZER.read_bytes())
    policy, report = load("smolvla", tmp_path)
    assert num_parameters(policy) + 49280 * 960 == pytest.approx(450e6, rel=1e-3)
    assert report.ignored == {"model.vlm_with_expert.vlm.lm_head.weight": "the policy writes no text"}


# GR00T ---------------------------------------------------------------------------------------------------------------


@functools.cache
def gr00t_shapes() -> Shapes:
    with torch.device("meta"):
        return shapes_of(Gr00tModel(Gr00tConfig.from_dict(GR00T, {})))


def ranges(*names: str, dims: Callable[[str], int] = lambda name: 1) -> dict[str, Any]:
    return {name: {"min": [-1.0] * dims(name), "max": [1.0] * dims(name)} for name in names}


def write_gr00t(directory: Path, robot: str, state: dict[str, Any], action: dict[str, Any]) -> None:
    write_shards(directory, gr00t_shapes())
    write_json(directory / "config.json", GR00T)
    statistics = {"state": state, "action": action}
    write_json(directory / "experiment_cfg" / "metadata.json", {robot: {"statistics": statistics}})
    tiny_chat_tokenizer().save(directory)


POSES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


@pytest.mark.parametrize("robot", ["libero_franka", "isaaclab_franka"])
def test_rlinfs_gr00t(robot: str, tmp_path: Path):
    shuffled = POSES[::-1]  # the order of the file does not matter
    state = ranges(*shuffled, dims=lambda name: 2 if name == "gripper" else 1)
    write_gr00t(tmp_path, robot, state, ranges(*shuffled))
    policy, report = load("gr00t", tmp_path, num_action_chunks=16)
    assert num_parameters(policy) == 2_724_163_520 and policy.embodiment == 31
    assert [key.name for key in policy.stats.keys] == list(POSES) and policy.processor.state_stats.dims == 8
    assert report.conventions[f"keys of {robot}"] == f"data configuration of {robot}"


def test_gr00t_n1_5_3b_asks_for_the_keys_of_a_robot(tmp_path: Path):
    hands = {
        "left_arm": 7,
        "right_arm": 7,
        "left_hand": 6,
        "right_hand": 6,
        "waist": 3,
        "left_leg": 6,
        "right_leg": 6,
        "neck": 3,
    }
    parts = ranges(*hands, dims=hands.__getitem__)
    write_gr00t(tmp_path, "gr1", parts, parts)
    with raises_code("gr00t-keys") as refused:
        load("gr00t", tmp_path, num_action_chunks=16, action_dim=44)
    action = ("left_arm", "right_arm", "left_hand", "right_hand")
    assert f"[{','.join(action)}]" in refused.value.hint
    keys = {"action_keys": action, "state_keys": tuple(f"{name}:sin_cos" for name in action)}
    policy, _ = load("gr00t", tmp_path, num_action_chunks=16, action_dim=26, gr00t=keys)
    assert policy.processor.state_stats.width == 52 and policy.embodiment == 24


@functools.cache
def gr00t_n1_7_shapes() -> Shapes:
    with torch.device("meta"):
        return shapes_of(Gr00tN17Model(Gr00tN17Config.from_dict(GR00T_N1_7, sidecars())))


@pytest.mark.parametrize("stored", ["tied", "both", "output layer"])
def test_gr00t_n1_7_of_libero(stored: str, tmp_path: Path):
    """Qwen's output layer is its embedding: writers leave one of them out, or neither."""
    embedding, head = "backbone.model.model.language_model.embed_tokens.weight", "backbone.model.lm_head.weight"
    shapes = {**gr00t_n1_7_shapes()}
    shapes |= {} if stored == "tied" else {head: shapes[embedding]}
    if stored == "output layer":
        del shapes[embedding]
    write_shards(tmp_path, shapes)
    files = {"config": GR00T_N1_7, "processor_config": PROCESSOR, "statistics": STATISTICS}
    for name, content in {**files, "embodiment_id": {"libero_sim": 2}}.items():
        write_json(tmp_path / f"{name}.json", content)
    tiny_chat_tokenizer(QwenTokenizer).save(tmp_path)
    policy, report = load("gr00t_n1_7", tmp_path, num_action_chunks=8, gripper="libero")
    assert num_parameters(policy) == 3_144_016_000 + (151936 * 2048 if stored == "both" else 0)
    assert (policy.embodiment, policy.horizon, policy.action_horizon) == (2, 40, 16)
    assert "the middle 243" in report.conventions["images"]
    with raises_code("checkpoint-family") as refused:
        load("gr00t", tmp_path)
    assert refused.value.hint == "set model.model_type=gr00t_n1_7"
