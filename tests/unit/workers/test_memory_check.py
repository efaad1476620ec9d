"""A model that can't fit is refused before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.errors import EmbodrlError
from embodrl.runs import evaluate as verb
from embodrl.serving import verb as serving
from embodrl.tools.model_tools.random_model import write_random_model
from embodrl.trainer.parts import check_machine
from embodrl.workers import parts, policy

GIB = 1 << 30


def check(monkeypatch: pytest.MonkeyPatch, memory_gib: float, *arguments: str) -> None:
    monkeypatch.setattr(policy, "memory_limit_bytes", lambda: int(memory_gib * GIB))
    loaded = load_config(["cluster.device=cpu", *arguments])
    policy.check_memory(loaded.config, loaded.deployment)


def test_a_7b_model_needs_more_than_a_laptop_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # 7.54 B weights in fp32, and as much again for gradients and each of two moments, without what never trains
    with raises_code("model-too-large", EmbodrlError, "fp32", "24 GiB") as caught:
        check(monkeypatch, 24, "model=openvla_7b")
    hint = caught.value.hint or ""
    assert "model.trainable=lora with actor.param_dtype=bf16" in hint
    check(monkeypatch, 128, "model=openvla_7b")
    # the copies and moments are in float32: 2 + 2 + 12 bytes a weight instead of 2 + 2 + 4
    with raises_code("model-too-large", EmbodrlError, "bf16"):
        check(monkeypatch, 24, "model=openvla_7b", "actor.param_dtype=bf16")
    with raises_code("model-too-large", EmbodrlError, "bf16"):
        check(monkeypatch, 24, "model=openvla_7b", "actor.param_dtype=bf16", "actor.optim.master_weights=false")


def test_an_evaluation_that_does_not_fit_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # 7.5 B weights, without what never runs, take four bytes each, or two; no gradients, no moments
    monkeypatch.setattr(policy, "memory_limit_bytes", lambda: 24 * GIB)
    monkeypatch.setattr(parts, "check_simulator", lambda config: pytest.fail("it has started"))
    loaded = load_config(
        ["cluster.device=cpu", "env=toy", "model=openvla_7b", "model.random_weights=true"], verb="eval"
    )
    with raises_code("model-too-large") as caught:
        verb.evaluate(loaded, output_dir=tmp_path / "eval")
    assert "the weights of openvla take 27 GiB in fp32" in str(caught.value)
    assert (caught.value.hint or "").startswith("set actor.param_dtype=bf16, or ")
    assert not (tmp_path / "eval").exists()
    bf16 = load_config(["cluster.device=cpu", "env=toy", "model=openvla_7b", "actor.param_dtype=bf16"])
    policy.check_memory(bf16.config, bf16.deployment, training=False)


@pytest.mark.parametrize("model", ["openvla", "openvla_oft", "pi0", "pi05", "gr00t", "gr00t_n1_7", "smolvla"])
def test_tiny_sizes_fit_anywhere(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    check(monkeypatch, 0.25, f"model={model}")


def test_a_warm_start_that_is_gone_does_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "config.json").write_text("{}")
    check(monkeypatch, 1, f"model.warm_start={tmp_path / 'warm'}")


@pytest.mark.parametrize(
    ("model", "section", "cameras"),
    [("gr00t", "gr00t", 1), ("gr00t_n1_7", "gr00t_n1_7", 2), ("openvla", "architecture", 1)],
)
def test_prompts_that_do_not_fit_are_refused_before_the_weights_are_loaded(
    model: str, section: str, cameras: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with a stand-in tokenizer, whose prompts are longer; the tasks' instructions are known without a simulator."""
    write_random_model(model, tmp_path / "made", "tiny")
    views = [f"{{name: {name}, height: 64, width: 64}}" for name in ("agentview", "wrist")[:cameras]]
    given = (f"model={model}", f"model.model_path={tmp_path / 'made'}", "env.include_state=true")
    here = ("env=libero_10", f"env.cameras=[{', '.join(views)}]", *given)
    check(monkeypatch, 1, *here, f"model.{section}.max_prompt_tokens=200")
    with raises_code("prompt-too-long", EmbodrlError, "at most 30 fit"):
        check(monkeypatch, 1, *here, f"model.{section}.max_prompt_tokens=30")


@pytest.mark.parametrize(
    "settings",
    [
        ["model=openvla_oft", "model.warm_start=null", "model.action_head=l1", "env.eval.decoding=sampled"],
        ["model=openvla", "algorithm=residual", "env.eval.decoding=mean"],
    ],
)
def test_a_decoding_that_the_policy_lacks_is_refused_before_simulators_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: list[str]
) -> None:
    monkeypatch.setattr(parts, "check_simulator", lambda config: pytest.fail("it has started"))
    loaded = load_config(["cluster.device=cpu", "env=toy", "model.random_weights=true", *settings], verb="eval")
    with raises_code("policy-has-no-decoding"):
        verb.evaluate(loaded, output_dir=tmp_path / "eval")


def test_a_decoding_that_the_policy_lacks_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    # as of a checkpoint on the hub, whose files are not looked at before
    monkeypatch.setattr(parts, "check_memory", lambda *_, **__: None)
    monkeypatch.setattr(serving, "PolicyServer", lambda *_: pytest.fail("it serves"))
    l1 = ["model=openvla_oft", "model.warm_start=null", "model.action_head=l1"]
    settings = ["cluster.device=cpu", "env=toy", *l1, "serve.decoding=sampled"]
    settings.append("model.random_weights=true")
    with raises_code("policy-has-no-decoding"):
        serving.serve(load_config(settings, verb="serve"), say=lambda line: None)


def test_a_decoding_of_another_verb_stops_nothing() -> None:
    residual = ["cluster.device=cpu", "env=toy", "model=openvla", "algorithm=residual"]
    loaded = load_config(residual, {"serve": {"decoding": "mean"}}, verb="train")
    check_machine(loaded.config, loaded.deployment)
    with raises_code("policy-has-no-decoding"):
        check_machine(load_config([*residual, "env.eval.decoding=mean"]).config, loaded.deployment)
