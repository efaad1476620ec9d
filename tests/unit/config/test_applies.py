"""Conditions of settings, as the schema declares them."""

from __future__ import annotations

import pytest

from embodrl.config.load import load_config
from embodrl.config.rules.applies import FACTS, conditional_settings
from embodrl.config.rules.base import value_of


@pytest.mark.parametrize("model", ["openvla", "pi0"])
def test_conditions_name_settings(model: str) -> None:
    config = load_config([f"model={model}"]).config
    named = [(each.key, each) for _, conditions in conditional_settings(config) for each in conditions]
    assert len(named) > 50
    for key, condition in named:
        if key.partition(".")[0] not in FACTS:
            condition.holds(value_of(config, key))


def test_the_first_condition_that_fails_is_noted_with_its_remedy() -> None:
    arguments = ["algorithm.min_group_std=0.1", "algorithm.normalize_advantages=false", "cluster.ray_address=a:1"]
    found = {note.key: (note.message, note.hint) for note in load_config(arguments).notes}
    assert "algorithm.normalize_advantages is false" in found["algorithm.min_group_std"][0]
    assert "the launcher" in found["cluster.ray_address"][0]


def test_settings_of_the_vision_that_is_not_there_are_noted() -> None:
    key = "model.gaussian.encoder_layer"
    assert key in {note.key for note in load_config(["model=cnn", f"{key}=4"]).notes}
    frozen = ["model=cnn", "model.gaussian.frozen_encoder=facebook/dinov2-small", "model.gaussian.image_size=112"]
    notes = {note.key for note in load_config([*frozen, f"{key}=4", "model.gaussian.channels=[8]"]).notes}
    assert "model.gaussian.channels" in notes and key not in notes
