"""What is saved of low-rank adapters acts as what was trained (H8 of the audit)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file
from tiny_families import FAMILIES, observation, tiny_config

from embodrl.config import load_config
from embodrl.errors import OutputError
from embodrl.models.base import VLAPolicy
from embodrl.models.common import lora, merging
from embodrl.models.common.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from embodrl.models.registry import build_policy
from embodrl.runs.policies import _weights_of
from embodrl.trainer.files import ADAPTERS_DIR, POLICY_DIR, check_disk_space, export_policy, exported_num_bytes
from embodrl.types import SamplingParams

LORA = {"trainable": "lora", "lora": {"rank": 2, "alpha": 3}}
BF16 = torch.bfloat16


def made(family: str, dtype: torch.dtype = BF16, **changes: Any) -> Any:
    config = tiny_config(family, **changes)
    return build_policy(config, device="cpu", dtype=dtype, seed=3)[0].eval()


def trained(family: str, base: Path, dtype: torch.dtype = BF16) -> Any:
    """Return a policy over saved weights whose adapters have learned a little."""
    made(family, dtype, warm_start=None).save_pretrained(base)
    policy = made(family, dtype, warm_start=str(base), **LORA)
    generator = torch.Generator().manual_seed(1)  # products of about 2e-4 in weights of 0.18
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 3e-4, generator=generator)
    return policy


@torch.no_grad()
def logprobs(policy: VLAPolicy, family: str) -> torch.Tensor:
    with torch.autocast("cpu", dtype=BF16):
        output = policy.predict_action_batch(
            observation(family, 3), "train", SamplingParams(), torch.Generator().manual_seed(0)
        )
    return output.logprobs


@pytest.mark.parametrize(
    "family",
    [
        "openvla",
        "pi05",
        *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name not in ("openvla", "pi05")),
    ],
)
def test_adapters_apart_act_bit_exactly_and_are_read_by_peft(family: str, tmp_path: Path) -> None:
    policy = trained(family, tmp_path / "base")
    lora.save_adapters(policy, tmp_path / "apart", str(tmp_path / "base"))
    again = made(family, warm_start=str(tmp_path / "base"), lora_path=str(tmp_path / "apart"), **LORA)
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    np.testing.assert_array_equal(logprobs(policy, family), logprobs(again, family))

    settings = peft.LoraConfig.from_pretrained(str(tmp_path / "apart"))
    assert settings.base_model_name_or_path == str(tmp_path / "base") and settings.r == 2  # pyright: ignore
    assert settings.lora_alpha / settings.r == 1.5  # pyright: ignore
    stored = load_file(tmp_path / "apart" / ADAPTER_WEIGHTS)
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in stored}
    assert modules == set(settings.target_modules)  # pyright: ignore
    public = {name.rpartition(".")[0] for name in load_file(tmp_path / "base" / "model.safetensors")}
    assert modules <= public


def test_merged_weights_are_not_rounded(tmp_path: Path) -> None:
    policy = trained("openvla", tmp_path / "base")
    name = "language_model.model.layers.0.self_attn.q_proj"
    layer = policy.model.get_submodule(name)
    product = 1.5 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    base = layer.base_layer.weight
    merged = merging.merged_state_dict(policy.model)[f"{name}.weight"]
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged, base.float() + product, rtol=0, atol=1e-7)
    kept = merged - base.float()
    rounded = (base.float() + product).to(BF16).float() - base.float()
    close = torch.nn.functional.cosine_similarity
    assert close(kept.flatten(), product.flatten(), dim=0) > 0.9999
    assert close(rounded.flatten(), product.flatten(), dim=0) < 0.9  # what was exported before

    policy.save_pretrained(tmp_path / "merged")
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(stored[f"{name}.weight"], merged)
    assert stored["language_model.model.embed_tokens.weight"].dtype == BF16  # nothing was added to it


def test_a_run_keeps_adapters_apart_where_merging_would_round(tmp_path: Path) -> None:
    run = load_config(["env=toy", "model=openvla", "model.trainable=lora"]).config
    model = run.model.model_copy(update={"warm_start": str(tmp_path / "base")})
    run = run.model_copy(update={"model": model})
    export_policy(trained("openvla", tmp_path / "base"), tmp_path / "policy", run)
    card = json.loads((tmp_path / "policy" / ADAPTERS_DIR / ADAPTER_CONFIG).read_text())
    assert card["base_model_name_or_path"] == str(tmp_path / "base")
    listed = json.loads((tmp_path / "policy" / "checksums.json").read_text())
    assert f"{ADAPTERS_DIR}/{ADAPTER_WEIGHTS}" in listed
    assert _weights_of(run, tmp_path / "policy") == [f"model.lora_path='{tmp_path / 'policy' / ADAPTERS_DIR}'"]

    merged = [f"model.warm_start='{tmp_path / 'policy'}'"]
    gone = run.model_copy(update={"model": model.model_copy(update={"warm_start": str(tmp_path / "gone")})})
    assert _weights_of(gone, tmp_path / "policy") == merged

    # in float32 nothing is rounded, and there is but one form
    exact = trained("openvla", tmp_path / "base32", torch.float32)
    export_policy(exact, tmp_path / "exact", run)
    assert not (tmp_path / "exact" / ADAPTERS_DIR).exists()


def num_bytes(directory: Path) -> int:
    files = [load_file(path) for path in directory.rglob("*.safetensors")]
    return sum(tensor.numel() * tensor.element_size() for file in files for tensor in file.values())


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_the_space_of_an_exported_policy_is_known_before(dtype: torch.dtype, tmp_path: Path) -> None:
    run = load_config(["env=toy", "model=openvla", "model.trainable=lora"]).config
    policy = trained("openvla", tmp_path / "base", dtype)
    export_policy(policy, tmp_path / "policy", run)
    assert exported_num_bytes(policy) == num_bytes(tmp_path / "policy")
    assert num_bytes(tmp_path / "policy") > (1.5 if dtype == BF16 else 0.99) * num_bytes(tmp_path / "base")


def test_a_run_needs_space_for_checkpoints_and_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["env=toy", "model=openvla", "model.trainable=lora", "runner.keep_last_n=2"]).config
    policy = trained("openvla", tmp_path / "base")
    exported, state, run_dir = exported_num_bytes(policy), 1000, tmp_path / "run"

    def needs(num_bytes: int, **choices: Any) -> None:
        def have(free: int) -> None:
            usage = shutil.disk_usage(tmp_path)._replace(free=free)
            with monkeypatch.context() as patch:
                patch.setattr("embodrl.storage.checkpoint.shutil.disk_usage", lambda _: usage)
                check_disk_space(run_dir, config, policy, state, **choices)

        have(num_bytes)
        with raises_code("disk-space", OutputError):
            have(num_bytes - 1)

    needs(3 * state + exported, keep_best=False)
    needs(4 * state + 2 * exported, keep_best=True)
    needs(3 * state + exported + 500, keep_best=False, sent=500)
    (run_dir / "checkpoints" / "step_1").mkdir(parents=True)  # a resumed run needs what it lacks
    (run_dir / "checkpoints" / "step_1" / "policy.safetensors").write_bytes(bytes(state))
    needs(2 * state + exported, keep_best=False)
    (run_dir / POLICY_DIR).mkdir()
    (run_dir / POLICY_DIR / "model.safetensors").write_bytes(bytes(2 * state + exported))
    needs(exported, keep_best=False)  # beside the old policy


def test_what_has_no_adapters_can_not_be_written_apart(tmp_path: Path) -> None:
    with raises_code("adapters-not-apart"):
        lora.save_adapters(made("openvla", warm_start=None), tmp_path / "apart", "base")
    assert not (tmp_path / "apart").exists()


def test_vllm_in_bf16_with_adapters_is_noted() -> None:
    def noted(*arguments: str) -> bool:
        line = ["env=toy", "model=openvla", "rollout=vllm", *arguments]
        return "merged-adapters-act-rounded" in {note.code for note in load_config(line, verb="plan").notes}

    bf16 = ("rollout.precision=bf16", "actor.precision=bf16")
    assert noted("model.trainable=lora", *bf16) and not noted(*bf16)
    assert not noted("model.trainable=lora", "rollout.precision=fp32", "actor.precision=fp32")
