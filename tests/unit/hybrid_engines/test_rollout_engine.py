import numpy as np
import pytest
import torch
from toy_policy import ToyPolicy

from embodrl.config.schema import RolloutConfig, SamplingConfig
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine, policy_memory
from embodrl.types import Observation, PolicyOutput

OBSERVATION = Observation(
    images=np.zeros((5, 1, 2, 2, 3), np.uint8),
    state=np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32),
    instruction=["go"] * 5,
    task_id=np.zeros(5, np.int32),
)


class StatePolicy(ToyPolicy):
    """Sees the state; in eval mode its action is the state, in train mode a random number is added."""

    def predict_values(self, observation):
        return self.value(self._hidden(torch.from_numpy(observation.state)))

    def predict_action_batch(self, observation, mode, sampling, generator=None, compute_values=True):
        assert not torch.is_grad_enabled()
        assert sampling.temperature == 0.5
        state = torch.from_numpy(observation.state)
        noise = torch.rand(state.shape, generator=generator) if mode == "train" else torch.zeros_like(state)
        values = self.predict_values(observation) if compute_values else None
        actions = (state + noise).view(-1, 2, 3).numpy()
        return PolicyOutput(actions, noise.view(-1, 2, 3), values, {"state": state})


def engine_of(num_threads, seed=0):
    return NativeRolloutEngine(
        StatePolicy(), RolloutConfig(precision="fp32"), SamplingConfig(temperature=0.5), seed, num_threads
    )


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_parts_on_threads_come_back_in_order(num_threads):
    engine = engine_of(num_threads)
    greedy = engine.decide(OBSERVATION, "greedy")
    np.testing.assert_array_equal(greedy.actions.reshape(5, 6), OBSERVATION.state)
    assert greedy.values is None
    drawn = engine.act(OBSERVATION, compute_values=True)
    np.testing.assert_array_equal(drawn.forward_inputs["state"].numpy(), OBSERVATION.state)
    np.testing.assert_allclose(drawn.actions - drawn.logprobs.numpy(), OBSERVATION.state.reshape(5, 2, 3), atol=1e-6)
    with torch.no_grad():
        expected = engine.policy.predict_values(OBSERVATION)
    torch.testing.assert_close(drawn.values, expected)
    torch.testing.assert_close(engine.values(OBSERVATION), expected)
    assert not engine.values(OBSERVATION).requires_grad


@pytest.mark.parametrize("num_threads", [1, 2])
def test_draws_follow_from_the_seed_and_go_on_from_a_saved_state(num_threads):
    engine, same, other = engine_of(num_threads), engine_of(num_threads), engine_of(num_threads, seed=1)
    first = engine.act(OBSERVATION, False).actions
    np.testing.assert_array_equal(first, same.act(OBSERVATION, False).actions)
    assert not np.array_equal(first, other.act(OBSERVATION, False).actions)
    saved = engine.random_state()
    second = engine.act(OBSERVATION, False).actions
    assert not np.array_equal(first, second)
    other.set_random_state(saved)
    np.testing.assert_array_equal(second, other.act(OBSERVATION, False).actions)


def test_rows_on_different_threads_draw_different_numbers():
    noise = engine_of(2).act(OBSERVATION, False).logprobs
    assert len({tuple(row) for row in noise.flatten(1).tolist()}) == 5


def test_a_state_of_another_number_of_threads_is_refused():
    with pytest.raises(ValueError):
        engine_of(2).set_random_state(engine_of(1).random_state())


def offloading_engine(offloads=True):
    config = RolloutConfig(precision="fp32", enable_offload=True)
    policy = StatePolicy()
    memory = policy_memory(policy) if offloads else None
    return NativeRolloutEngine(policy, config, SamplingConfig(temperature=0.5), 0, memory=memory)


def sizes_of(engine):
    return {p.untyped_storage().nbytes() for p in engine.policy.parameters()}


def test_weights_leave_and_come_back_when_actions_are_asked_for():
    engine, twin = offloading_engine(), engine_of(1)
    num_bytes = sum(p.numel() * 4 for p in engine.policy.parameters())
    assert engine.offload_report is None
    for ask in (lambda e: e.act(OBSERVATION, True).values, lambda e: e.values(OBSERVATION)):
        engine.offload()
        assert sizes_of(engine) == {0}
        assert (engine.offload_report.before, engine.offload_report.after) == (num_bytes, 0)
        assert torch.equal(ask(engine), ask(twin))
        assert 0 not in sizes_of(engine)


def test_weights_come_back_before_new_ones_arrive():
    engine, source = offloading_engine(), StatePolicy()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    engine.offload()

    def stream():
        engine.onload()  # as a train engine does that shares the policy
        yield from source.named_parameters()

    engine.update_weights(stream(), 5)
    assert engine.version == 5
    assert all(torch.equal(p, dict(source.named_parameters())[name]) for name, p in engine.policy.named_parameters())


def test_weights_that_others_need_stay():
    engine = offloading_engine(offloads=False)
    engine.offload()
    assert 0 not in sizes_of(engine) and engine.offload_report is None
