"""The inference benchmark compares like with like; what it measures is not tested."""

from __future__ import annotations

from pathlib import Path

import bench
import inference
import numpy as np
import pytest
import torch
from inference import FULL, check, sides
from tiny_families import FAMILIES, build, observation

from embodrl.config.schema import model_settings

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
        parts = ("architecture", "pi", "pi0_fast", "gr00t", "gr00t_n1_7", "smolvla")
        part = next(name for name in parts if hasattr(config, name))
        assert getattr(config, part).image_size == {"smolvla": 512, "gr00t_n1_7": 256}.get(family, 224)


@pytest.mark.parametrize(
    "words",
    [["render", "--size", "tiny"], ["transport", "--family", "pi05"], ["inference", "--record", "x"], ["rendr"]],
)
def test_names_and_options_of_no_benchmark_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench.parse(words)
    assert left.value.code == 2 and "error" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["inference", "--family", "pi055"], ["envs", "--env", "mujoco"]])
def test_unknown_parts_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(words) == 2
    assert "known: " in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["transport", "--json", str(tmp_path)]) == 1
    assert f"{tmp_path} is a directory" in capsys.readouterr().err


def test_every_name_has_its_module() -> None:
    folder = Path(bench.__file__).parent
    assert all((folder / f"{module}.py").is_file() for module in bench.MODULES.values())
