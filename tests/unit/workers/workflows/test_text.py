"""Messages in workflows: what an episode's engine writes, in which batches, and what a trajectory makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from tiny_families import build, observation

from embodrl import Completion, EpisodeEngine, Tool, ToolCall
from embodrl.config import load_config
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.rollout.batched import BatchedEngine, DecidingEngine
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.models.base import VLAPolicy
from embodrl.types import TOKEN_MASK
from embodrl.workers.workflows.workflow import EpisodeTask, Trajectory, stack_trajectories

CONFIG = load_config(["env=toy", "model=mlp", "actor.precision=fp32"]).config
SEES = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
LOOK = Tool("look", "turn the camera", SEES)
ASK = [{"role": "user", "content": "where is it?"}]
TASK = EpisodeTask("reach-red", 0, 5, 3, 0)


@pytest.fixture(scope="module")
def planner() -> VLAPolicy:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_prompt_tokens": 300}
    return build("planner", num_action_chunks=1, planner=sizes)


def engine_of(policy: VLAPolicy) -> NativeRolloutEngine:
    return NativeRolloutEngine(policy, CONFIG.rollout, CONFIG.algorithm.sampling, 0)


def played(shared: BatchedEngine, *episodes: Callable[[EpisodeEngine], Awaitable[Any]]) -> list[Any]:
    async def run() -> list[Any]:
        with closing(shared):
            return await asyncio.gather(*[play(shared.for_episode(row)) for row, play in enumerate(episodes)])

    return asyncio.run(run())


async def look(engine: EpisodeEngine) -> Completion:
    return await engine.generate(ASK, [LOOK], tool_choice="required")


def test_a_required_call_is_written_and_parsed(planner: VLAPolicy) -> None:
    (found,) = played(BatchedEngine(engine_of(planner), True, 4), look)
    assert found.tool_calls in [(ToolCall("look", {"side": side}),) for side in ("left", "right")]
    assert found.text == found.tool_calls[0].to_text()
    assert found.output.values is not None and found.output.logprobs.shape == (1, 64, 1)


def test_concurrent_messages_are_one_batch_and_each_episode_draws_its_own(planner: VLAPolicy) -> None:
    async def free(engine: EpisodeEngine) -> Completion:
        return await engine.generate(ASK)

    shared = BatchedEngine(engine_of(planner), False, 8)
    several = played(shared, free, look, free)
    assert shared.mean_batch() == 3
    assert several[0].text != several[2].text and several[0].tool_calls == () and several[1].tool_calls
    alone = played(BatchedEngine(engine_of(planner), False, 8), free)
    assert alone[0].text == several[0].text
    torch.testing.assert_close(alone[0].output.logprobs, several[0].output.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("decoding", [None, "greedy"])
def test_a_conversation_that_is_too_long_fails_alone(planner: VLAPolicy, decoding: Any) -> None:
    async def long(engine: EpisodeEngine) -> str:
        with raises_code("planner-prompt-too-long", EmbodrlError):
            await engine.generate([{"role": "user", "content": "x" * 500}])
        return "refused"

    def shared() -> BatchedEngine:
        engine = engine_of(planner)
        return DecidingEngine(engine, decoding, 4, None) if decoding else BatchedEngine(engine, False, 4)

    refused, found = played(shared(), long, look)
    assert refused == "refused" and found.tool_calls
    _, same = played(shared(), look, look)
    assert found.text == same.text


def test_an_evaluation_writes_the_most_probable_message(planner: VLAPolicy) -> None:
    engine = engine_of(planner)
    texts = {played(DecidingEngine(engine, "greedy", 4, None), look, look)[row].text for row in (0, 1)}
    assert len(texts) == 1


def test_a_policy_of_actions_refuses_to_write() -> None:
    with raises_code("policy-writes-no-text", EmbodrlError, "model=planner"):
        played(BatchedEngine(engine_of(build("gaussian")), False, 4), look)


def test_a_planner_has_no_actions_to_execute(planner: VLAPolicy) -> None:
    async def act(engine: EpisodeEngine) -> tuple[int, ...]:
        return (await engine.act(observation("planner", 1))).actions.shape

    assert played(BatchedEngine(engine_of(planner), False, 4), act) == [(1, 1, 0)]


def test_messages_become_columns(planner: VLAPolicy) -> None:
    async def episode(engine: EpisodeEngine) -> Trajectory:
        trajectory = Trajectory(TASK)
        trajectory.add_message(await look(engine), reward=0.25)
        trajectory.add_message(await look(engine), reward=1.0, terminated=True, success=True)
        await trajectory.finish(engine, ASK)
        return trajectory

    async def cut(engine: EpisodeEngine) -> Trajectory:
        trajectory = Trajectory(TASK)
        trajectory.add_message(await look(engine))
        await trajectory.finish(engine, ASK)
        return trajectory

    engine = engine_of(planner)
    whole, part = played(BatchedEngine(engine, True, 4), episode, cut)
    assert whole.success and whole.done and whole.total_reward == 1.25 and whole.num_actions == 2
    assert whole.end_value is None and part.end_value is not None
    batch = stack_trajectories([whole, part], 3, torch.zeros(2, dtype=torch.int64))
    assert batch.batch_size == torch.Size([3, 2]) and batch.logprobs.shape == (3, 2, 64, 1)
    np.testing.assert_array_equal(batch.valid[..., 0], [[True, True], [True, False], [False, False]])
    assert batch.terminated[1, 0].all() and batch.truncated[0, 1].all()
    assert float(batch.bootstrap_values[0, 1]) == float(part.end_value[0])
    inputs = {name: batch["forward_inputs"][name][1] for name in batch["forward_inputs"].keys()}  # noqa: SIM118
    again = planner.evaluate_actions(inputs, engine.sampling)
    torch.testing.assert_close(again.logprobs[0], batch.logprobs[1, 0], rtol=0, atol=1e-5)
    assert inputs[TOKEN_MASK].dtype == torch.bool
