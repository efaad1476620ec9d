"""The inference benchmark compares like with like; what it measures is not tested."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from expect import raises_code
from tiny_families import FAMILIES, build, observation
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.config.schema import model_settings
from embodrl.errors import UsageError
from embodrl.tools.bench import inference
from embodrl.tools.bench.inference import FULL, check, sides

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_ways_choose_the_same_actions(family: str) -> None:
    policy = build(family)
    found = {name: way() for name, way in sides(policy, observation(family, 3, texts=("push it",))).items()}
    for name in ("plain", "plain_batched"):
        assert found[name].shape == (3, 2, 7)
        agreement = check(family, policy, found["embodrl"], found[name])
        assert agreement["equal_to_1e-2"] == 1.0
    assert np.ptp(found["embodrl"], axis=0).max() > 0  # rows differ, so that order counts


@pytest.mark.parametrize("family", FAMILIES)
def test_other_actions_are_refused(family: str) -> None:
    policy = build(family)
    actions = np.zeros((2, 2, 7), np.float32)
    with pytest.raises(RuntimeError, match=f"{family}: actions differ"):
        check(family, policy, actions, actions + np.float32(1e-3))


def test_a_family_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "make_policy", lambda family, full, device: build(family))
    figures = inference.measure("openvla", False, CPU, batch=2, blocks=2)
    assert figures["chunk"] == 2 and figures["batch"] == 2 and figures["dtype"] == "float32"
    for name in ("embodrl", "plain", "plain_batched"):
        one = figures[name]
        assert one["samples"] == 2
        assert one["actions_s"] == pytest.approx(2 * 2 / (one["median_ms"] / 1000), rel=0.02, abs=0.06)
    assert figures["ratio"] <= figures["plain"]["median_ms"] / figures["embodrl"]["median_ms"] + 0.01


def test_every_family_has_its_public_size() -> None:
    assert sorted(FULL) == sorted(FAMILIES)
    for family, settings in FULL.items():
        config = model_settings(family).model_validate({"model_type": family, **settings})
        parts = ("architecture", "pi", "pi0_fast", "gr00t", "gr00t_n1_6", "gr00t_n1_7", "smolvla")
        part = next(name for name in parts if hasattr(config, name))
        assert getattr(config, part).image_size == {"smolvla": 512, "gr00t_n1_6": 252, "gr00t_n1_7": 256}.get(
            family, 224
        )


def test_a_choice_of_families_sizes_and_devices() -> None:
    assert inference.choose((), None, None) == inference.InferenceChoice()
    assert inference.choose(("pi05", "smolvla"), "public", "cpu").families == ("pi05", "smolvla")
    for words in ((("pi055",), None, None), ((), "huge", None), ((), None, "tpu")):
        with raises_code("usage", UsageError, "known"):
            inference.choose(*words)


@pytest.mark.parametrize(
    "options", [["render", "--size", "tiny"], ["transport", "--family", "pi05"], ["inference", "--record", "x"]]
)
def test_options_of_another_benchmark_are_refused(options: list[str]) -> None:
    outcome = CliRunner().invoke(app, ["bench", *options])
    assert outcome.exit_code == 2 and "bench-option" in outcome.stderr
