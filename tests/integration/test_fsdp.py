"""Training in several processes against training in one: the same losses, gradients, decisions and saved states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from expect import raises_code
from fsdp_worker import Comparer
from tiny_families import tiny_sizes
from tiny_training import deployment_of, largest_difference, tiny_rollout, train, training_config
from updates import on_policy, reference_logprobs

from embodrl.config.schema import Config
from embodrl.errors import CheckpointError, WorkerRaised
from embodrl.hybrid_engines.base import EngineState, TrainEngine
from embodrl.hybrid_engines.training.remote import RemoteTrainEngine
from embodrl.models.base import VLAPolicy
from embodrl.scheduler.group import WorkerGroup
from embodrl.storage.checkpoint import CheckpointManager
from embodrl.workers.actor import make_train_engine
from embodrl.workers.policy import build_policy, configure_torch

ALGORITHM = {"update_epoch": 1, "entropy_bonus": 0.01, "kl": {"coef": 0.1}}
EQUAL = 1e-5
ROUNDING = 1e-6
# Where a gradient is about 0 but for rounding, AdamW steps by the whole learning rate in the direction of its sign:
# an update of at most four steps of 1e-3.
WEIGHTS_EQUAL = 4e-3
START_S, CALL_S = 600.0, 600.0


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerGroup]:
    with WorkerGroup(Comparer, "comparer").launch(2, timeout_s=START_S) as group:
        yield group


def fsdp_config(family: str = "openvla", method: str | None = None, **changes: Any) -> Config:
    actor = {"training_backend": "fsdp"} | changes.pop("actor", {})
    return training_config(family, method, **({"algorithm": ALGORITHM} | changes), actor=actor)


def assert_same_training(group: WorkerGroup, family: str, config: Config) -> None:
    """Compare two updates, the first of the critic alone; moments are sums of gradients."""
    for found in group.compare(family, config).result(CALL_S):
        assert found["counted"] > 20
        assert found["metrics"] < EQUAL and found["optimizer"] < EQUAL and found["reference"] == 0
        assert found["policy"] < WEIGHTS_EQUAL


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param("openvla", None, marks=pytest.mark.long),  # as in test_settings_do_not_change_the_training
        pytest.param("openvla_oft", None, marks=pytest.mark.long),
        pytest.param("pi0", "flow_sde", marks=pytest.mark.long),  # but for its state token as pi0.5
        ("pi05", "flow_noise"),
        pytest.param("pi0_fast", None, marks=pytest.mark.long),
        pytest.param("gr00t", "flow_sde", marks=pytest.mark.long),
        pytest.param("smolvla", "flow_sde", marks=pytest.mark.long),
        ("gaussian", None),  # convolutions: their gradients are laid out otherwise than their weights
    ],
)
def test_every_family_trains_in_two_processes_as_in_one(two: WorkerGroup, family: str, method: str | None) -> None:
    assert_same_training(two, family, fsdp_config(family, method))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("openvla", None),
        pytest.param("pi0", "flow_sde", marks=pytest.mark.long),
        pytest.param("gr00t", "flow_sde", marks=pytest.mark.long),
        pytest.param("pi0_fast", None, marks=pytest.mark.long),
    ],
    ids=["llama", "gemma", "qwen", "gemma alone"],
)
def test_layers_that_two_processes_share_train_as_whole_ones(two: WorkerGroup, family: str, method: str | None) -> None:
    assert_same_training(two, family, fsdp_config(family, method, actor={"tensor_parallel_size": 2}))


@pytest.mark.parametrize(
    ("actor", "model"),
    [
        pytest.param(
            {
                "gradient_checkpointing": True,
                "fsdp": {"reduce_every_micro_batch": True, "reshard_after_forward": False},
            },
            {},
            marks=pytest.mark.long,
        ),
        pytest.param({}, {"trainable": "lora", "lora": {"rank": 4}}, marks=pytest.mark.long),
        ({"optim": {"fn": "torch.optim:SGD", "arguments": {"momentum": 0.9}, "critic_warmup_iterations": 0}}, {}),
        pytest.param({"param_dtype": "fp32", "micro_batch_size": 3}, {"freeze_vision": True}, marks=pytest.mark.long),
    ],
    ids=["checkpointing, reduce every micro-batch", "lora", "momentum", "frozen vision and uneven shares"],
)
def test_settings_do_not_change_the_training(two: WorkerGroup, actor: dict[str, Any], model: dict[str, Any]) -> None:
    assert_same_training(two, "openvla", fsdp_config(actor=actor, model=model))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "size", "actor"),
    [
        ("gaussian", {"gaussian": {"hidden_sizes": (5,)}}, {}),
        ("openvla", {"architecture": {"num_hidden_layers": 1}}, {"tensor_parallel_size": 2}),
    ],
)
def test_a_teacher_of_another_size_is_whole_in_every_process(
    two: WorkerGroup, family: str, size: dict[str, Any], actor: dict[str, Any], tmp_path: Path
) -> None:
    """The KL to it is that of one process, which holds no reference of its own."""
    sizes = tiny_sizes(family)
    (part, changed) = next(iter(size.items()))
    build_policy(training_config(family, model={part: sizes.get(part, {}) | changed})).save_pretrained(tmp_path / "t")
    algorithm = ALGORITHM | {"kl": {"coef": 0.5}, "teacher": str(tmp_path / "t")}
    for found in two.compare(family, fsdp_config(family, algorithm=algorithm, actor=actor)).result(CALL_S):
        assert "reference" not in found and found["counted"] > 20
        assert found["metrics"] < EQUAL and found["optimizer"] < EQUAL and found["policy"] < WEIGHTS_EQUAL


SAC = {
    **{"num_q": 3, "subset": 2, "critic_hidden_sizes": (8,), "warm_up": 20, "utd": 0.2, "policy_delay": 2},
}


REPLAY: dict[str, dict[str, Any]] = {
    "sac": {"loss_type": "sac", "off_policy": SAC},
    "rlpd": {"loss_type": "sac", "off_policy": SAC | {"demo_fraction": 0.5}, "bc_coef": 0.5},
    "td3_bc": {"loss_type": "td3_bc", "off_policy": SAC, "offline": {"updates": 5}},
}


@pytest.mark.parametrize("algorithm", REPLAY.values(), ids=REPLAY.keys())
def test_critics_beside_the_policy_train_as_in_one_process(two: WorkerGroup, algorithm: dict[str, Any]) -> None:
    algorithm = {"adv_type": "none"} | algorithm
    optim = {"critic_warmup_iterations": 0, "lr_warmup_iterations": 0, "lr": 1e-3}
    actor = {"optim": optim}
    config = fsdp_config("gaussian", algorithm=algorithm, actor=actor, model={"add_value_head": False})
    for found in two.compare_replay(config).result(CALL_S):
        assert found["counted"] >= 8 and max(found.values()) == found["counted"]
        assert found["metrics"] < ROUNDING and found["off_policy"] < ROUNDING and found["optimizer"] < ROUNDING
        assert found["policy"] < ROUNDING


@pytest.mark.parametrize(
    ("weighted", "tensor_parallel_size"),
    [
        pytest.param(False, 1, id="sft and dagger"),
        pytest.param(True, 2, id="iql and recap, tensor parallel"),
        pytest.param(True, 1, marks=pytest.mark.long, id="iql and recap"),
        pytest.param(False, 2, marks=pytest.mark.long, id="sft and dagger, tensor parallel"),
    ],
)
def test_imitation_in_two_processes_is_that_of_one(two: WorkerGroup, tensor_parallel_size: int, weighted: bool) -> None:
    config = fsdp_config(actor={"tensor_parallel_size": tensor_parallel_size})
    for found in two.compare_imitation("openvla", config, weighted).result(CALL_S):
        assert found["counted"] > 4 and found["metrics"] < ROUNDING and found["optimizer"] < ROUNDING


@pytest.mark.long
def test_a_loss_without_values_leaves_the_head_alone(two: WorkerGroup) -> None:
    config = fsdp_config(algorithm=ALGORITHM | {"update_epoch": 2, "adv_type": "reinforce_pp", "loss_type": "actor"})
    assert_same_training(two, "openvla", config)


@pytest.mark.long
def test_gathering_in_bf16_rounds_and_no_more(two: WorkerGroup) -> None:
    config = fsdp_config(actor={"fsdp": {"gather_dtype": "bf16"}})
    for found in two.compare("openvla", config).result(CALL_S):
        assert 1e-6 < found["metrics"] < 0.1


@pytest.mark.long
def test_decisions_are_the_same_in_all_processes(two: WorkerGroup) -> None:
    """One process has the chunk with the NaN, and one alone might be beyond target_kl."""
    config = fsdp_config(algorithm={"update_epoch": 20, "target_kl": 1e-3})
    for mine, theirs in two.decide(config).result(CALL_S):
        assert theirs[0]["train/early_stop"] == 1 and theirs[1]["train/num_nonfinite"] == 1
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, rel=EQUAL, abs=EQUAL)


def test_a_saved_state_continues_cut_up_otherwise(two: WorkerGroup) -> None:
    """Bit-exact where nothing is changed; as closely as the engines agree elsewhere."""
    other = fsdp_config(actor={"tensor_parallel_size": 2})
    for found in two.go_on(fsdp_config(), other).result(CALL_S):
        assert found["same"] == found["weights"] == 0
        assert found["other"] < EQUAL and found["native"] < EQUAL


@pytest.mark.long
def test_float32_copies_of_bf16_weights_continue_bit_exactly(two: WorkerGroup) -> None:
    bf16 = {"param_dtype": "bf16", "precision": "bf16"}
    other = fsdp_config(actor={"tensor_parallel_size": 2} | bf16)
    for found in two.go_on(fsdp_config(actor=bf16), other).result(CALL_S):
        assert found["same"] == found["weights"] == 0
        assert found["other"] < 0.1 and found["native"] < 0.1


@pytest.mark.parametrize(
    "actor",
    [{}, {"tensor_parallel_size": 2}],
    ids=["fsdp", "tensor parallel"],
)
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.long
def test_offload_between_updates_changes_no_bit(two: WorkerGroup, actor: dict[str, Any], reference: bool) -> None:
    config = fsdp_config(actor=actor, algorithm=ALGORITHM | {"kl": {"coef": 0.1 if reference else 0.0}})
    for apart, left, reports in two.offload(config).result(CALL_S):
        assert apart == 0 and left == [0, 0, 0]
        assert all(before > after == 0 for before, after in reports)


def test_a_state_of_another_policy_is_refused(two: WorkerGroup) -> None:
    for message in two.refuse(fsdp_config()).result(CALL_S):
        assert "'value_head.out.weight' is (3,) instead of (1, 16)" in message


@pytest.mark.slow
@pytest.mark.long
def test_four_processes_share_layers_and_chunks() -> None:
    with WorkerGroup(Comparer, "comparer").launch(4, timeout_s=START_S) as four:
        assert_same_training(four, "openvla", fsdp_config(actor={"tensor_parallel_size": 2, "micro_batch_size": 1}))


# -- the engine that the training loop sees -------------------------------------------------------------------------


@contextlib.contextmanager
def engine_of(config: Config, ranks: int = 0) -> Iterator[tuple[TrainEngine, VLAPolicy]]:
    """Bring up an engine of so many processes, 0 for this one, and its policy."""
    configure_torch(config)
    policy = build_policy(config)
    if not ranks:
        yield make_train_engine(config, deployment_of(config), policy), policy
        return
    engine = make_train_engine(config, deployment_of(config, ranks), policy)
    try:
        yield engine, policy
    finally:
        engine.close()


def copied(state: EngineState) -> EngineState:
    tensors = {section: {name: t.clone() for name, t in parts.items()} for section, parts in state.tensors.items()}
    return EngineState(tensors, dict(state.state))


@pytest.mark.long
def test_a_group_trains_its_driver_and_saves_and_loads() -> None:
    config = fsdp_config()
    native = training_config(algorithm=ALGORITHM)
    with engine_of(native) as (engine, policy):
        expected = train(engine, "openvla", policy, native, range(2))
        saved = copied(engine.state_dict())
        expected += train(engine, "openvla", policy, native, range(2, 3))
    with engine_of(config, 1) as (engine, policy):
        found = train(engine, "openvla", policy, config, range(2))
        mine = copied(engine.state_dict())
        assert mine.state == saved.state and mine.tensors.keys() == saved.tensors.keys()
        assert largest_difference(mine.tensors["optimizer"], saved.tensors["optimizer"]) < EQUAL
        assert largest_difference(dict(engine.weights()), mine.tensors["policy"]) == 0
        other = copied(mine)
        del other.tensors["policy"]["model.projector.fc1.weight"]
        with raises_code("checkpoint-mismatch", CheckpointError, "'model.projector.fc1.weight'"):
            engine.load_state_dict(other)
        engine.load_state_dict(copied(saved))
        loaded = engine.state_dict()
        assert all(largest_difference(loaded.tensors[s], saved.tensors[s]) == 0 for s in saved.tensors)
        found += train(engine, "openvla", policy, config, range(2, 3))
    for one, theirs in zip(found, expected, strict=True):
        assert one == pytest.approx(theirs, rel=EQUAL, abs=EQUAL)


@pytest.mark.long
def test_shards_of_two_processes_are_read_by_one_and_its_driver(tmp_path: Path) -> None:
    config = fsdp_config()
    with engine_of(config, 2) as (engine, policy):
        train(engine, "openvla", policy, config, range(2))
        saved = copied(engine.state_dict())
        path = CheckpointManager(tmp_path, 1).save(1, {}, {}, write_shards=engine.save_shards)
    assert len(list(path.glob("policy/*.safetensors"))) == 2
    with engine_of(config, 1) as (engine, policy):
        checkpoint, problems = CheckpointManager(tmp_path, 1).latest_good()
        assert checkpoint is not None and not problems
        engine.load_shards(checkpoint.path, saved.state)
        assert engine.version == 2 and largest_difference(policy.state_dict(), saved.tensors["policy"]) == 0
        loaded = engine.state_dict()
        assert loaded.state == saved.state
        assert all(largest_difference(loaded.tensors[s], saved.tensors[s]) == 0 for s in saved.tensors)


def test_processes_that_get_their_rows_alone_train_as_with_all() -> None:
    config = fsdp_config(algorithm=ALGORITHM | {"update_epoch": 2})
    results: list[Any] = []
    for num_shares in (2, 1):
        with engine_of(config, 2) as (engine, policy):
            assert isinstance(engine, RemoteTrainEngine) and engine.num_shares == 2
            engine.num_shares = num_shares  # with 1 everything goes to both
            metrics = train(engine, "openvla", policy, config, range(1))
            proximal, _ = on_policy(engine, config).proximal(tiny_rollout("openvla", policy, config, 1))
            results.append((metrics, copied(engine.state_dict()).tensors | {"proximal": {"": proximal}}))
    assert results[0][0] == results[1][0]
    for section, tensors in results[0][1].items():
        assert largest_difference(tensors, results[1][1][section]) == 0


@pytest.mark.long
def test_a_native_engine_in_its_own_process_is_bit_identical() -> None:
    results: list[Any] = []
    for config, ranks in ((training_config(), 0), (training_config(actor={"own_process": True}), 1)):
        with engine_of(config, ranks) as (engine, policy):
            metrics = train(engine, "openvla", policy, config)
            results.append((metrics, copied(engine.state_dict()).tensors))
            if ranks:
                batch = tiny_rollout("openvla", policy, config, 0)
                with raises_code("reference-missing", WorkerRaised):
                    reference_logprobs(engine, batch, config.algorithm)
    assert results[0][0] == results[1][0]
    for section, tensors in results[0][1].items():
        assert largest_difference(tensors, results[1][1][section]) == 0


def test_heads_that_can_not_be_shared_out_are_refused() -> None:
    config = fsdp_config(actor={"tensor_parallel_size": 3})
    with raises_code("tensor-parallel-size", WorkerRaised, "4 heads", "3 processes"), engine_of(config, 3):
        pass
