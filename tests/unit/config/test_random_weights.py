"""An untrained policy is evaluated or served only on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.config.policy_card import without_weights
from embodrl.config.presets import presets
from embodrl.errors import ConfigError

WITH_WEIGHTS = ("openvla", "openvla_oft", "lerobot", "remote", "remote_text", "mlp", "cnn")
RANDOM = [name for name in presets("model") if name not in WITH_WEIGHTS]


@pytest.mark.parametrize("verb", ["eval", "serve"])
@pytest.mark.parametrize("name", [name for name in RANDOM if name.endswith("_libero")])
def test_presets_as_published_demand_their_weights(name: str, verb: str) -> None:
    arguments = ["env=libero_spatial", "env.python=null", f"model={name}"]
    with pytest.raises(ConfigError) as caught:
        load_config(arguments, verb=verb)
    assert "policy-has-weights" in {problem.code for problem in caught.value.problems}
    try:
        load_config([*arguments, "model.random_weights=true"], verb=verb)
    except ConfigError as error:  # LIBERO may not be here
        assert "policy-has-weights" not in {problem.code for problem in error.problems}


@pytest.mark.parametrize("name", RANDOM)
def test_a_preset_without_weights_says_so(name: str, tmp_path: Path) -> None:
    config = load_config([f"model={name}", "env=toy"], verb="plan").config if not name.endswith("_libero") else None
    if config is not None:
        assert without_weights(config.model)
        assert not without_weights(config.model.model_copy(update={"model_path": str(tmp_path)}))
        assert not without_weights(config.model.model_copy(update={"warm_start": str(tmp_path)}))


@pytest.mark.parametrize("arguments", [["env=toy", "model=mlp"], ["env=toy", "model=pi05"]])
def test_training_begins_from_random_weights_without_being_asked(arguments: list[str]) -> None:
    load_config(arguments, verb="train")
    load_config(arguments, verb="sft")


def test_shipped_weights_are_no_random_ones() -> None:
    assert not without_weights(load_config(["env=maniskill"], verb="eval").config.model)


@pytest.mark.parametrize(
    ("content", "near"),
    [
        ('{"type": "pi05", "input_features": {}}', "pi05"),
        ('{"model_type": "llama"}', "planner"),
        ('{"model_type": "bert"}', ""),
        ('{"one": 1,\n"two": 2}', ""),
        ("not JSON", ""),
    ],
)
@pytest.mark.parametrize("key", ["model_path", "warm_start"])
def test_a_checkpoint_of_another_family_is_found_before_anything_starts(
    content: str, near: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    with raises_code("checkpoint-is-of-the-family") as caught:
        load_config(["env=toy", "model=openvla", f"model.{key}='{tmp_path}'"])
    (problem,) = caught.value.problems
    assert (problem.key, problem.nearest) == (f"model.{key}", near)


def test_a_checkpoint_of_the_family_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}')
    load_config(["env=toy", "model=openvla", f"model.warm_start='{tmp_path}'"])
