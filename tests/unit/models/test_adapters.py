"""Adapters in peft's layout, written by peft itself, over the weights of a base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES, NETWORKS, STATE_DIM, build, generator, observation, tiny_config

from embodrl.config import load_config
from embodrl.errors import ConfigError
from embodrl.models.common.adapters import adapter_names
from embodrl.models.common.merging import ADAPTER, merged_state_dict
from embodrl.models.load_report import LoadReport
from embodrl.models.registry import build_policy
from embodrl.types import SamplingParams

TARGETS = {
    "openvla": ["qkv", "proj", "fc1", "q_proj", "down_proj", "lm_head"],  # proj is of the patches too: a convolution
    "openvla_oft": ["q_proj", "v_proj", "fc3"],
    "pi0": r".*gemma_expert.*(q|v)_proj|state_proj|action_in_proj",
    "pi05": "all-linear",
    "gr00t": ["q_proj", "to_q", "linear"],
    "gr00t_n1_7": ["qkv", "linear_fc1", "to_q"],
    "smolvla": r".*lm_expert.*(q|v)_proj|action_out_proj",
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved policy of each family, as base."""
    places: dict[str, Path] = {}
    for family in FAMILIES:
        places[family] = tmp_path_factory.mktemp("bases") / family
        build(family).save_pretrained(places[family])
    return places


def network_of(family: str, base: Path) -> Any:
    network: Any = build(family, warm_start=str(base)).model
    network.config = {}  # peft looks for that of a transformers model
    return network


def write_adapters(family: str, base: Path, directory: Path, targets: Any = None, **settings: Any) -> Any:
    """Let peft adapt the network of a base and save that; return peft's model."""
    network = network_of(family, base)
    config = peft.LoraConfig(
        **{"r": 2, "lora_alpha": 3, "target_modules": targets or TARGETS.get(family, "all-linear"), **settings}
    )
    adapted = peft.get_peft_model(network, config)
    source = generator(5)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save.default" in name:
            parameter.data.normal_(0.0, 0.3, generator=source)
    adapted.save_pretrained(str(directory))
    return adapted


def load(
    family: str, base: Path, place: Path, dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[Any, LoadReport]:
    config = tiny_config(family, warm_start=str(base), lora_path=str(place), **changes)
    return build_policy(config, device="cpu", dtype=dtype, seed=4)


@pytest.mark.parametrize("family", NETWORKS)
def test_merged_as_peft_merges(family: str, bases: dict[str, Path], tmp_path: Path):
    adapted = write_adapters(family, bases[family], tmp_path)
    policy, report = load(family, bases[family], tmp_path)
    wanted = adapted.merge_and_unload().state_dict()
    found = policy.model.state_dict()
    assert found.keys() == wanted.keys() and report.ok
    changed = 0
    before = build(family, warm_start=str(bases[family])).model.state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
        changed += not torch.equal(value, before[name])
    assert changed >= 3 and report.conventions["adapters"].startswith(f"{changed} merged in float32 from {tmp_path}")


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"rank_pattern": {"layers.1.self_attn.q_proj": 3}, "alpha_pattern": {"v_proj": 7}},
        {"modules_to_save": ["fc3"]},
        {"bias": "lora_only", "target_modules": ["fc1"]},
    ],
)
def test_scales_ranks_and_whole_modules(settings: dict[str, Any], bases: dict[str, Path], tmp_path: Path):
    targets = settings.pop("target_modules", ["q_proj", "v_proj"])
    adapted = write_adapters("openvla", bases["openvla"], tmp_path, targets, **settings)
    policy, _ = load("openvla", bases["openvla"], tmp_path)
    for name, value in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(policy.model.state_dict()[name], value, rtol=0, atol=1e-6)


def test_the_sum_is_rounded_once(bases: dict[str, Path], tmp_path: Path):
    adapted = write_adapters("openvla", bases["openvla"], tmp_path)
    policy, _ = load("openvla", bases["openvla"], tmp_path, torch.bfloat16)
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    wanted = adapted.merge_and_unload().state_dict()[name]
    assert torch.equal(policy.model.state_dict()[name], wanted.to(torch.bfloat16))


