"""OpenVLA cut up over two processes, and in one piece, beside the policy in one process."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from forked import on_ranks
from parallel import config_of, megatron_engine, native_engine, parallel_policy, whole_policy
from tiny_training import largest_difference, tiny_rollout
from torch import Tensor

from embodrl.algorithms.losses import LossOutput
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.training.megatron.layout import publish
from embodrl.hybrid_engines.training.megatron.vocab import action_logits, action_windows
from embodrl.hybrid_engines.training.sharding import whole
from embodrl.types import EvalOutput, SamplingParams

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core: make test-megatron"
)
SAMPLINGS = [SamplingParams(1.0, 0), SamplingParams(0.3, 0), SamplingParams(0.6, 5)]
CONFIG = config_of(optim={"clip_grad": 1e9})


def rows_of_rollout() -> TrajectoryBatch:
    batch = tiny_rollout("openvla", whole_policy(CONFIG), CONFIG, seed=4)
    return batch.select("forward_inputs", "logprobs", "valid").fold()


def toy_loss(output: Any) -> Tensor:
    """Return a loss that depends on every output, unevenly."""
    weights = torch.linspace(-1.0, 2.0, output.logprobs.numel()).view(output.logprobs.shape)
    return (output.logprobs * weights).sum() + 0.1 * (output.entropy * weights).sum() + output.values.square().sum()


def tensors_of(output: EvalOutput) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in vars(output).items() if tensor is not None}


def look(size: int) -> dict[str, Any]:
    """Return what a process of megatron-core holds and computes."""
    engine, rows = megatron_engine(CONFIG, size), rows_of_rollout()
    policy = parallel_policy(engine)
    found: dict[str, Any] = {"shapes": {name: tuple(p.shape) for name, p in policy.named_parameters()}}
    found["weights"] = {name: tensor.clone() for name, tensor in engine.weights()}
    with torch.no_grad():
        hidden, _ = policy.action_states(rows.forward_inputs)
        found["window"] = action_logits(hidden, policy.model.language_model.lm_head, policy.windows)
        found["places"] = policy.windows.places
        outputs = [policy.evaluate_actions(rows.forward_inputs, sampling) for sampling in SAMPLINGS]
    found["outputs"] = [tensors_of(output) for output in outputs]

    def compute(micro: TrajectoryBatch) -> LossOutput:
        return LossOutput(toy_loss(policy.evaluate_actions(micro.forward_inputs, SAMPLINGS[1])), {})

    found["loss"], _ = engine.forward_backward(rows, compute)
    engine._clip(engine._collect(None))
    held = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    found["gradients"] = {
        name: whole(t).clone() for name, t in publish(held, engine.state.pieces, engine.state.tensor_mesh)
    }
    return found


def look_natively() -> dict[str, Any]:
    """Return the same of the policy in one piece."""
    engine, rows = native_engine(CONFIG), rows_of_rollout()
    policy: Any = engine.policy
    found: dict[str, Any] = {"weights": dict(policy.state_dict())}
    with torch.no_grad():
        found["logits"], _ = policy.action_logits(rows.forward_inputs)
        found["outputs"] = [
            tensors_of(policy.evaluate_actions(rows.forward_inputs, sampling)) for sampling in SAMPLINGS
        ]

    def compute(micro: TrajectoryBatch) -> LossOutput:
        return LossOutput(toy_loss(policy.evaluate_actions(micro.forward_inputs, SAMPLINGS[1])), {})

    found["loss"], _ = engine.forward_backward(rows, compute)
    found["gradients"] = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return found


@pytest.fixture(scope="module")
def native() -> dict[str, Any]:
    return on_ranks(1, look_natively)[0]


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return on_ranks(request.param, look, request.param)


@needs_megatron
def test_weights_come_back_bit_exactly(native: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["weights"].keys() == native["weights"].keys()
        assert all(torch.equal(found["weights"][name], tensor) for name, tensor in native["weights"].items())


@needs_megatron
def test_the_language_model_is_cut_up(native: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    size, llama = len(ranks), "model.language_model."
    for found in ranks:
        layer = f"{llama}model.layers.0."
        assert found["shapes"][f"{layer}self_attention.linear_qkv.weight"] == (3 * 32 // size, 32)
        assert found["shapes"][f"{layer}mlp.linear_fc2.weight"] == (32, 48 // size)
        rows, columns = native["weights"][f"{llama}lm_head.weight"].shape
        assert found["shapes"][f"{llama}lm_head.weight"] == (rows // size, columns)


@needs_megatron
def test_logits_log_probs_entropy_and_values_agree(native: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    windows = torch.cat([found["window"] for found in ranks], dim=-1)
    torch.testing.assert_close(windows[..., ranks[0]["places"]], native["logits"], atol=1e-5, rtol=0)
    for found in ranks:
        for mine, theirs in zip(found["outputs"], native["outputs"], strict=True):
            assert largest_difference(mine, theirs) < 1e-5


@needs_megatron
def test_loss_and_gradients_agree(native: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in native["gradients"].values())
    for found in ranks:
        assert float(found["loss"]) == pytest.approx(float(native["loss"]), rel=1e-5)
        assert largest_difference(found["gradients"], native["gradients"]) < 1e-5 * max(1.0, largest)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_windows_hold_every_action_once(rank: int) -> None:
    # 24 ids over 4 processes: ids 10 to 19 are one of 6 to 11, six of 12 to 17 and two of 18 to 23.
    windows = action_windows(first_id=10, num_bins=10, vocab_size=24, rank=rank, size=4)
    assert windows.width == 6
    assert [windows.rows.start, windows.rows.stop] == [[6, 6], [4, 6], [0, 6], [0, 2]][rank]
    assert windows.places.tolist() == [6, 7, 12, 13, 14, 15, 16, 17, 18, 19]


def refuse() -> str:
    with pytest.raises(EmbodrlError) as caught:
        megatron_engine(CONFIG, 3)
    return str(caught.value)


@needs_megatron
def test_heads_that_can_not_be_shared_out_are_refused() -> None:
    for message in on_ranks(3, refuse):
        assert "tensor_parallel_size=3 does not divide the language model's 4 attention heads" in message
