"""Which parameters train, for every family and every choice."""

from __future__ import annotations

import pytest
import torch
from expect import raises_code
from tiny_families import FLOW_FAMILIES, NETWORKS, TOKEN_FAMILIES, build

from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy

OWN = ("value_head.", "noise_head.")


def training(policy: VLAPolicy) -> set[str]:
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}


def names_of(policy: VLAPolicy, parameters: list[torch.nn.Parameter]) -> set[str]:
    wanted = {id(parameter) for parameter in parameters}
    return {name for name, parameter in policy.named_parameters() if id(parameter) in wanted}


def own(policy: VLAPolicy) -> set[str]:
    return {name for name, _ in policy.named_parameters() if name.startswith(OWN)}


@pytest.mark.parametrize("family", NETWORKS)
def test_all(family):
    policy = build(family)
    every, unused = {name for name, _ in policy.named_parameters()}, names_of(policy, policy.unused_parameters())
    assert training(policy) == every - unused and own(policy) <= training(policy)


@pytest.mark.parametrize("family", NETWORKS)
def test_head(family):
    policy = build(family, trainable="head")
    head = names_of(policy, policy.head_parameters())
    assert head and training(policy) == head | own(policy)


@pytest.mark.parametrize("family", FLOW_FAMILIES)
def test_action_expert_and_learned_noise(family):
    policy = build(family, "flow_noise", trainable="action_expert")
    expert = names_of(policy, list(policy.parts()["action_expert"].parameters()))
    expert -= names_of(policy, policy.unused_parameters())
    assert any(name.startswith("noise_head.") for name in own(policy))
    assert training(policy) == expert | own(policy)


@pytest.mark.parametrize("family", TOKEN_FAMILIES)
def test_a_part_that_is_not_there(family):
    with raises_code("model-part", EmbodrlError, family, "'action_expert'", "vision", "projector", "language"):
        build(family, trainable="action_expert")


@pytest.mark.parametrize("option", ["all", "lora"])
@pytest.mark.parametrize("family", NETWORKS)
def test_frozen_vision(family, option):
    if option == "lora":
        pytest.importorskip("peft")
    free, frozen = (build(family, trainable=option, lora={"rank": 2}, freeze_vision=freeze) for freeze in (False, True))
    vision = names_of(frozen, list(frozen.parts()["vision"].parameters()))
    assert vision and not vision & training(frozen)
    outside = {name for name in training(free) if name not in names_of(free, list(free.parts()["vision"].parameters()))}
    assert training(frozen) == outside
    assert not any(".lora_" in name for name in vision)


@pytest.mark.parametrize("family", NETWORKS)
def test_lora(family):
    pytest.importorskip("peft")
    policy = build(family, trainable="lora", lora={"rank": 2})
    adapters = {name for name, _ in policy.named_parameters() if ".lora_" in name}
    assert adapters and training(policy) == adapters | own(policy)
    assert not any(name.startswith(OWN) for name in adapters)
    plain = build(family)
    used = set(map(id, plain.parameters())) - set(map(id, plain.unused_parameters()))
    linear = {
        name
        for name, module in plain.named_modules()
        if isinstance(module, torch.nn.Linear) and id(module.weight) in used and not name.startswith(OWN)
    }
    assert {name.partition(".lora_")[0] for name in adapters} == linear