def test_adapters_continue_training(bases: dict[str, Path], tmp_path: Path):
    """Those of LoRA layers keep their values, those of other layers (a convolution, a head left out) are merged."""
    adapted = write_adapters("openvla", bases["openvla"], tmp_path)
    policy, report = load(
        "openvla", bases["openvla"], tmp_path, trainable="lora", lora={"rank": 2, "alpha": 2}, freeze_vision=True
    )
    own = policy.model.language_model.model.layers[0].self_attn.q_proj
    theirs = adapted.base_model.model.language_model.model.layers[0].self_attn.q_proj
    assert torch.equal(own.lora_A[ADAPTER].weight, theirs.lora_A["default"].weight)
    torch.testing.assert_close(own.lora_B[ADAPTER].weight, theirs.lora_B["default"].weight * 1.5)  # 3/2 against 2/2
    wanted = adapted.merge_and_unload().state_dict()
    for name, value in merged_state_dict(policy.model).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-6)
    assert (
        "continue training" in report.conventions["adapters"] and "merged in float32" in report.conventions["adapters"]
    )
    assert not hasattr(policy.model.vision_backbone.featurizer.blocks[0].attn.qkv, "lora_A")


def test_another_rank_is_merged_and_new_adapters_train(bases: dict[str, Path], tmp_path: Path):
    adapted = write_adapters("pi0", bases["pi0"], tmp_path)
    policy, report = load("pi0", bases["pi0"], tmp_path, trainable="lora", lora={"rank": 4})
    wanted = adapted.merge_and_unload().state_dict()
    for name, value in merged_state_dict(policy.model).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-6)
    assert "train" not in report.conventions["adapters"].partition(" from ")[0]


def test_actions_change(bases: dict[str, Path], tmp_path: Path):
    write_adapters("pi0", bases["pi0"], tmp_path)
    policy, _ = load("pi0", bases["pi0"], tmp_path)
    plain = build("pi0", warm_start=str(bases["pi0"]))
    seen = observation("pi0")
    assert seen.state.shape[1] == STATE_DIM
    found, wanted = (
        p.eval().predict_action_batch(seen, "eval", SamplingParams(), generator()).actions for p in (policy, plain)
    )
    assert (found != wanted).any()


def test_lerobots_names_over_openpis(bases: dict[str, Path], tmp_path: Path):
    """lerobot wraps the policy, whose network is its attribute ``model``; the base may be in openpi's layout."""
    wrapped = torch.nn.Module()
    wrapped.model = network_of("pi0", bases["pi0"])
    adapted = peft.get_peft_model(wrapped, peft.LoraConfig(r=2, target_modules=TARGETS["pi0"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator(1))
    adapted.save_pretrained(str(tmp_path))
    assert all(name.startswith("base_model.model.model.") for name in load_file(tmp_path / "adapter_model.safetensors"))
    policy, _ = load("pi0", bases["pi0"], tmp_path)
    wanted = adapted.merge_and_unload().state_dict()
    for name, value in policy.model.state_dict().items():
        torch.testing.assert_close(value, wanted[f"model.{name}"], rtol=0, atol=1e-6)


def test_statistics_of_the_fine_tuning_are_beside_the_adapters(bases: dict[str, Path], tmp_path: Path):
    """As RL4VLA and OpenVLA-OFT write them."""
    write_adapters("openvla", bases["openvla"], tmp_path)
    ranges = {"q01": [-2.0] * 7, "q99": [2.0] * 7}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"sft": {"action": ranges}}))
    policy, report = load("openvla", bases["openvla"], tmp_path, unnorm_key="sft")
    assert policy.stats.key == "sft" and "adapters" in report.conventions["dataset_statistics.json"]


def test_peft_may_store_an_adapted_output_layer_as_well(bases: dict[str, Path], tmp_path: Path):
    """As with ``lm_head`` among the targets of a transformers model (RL4VLA)."""
    adapted = write_adapters("openvla", bases["openvla"], tmp_path, ["lm_head"])
    whole = adapted.base_model.model.language_model.lm_head.base_layer.weight.data.clone().normal_()
    edit(tmp_path, lambda t: t.update({"base_model.model.language_model.lm_head.base_layer.weight": whole}))
    adapted.base_model.model.language_model.lm_head.base_layer.weight.data.copy_(whole)
    wanted = adapted.merge_and_unload().state_dict()["language_model.lm_head.weight"]
    for changes in ({}, {"trainable": "lora", "lora": {"rank": 2}}):
        policy, _ = load("openvla", bases["openvla"], tmp_path, **changes)
        found = merged_state_dict(policy.model)["language_model.lm_head.weight"]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


