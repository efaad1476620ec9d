"""Training in several processes against training in one: the same losses, gradients, decisions and saved states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_training import largest_difference, tiny_rollout, train, training_config

from embodrl.algorithms.advantages import compute_advantages
from embodrl.config.schema import Config
from embodrl.errors import CheckpointError, WorkerRaised
from embodrl.hybrid_engines.base import EngineState, TrainEngine
from embodrl.models.base import VLAPolicy
from embodrl.scheduler.placement import ProcessPlace
from embodrl.workers.actor import GroupTrainEngine, make_train_engine
from embodrl.workers.policy import build_policy, configure_torch

KL = {"kl": {"coef": 0.1}}
REFERENCE_FIRST = {"update_epoch": 2, "entropy_bonus": 0.01} | KL
EQUAL = 1e-5


@contextlib.contextmanager
def engine_of(config: Config, ranks: int = 0) -> Iterator[tuple[TrainEngine, VLAPolicy]]:
    """Bring up an engine of so many processes, 0 for this one, and its policy."""
    configure_torch(config)
    policy = build_policy(config)
    if not ranks:
        yield make_train_engine(config, policy), policy
        return
    engine = GroupTrainEngine(config, policy, places=tuple(ProcessPlace("actor", rank) for rank in range(ranks)))
    try:
        yield engine, policy
    finally:
        engine.close()


def copied(state: EngineState) -> EngineState:
    tensors = {section: {name: t.clone() for name, t in parts.items()} for section, parts in state.tensors.items()}
    return EngineState(tensors, dict(state.state))


def run(config: Config, family: str, ranks: int = 0, seeds: range = range(2)) -> tuple[list[Any], EngineState]:
    with engine_of(config, ranks) as (engine, policy):
        return train(engine, family, policy, config, seeds), copied(engine.state_dict())


def assert_same_training(family: str, method: str | None, ranks: int, actor: dict[str, Any], **changes: Any) -> None:
    """Compare three updates, the first of the critic alone, with those of one process.

    Weights differ by more than the losses: where a gradient is about 0 but for rounding, AdamW steps by the whole
    learning rate in the direction of its sign.
    """
    changes = {"algorithm": REFERENCE_FIRST} | changes
    expected, state = run(training_config(family, method, **changes), family, 0, range(3))
    fsdp = training_config(family, method, actor={"training_backend": "fsdp"} | actor, **changes)
    found, state_found = run(fsdp, family, ranks, range(3))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=EQUAL, abs=EQUAL)
    assert state_found.state == state.state
    assert state_found.tensors.keys() == state.tensors.keys() == {"policy", "optimizer", "reference"}
    for section in ("optimizer", "reference"):  # moments are sums of gradients
        assert largest_difference(state_found.tensors[section], state.tensors[section]) < EQUAL
    assert largest_difference(state_found.tensors["policy"], state.tensors["policy"]) < 2e-3  # of 2 steps of 1e-3


def test_two_processes_train_as_one() -> None:
    assert_same_training("openvla", None, 2, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method"),
    [("openvla_oft", None), ("pi0", "flow_sde"), ("pi05", "flow_noise"), ("gr00t", "flow_sde")],
)
def test_every_family_trains_in_two_processes_as_in_one(family: str, method: str | None) -> None:
    assert_same_training(family, method, 2, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method"),
    [("openvla", None), ("pi0", "flow_sde"), ("gr00t", "flow_sde")],
    ids=["llama", "gemma", "qwen"],
)
def test_layers_that_two_processes_share_train_as_whole_ones(family: str, method: str | None) -> None:
    assert_same_training(family, method, 2, {"tensor_parallel_size": 2})


@pytest.mark.slow
def test_four_processes_share_layers_and_chunks() -> None:
    assert_same_training("openvla", None, 4, {"tensor_parallel_size": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actor", "model"),
    [
        ({"gradient_checkpointing": True}, {}),
        ({"fsdp": {"reduce_every_micro_batch": True, "reshard_after_forward": False}}, {}),
        ({}, {"trainable": "lora", "lora": {"rank": 4}}),
    ],
    ids=["checkpointing", "reduce every micro-batch", "lora"],
)
def test_settings_do_not_change_the_training(actor: dict[str, Any], model: dict[str, Any]) -> None:
    assert_same_training("openvla", None, 2, actor, model=model)


def test_decisions_are_the_same_in_all_processes() -> None:
    """One process has the chunk with the NaN, and one alone might be beyond target_kl."""
    algorithm = {"update_epoch": 20, "target_kl": 1e-3}

    def decide(config: Config, ranks: int) -> tuple[dict[str, float], dict[str, float]]:
        with engine_of(config, ranks) as (engine, policy):
            engine.load_state_dict(EngineState({"policy": policy.state_dict()}, {"version": 1, "nonfinite_in_row": 0}))
            batch = tiny_rollout("openvla", policy, config, 0)
            advantages = compute_advantages(batch, config.algorithm)
            early = engine.update(batch, advantages, config.algorithm, torch.Generator().manual_seed(0))
            advantages.advantages[0, 1] = torch.nan
            patient = config.algorithm.model_copy(update={"update_epoch": 1, "target_kl": None})
            return early, engine.update(batch, advantages, patient, torch.Generator().manual_seed(0))

    expected = decide(training_config(algorithm=algorithm), 0)
    found = decide(training_config(algorithm=algorithm, actor={"training_backend": "fsdp"}), 2)
    assert expected[0]["train/early_stop"] == 1 and expected[1]["train/num_nonfinite"] == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=EQUAL, abs=EQUAL, nan_ok=True)


def test_a_native_engine_in_its_own_process_is_the_same_to_the_bit() -> None:
    expected, state = run(training_config(), "openvla")
    found, state_found = run(training_config(actor={"own_process": True}), "openvla", 1)
    assert found == expected
    for section, tensors in state.tensors.items():
        assert largest_difference(tensors, state_found.tensors[section]) == 0


@pytest.mark.slow
def test_a_saved_state_goes_on_with_another_number_of_processes() -> None:
    """To the bit with the same number; as closely as the engines agree with another."""
    fsdp = training_config(actor={"training_backend": "fsdp"}, algorithm=REFERENCE_FIRST)
    native = training_config(algorithm=REFERENCE_FIRST)
    with engine_of(fsdp, 2) as (engine, policy):
        train(engine, "openvla", policy, fsdp, range(2))
        saved = copied(engine.state_dict())
        expected = train(engine, "openvla", policy, fsdp, range(2, 4))
        end = copied(engine.state_dict())
    layers = training_config(actor={"training_backend": "fsdp", "tensor_parallel_size": 2}, algorithm=REFERENCE_FIRST)
    for config, ranks in ((fsdp, 2), (fsdp, 1), (native, 0), (layers, 2)):
        with engine_of(config, ranks) as (engine, policy):
            engine.load_state_dict(copied(saved))
            assert engine.version == 2
            loaded = engine.state_dict()
            for section, tensors in saved.tensors.items():
                assert largest_difference(tensors, loaded.tensors[section]) == 0
            found = train(engine, "openvla", policy, config, range(2, 4))
            if ranks == 2 and config is fsdp:
                assert found == expected
                for section, tensors in end.tensors.items():
                    assert largest_difference(tensors, engine.state_dict().tensors[section]) == 0
            else:
                for mine, theirs in zip(found, expected, strict=True):
                    assert mine == pytest.approx(theirs, rel=EQUAL, abs=EQUAL)


def test_what_does_not_fit_is_refused_before_anything_is_changed() -> None:
    config = training_config(actor={"training_backend": "fsdp"})
    with engine_of(config, 1) as (engine, policy):
        before = copied(engine.state_dict())
        other = copied(before)
        del other.tensors["policy"]["model.projector.fc1.weight"]
        with pytest.raises(CheckpointError, match=r"'model\.projector\.fc1\.weight' is missing"):
            engine.load_state_dict(other)
        assert largest_difference(before.tensors["policy"], engine.state_dict().tensors["policy"]) == 0
        batch = tiny_rollout("openvla", policy, config, 0)
        with pytest.raises(WorkerRaised, match="keeps no reference policy"):
            engine.reference_logprobs(batch, config.algorithm)


def test_heads_that_can_not_be_shared_out_are_refused() -> None:
    config = training_config(actor={"training_backend": "fsdp", "tensor_parallel_size": 3})
    with (
        pytest.raises(WorkerRaised, match="4 heads for 3 processes: 4 / 3 leaves 1"),
        engine_of(config, 3),
    ):
        pass
