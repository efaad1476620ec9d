"""Damaged, doubled and foreign tensors in the files of every family, and what a refusal tells."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file
from tiny_families import FLOW_FAMILIES, NETWORKS, SIGLIP, TINY, tiny_config
from torch import Tensor, nn

from embodrl.config import load_config
from embodrl.errors import CheckpointError
from embodrl.models.common import checkpoint
from embodrl.models.load_report import LoadReport
from embodrl.models.registry import build_policy
from embodrl.workers import policy as policy_worker

WEIGHTS = "model.safetensors"
LAYERS = ("LlamaLayer", "Qwen3DecoderLayer", "GemmaLayer", "Block", "SiglipEncoderLayer")


def build(family: str, method: str | None = None, **changes: object) -> tuple[object, LoadReport]:
    return build_policy(tiny_config(family, method, **changes), device="cpu", dtype=torch.float32, seed=0)


@pytest.fixture(params=NETWORKS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    policy, _ = build(request.param)
    policy.save_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    return request.param, tmp_path / "saved"


def change(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_files_have_the_modes_of_the_umask(saved: tuple[str, Path]) -> None:
    """safetensors' own writer makes files that only their owner can read."""
    umask = os.umask(0o022)
    os.umask(umask)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in saved[1].rglob("*") if path.is_file()}
    assert set(modes.values()) == {oct(0o666 & ~umask)}, modes


def test_a_refusal_carries_the_whole_report(saved: tuple[str, Path]) -> None:
    family, directory = saved
    names = sorted(load_file(directory / WEIGHTS))
    lost = [name for name in names if "blocks" in name or "layers" in name][:8]

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in lost:
            del tensors[name]
        tensors["stranger"] = torch.zeros(1)

    change(directory / WEIGHTS, edit)
    with raises_code("weights-mismatch", CheckpointError, "stranger") as caught:
        build(family, model_path=str(directory))
    report = caught.value.report
    assert isinstance(report, LoadReport) and not report.ok
    lost = [name.removeprefix("model.") for name in lost]  # lerobot's level of names around the network
    assert set(report.missing) == set(lost) and report.unexpected == ["stranger"]
    assert all(name in str(caught.value) for name in lost), "eight names are not too many to be listed"


def test_integers_are_no_weights(saved: tuple[str, Path]) -> None:
    family, directory = saved
    name = next(name for name in sorted(load_file(directory / WEIGHTS)) if name.endswith("proj.weight"))
    change(directory / WEIGHTS, lambda tensors: tensors.update({name: tensors[name].to(torch.int32)}))
    with raises_code("weights-quantised", CheckpointError, "int32"):
        build(family, model_path=str(directory))


def test_two_names_for_one_weight_are_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "model.weight": torch.zeros(2, 2)}, tmp_path / "w.safetensors")
    layer = nn.Linear(2, 2, bias=False)
    with raises_code("policy-file", CheckpointError, "weight"):
        checkpoint.load_strict(
            layer,
            [tmp_path / "w.safetensors"],
            LoadReport("here"),
            device="cpu",
            dtype=torch.float32,
            aliases={"model.weight": "weight"},
        )


@pytest.mark.parametrize("damage", ["lost", "renamed"])
def test_a_damaged_value_head_is_refused(saved: tuple[str, Path], damage: str) -> None:
    family, directory = saved

    def edit(tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop("hidden.0.bias")
        if damage == "renamed":
            tensors["hidden.0.offset"] = tensor

    change(directory / "value_head.safetensors", edit)
    with raises_code("weights-mismatch", CheckpointError, "hidden.0.bias"):
        build(family, model_path=str(directory))


def test_a_whole_value_head_of_another_shape_is_replaced(saved: tuple[str, Path]) -> None:
    family, directory = saved
    _, report = build(family, model_path=str(directory), value_head={"hidden_sizes": (16, 8)})
    assert "another shape" in report.ignored["value_head.safetensors"]
    assert "value_head.hidden.1.weight" in report.initialized


@pytest.mark.parametrize("family", FLOW_FAMILIES)
def test_a_damaged_noise_head_is_refused(family: str, tmp_path: Path) -> None:
    policy, _ = build(family, "flow_noise")
    policy.save_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    change(tmp_path / "saved" / "noise_head.safetensors", lambda tensors: tensors.pop("layers.1.weight"))
    with raises_code("weights-mismatch", CheckpointError, "layers.1.weight"):
        build(family, "flow_noise", model_path=str(tmp_path / "saved"))


@pytest.mark.parametrize("source", ["model_path", "warm_start"])
def test_a_bidirectional_policy_is_not_run_causally(source: str, tmp_path: Path) -> None:
    policy, _ = build("openvla_oft")
    policy.save_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    with raises_code("checkpoint-family", CheckpointError, "openvla_oft"):
        build("openvla", **{source: str(tmp_path / "saved")})


@pytest.mark.parametrize("family", NETWORKS)
def test_gradient_checkpointing_runs_every_layer_again(family: str) -> None:
    """As training builds the policy; the layers of transformers recompute only in training mode."""
    arguments = [f"model={family}", "model.warm_start=null", "actor.gradient_checkpointing=true", "cluster.device=cpu"]
    config = load_config(["env=toy", *arguments]).config
    policy = policy_worker.build_policy(config.model_copy(update={"model": tiny_config(family)}))
    calls: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[name] = calls.get(name, 0) + 1

        return hook

    for name, module in policy.named_modules():
        if type(module).__name__ in (
            "LlamaLayer",
            "Qwen3DecoderLayer",
            "Qwen3VLTextDecoderLayer",
            "GemmaLayer",
            "DecoderLayer",
            "Block",
            "SiglipEncoderLayer",
        ):
            module.register_forward_pre_hook(count(name))
    from test_model_contracts import observation

    policy.sft_loss(policy.sft_inputs(observation(family, 2), torch.zeros(2, policy.action_horizon, 7)))[0].backward()
    language = {name: number for name, number in calls.items() if "language_model" in name or "text_model" in name}
    assert language and set(language.values()) <= {2}, calls


@pytest.mark.parametrize("family", NETWORKS)
def test_a_warm_start_of_another_size_is_refused_by_dimension(family: str, tmp_path: Path) -> None:
    policy, _ = build(family)
    policy.save_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    section = {"pi0": "pi", "pi05": "pi", "openvla": "architecture", "openvla_oft": "architecture"}.get(family, family)
    part = "vision" if family == "gr00t_n1_7" else "siglip"
    wider = {**TINY[section], part: {**SIGLIP, "mlp_dim": 40}}
    with raises_code("warm-start-size", CheckpointError, f"{part}.mlp_dim", 24, 40, f"model.{section}"):
        build(family, warm_start=str(tmp_path / "saved"), **{section: wider})