# What would act wrongly is refused -----------------------------------------------------------------------------------


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"peft_type": "LOHA"}, "adapter-variant"),
        ({"use_dora": True}, "adapter-variant"),
        ({"fan_in_fan_out": True}, "adapter-variant"),
        ({"init_lora_weights": "pissa_niter_16"}, "adapter-variant"),
        ({"layer_replication": [[0, 2]]}, "adapter-variant"),
        ({"r": 4}, "policy-file"),
        ({"r": 0}, "policy-file"),
        ({"lora_alpha": "16"}, "policy-file"),
        ({"alpha_pattern": {".*(q|v)_proj": 3}}, "policy-file"),
    ],
)
def test_variants(changes: dict[str, Any], code: str, bases: dict[str, Path], tmp_path: Path):
    write_adapters("openvla", bases["openvla"], tmp_path, ["q_proj"])
    change_config(tmp_path, **changes)
    with raises_code(code):
        load("openvla", bases["openvla"], tmp_path)


def edit(directory: Path, change: Any) -> None:
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


STEM = "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (lambda t: t.update({f"{STEM}A.weight": torch.zeros(2, 31)}), "adapter-size", "[32, 31], the base model's"),
        (lambda t: t.update({f"{STEM}magnitude_vector": torch.zeros(32)}), "adapter-leftover", "magnitude_vector"),
        (lambda t: t.update({name: torch.eye(2) for name in adapter_names("nowhere")}), "adapter-leftover", "nowhere"),
        (lambda t: t.pop(f"{STEM}B.weight"), "policy-file", "the rank of"),
        (lambda t: t.pop(f"{STEM}A.weight"), "policy-file", "without its first factor"),
        (lambda t: t[f"{STEM}A.weight"].fill_(float("nan")), "weights-not-finite", "q_proj"),
    ],
)  # fmt: skip
def test_tensors(change: Any, code: str, named: str, bases: dict[str, Path], tmp_path: Path):
    write_adapters("openvla", bases["openvla"], tmp_path, ["q_proj"])
    edit(tmp_path, change)
    with raises_code(code) as error:
        load("openvla", bases["openvla"], tmp_path)
    assert named in str(error.value)


def test_pickled_adapters(bases: dict[str, Path], tmp_path: Path):
    write_adapters("openvla", bases["openvla"], tmp_path, ["q_proj"])
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with raises_code("weights-pickled") as error:
        load("openvla", bases["openvla"], tmp_path)
    assert "pickled adapters" in str(error.value)


def test_adapters_without_a_base(bases: dict[str, Path], tmp_path: Path):
    write_adapters("openvla", bases["openvla"], tmp_path, ["q_proj"])
    with raises_code("adapter-base"):
        build_policy(tiny_config("openvla", lora_path=str(tmp_path)), device="cpu", dtype=torch.float32, seed=0)
    with raises_code("adapters-exist", ConfigError):
        load_config(["model=openvla", "model.warm_start=null", f"model.lora_path={tmp_path}"])
    with raises_code("adapters-exist", ConfigError):
        load_config(["model=openvla", f"model.lora_path={bases['openvla']}"])
    (tmp_path / "config.json").write_text((bases["openvla"] / "config.json").read_text())  # as lerobot writes one
    with raises_code("checkpoint-exists", ConfigError) as refused:
        load_config(["model=openvla", f"model.model_path={tmp_path}"])
    [problem] = [p for p in refused.value.problems if p.key == "model.model_path"]
    assert f"model.lora_path={tmp_path}" in (problem.hint or "")
    (tmp_path / "tokenizer.json").write_bytes((bases["openvla"] / "tokenizer.json").read_bytes())
    config = tiny_config("openvla", model_path=str(tmp_path))
    with raises_code("adapter-base"):
        build_policy(config, device="cpu", dtype=torch.float32, seed=0)
