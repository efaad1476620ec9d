"""The replay buffer: which chunks of a rollout it keeps, what follows them, and its bounds."""

from __future__ import annotations

import math

import pytest
import torch
from expect import raises_code

from embodrl.config.schema.algorithm import AlgorithmConfig
from embodrl.data.replay import EXPERT, HUMAN, ReplayBuffer, ReplayStores, frames_of, intervened
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import CheckpointError
from embodrl.learners.off_policy import sample_transitions

T, C, A = 4, 2, 3


def rollout() -> TrajectoryBatch:
    """Five environments of four chunks; an observation is its number ``10 * env + time``, a last one 100 more."""
    rows = 5
    number = 10.0 * torch.arange(rows)[None] + torch.arange(T)[:, None]
    valid = torch.ones(T, rows, C, dtype=torch.bool)
    terminated, truncated = torch.zeros_like(valid), torch.zeros_like(valid)
    terminated[1, 0, 0] = True  # 0: solved in chunk 1, in its first action, then a new episode
    valid[1, 0, 1] = False
    truncated[2, 1, 1] = True  # 1: out of time after chunk 2, then a new episode of one chunk
    valid[2, 2], truncated[2, 2, 0] = False, True  # 2: lost in chunk 2, then a new episode
    terminated[0, 3, 1] = True  # 3: solved at once, and no new episode
    valid[1:, 3] = False
    return TrajectoryBatch.from_rollout(  # 4: its episode continues after the rollout
        forward_inputs={"state": number[..., None], "drawn": number[..., None]},
        final_inputs={"state": number[..., None] + 100},
        logprobs=torch.zeros(T, rows, C, A),
        values=torch.zeros(T + 1, rows, 1),
        rewards=number[..., None].expand(T, rows, C) * valid,
        valid=valid,
        terminated=terminated,
        truncated=truncated,
        bootstrap_values=torch.zeros(T, rows, 1),
        policy_version=torch.zeros(T, rows, dtype=torch.int64),
        task_id=torch.zeros(T, rows, dtype=torch.int64),
        actions=number[..., None, None].expand(T, rows, C, A),
        source=torch.zeros(T, rows, dtype=torch.int8),
    )


FRAMES = [
    *[(0, True), (1, True), (2, True), (3, True), (103, False)],
    *[(10, True), (11, True), (12, True), (112, False), (13, True), (113, False)],
    *[(20, True), (21, True), (22, False), (23, True), (123, False)],
    *[(30, True)],
    *[(40, True), (41, True), (42, True), (43, True), (143, False)],
]


def test_a_rollout_becomes_episodes_with_their_last_observations() -> None:
    frames = frames_of(rollout())
    seen = frames["inputs.state"].squeeze(-1).int().tolist()
    assert list(zip(seen, frames["acted"].tolist(), strict=True)) == FRAMES
    assert sorted(frames) == ["acted", "actions", "inputs.state", "rewards", "source", "terminated", "valid"]
    terminated = [number for number, flag in zip(seen, frames["terminated"].tolist(), strict=True) if flag]
    assert terminated == [1, 30]
    for number, acted, valid, rewards in zip(seen, frames["acted"], frames["valid"], frames["rewards"], strict=True):
        assert valid.tolist() == ([True, number != 1] if acted else [False, False])
        assert rewards.tolist() == [number if one else 0 for one in valid]


def test_what_is_drawn_is_followed_by_what_it_led_to() -> None:
    buffer = ReplayBuffer(100, 10**9)
    buffer.add_frames(frames_of(rollout()))
    assert len(buffer) == buffer.stored == sum(acted for _, acted in FRAMES)
    places = buffer.draw(200, torch.Generator().manual_seed(0))
    seen = buffer.inputs(places)["state"].squeeze(-1)
    assert set(seen.int().tolist()) == {number for number, acted in FRAMES if acted}
    assert torch.equal(buffer.column("actions", places)[:, 0, 0], seen)
    follower = buffer.inputs(places + 1)["state"].squeeze(-1)
    window = buffer.window(places, 2)
    for now, later, over, goes_on in zip(seen, follower, window.terminated[:, 0], window.acted[:, 1], strict=True):
        if not over:
            assert later == now + 1 or (later == now + 100 and not goes_on)


def test_the_oldest_make_room() -> None:
    buffer = ReplayBuffer(30, 10**9)
    for _ in range(3):
        buffer.add_frames(frames_of(rollout()))
    assert (buffer.capacity, buffer.stored) == (30, 3 * 16)
    kept = (FRAMES * 3)[-30:]
    order = (torch.arange(30) + 3 * len(FRAMES)) % 30
    assert buffer.inputs(order)["state"].squeeze(-1).int().tolist() == [number for number, _ in kept]
    assert len(buffer) == sum(acted for _, acted in kept)


def test_nothing_can_be_added_to_an_empty_buffer() -> None:
    buffer = ReplayBuffer(10, 1000)
    buffer.add_frames({"acted": torch.zeros(0, dtype=torch.bool), "inputs.x": torch.zeros(0, 3)})
    assert (len(buffer), buffer.stored, buffer.num_bytes) == (0, 0, 0)


def test_a_column_may_be_empty() -> None:
    """Policies without a state have one without dimensions."""
    buffer = ReplayBuffer(10, 10**9)
    buffer.add_frames({"inputs.state": torch.zeros(3, 0), "acted": torch.ones(3, dtype=torch.bool)})
    assert buffer.inputs(torch.tensor([0, 2]))["state"].shape == (2, 0)


def test_bytes_bound_it() -> None:
    frames = frames_of(rollout())
    frame = sum(column[0].nbytes for column in frames.values())
    buffer = ReplayBuffer(10**6, 30 * frame + frame - 1)
    buffer.add_frames(frames)
    assert buffer.capacity == 30 and buffer.num_bytes == len(FRAMES) * frame
    with raises_code("replay-too-small"):
        ReplayBuffer(10**6, 3 * frame).add_frames(frames)


@pytest.mark.parametrize("rollouts", [1, 3])
def test_a_restored_buffer_draws_and_forgets_the_same(rollouts: int) -> None:
    buffer, again = ReplayBuffer(30, 10**9), ReplayBuffer(30, 10**9)
    for _ in range(rollouts):
        buffer.add_frames(frames_of(rollout()))
    again.load_state({name: tensor.clone() for name, tensor in buffer.state().items()})
    for one in (buffer, again):
        one.add_frames(frames_of(rollout()))
    draws = [one.draw(50, torch.Generator().manual_seed(1)) for one in (buffer, again)]
    assert torch.equal(*draws) and (again.stored, len(again)) == (buffer.stored, len(buffer))
    assert all(torch.equal(x, buffer.state()[name]) for name, x in again.state().items())


def test_a_state_that_does_not_fit_is_refused() -> None:
    buffer = ReplayBuffer(30, 10**9)
    for _ in range(2):
        buffer.add_frames(frames_of(rollout()))
    for capacity in (20, 40):  # a ring that has come round has its size
        with raises_code("replay-other-size", CheckpointError):
            ReplayBuffer(capacity, 10**9).load_state(buffer.state())
    empty = ReplayBuffer(30, 10**9)
    empty.load_state(ReplayBuffer(30, 10**9).state())
    assert len(empty) == 0
    demos = ReplayBuffer(30, 10**9)
    demos.add_frames(frames_of(rollout()))
    state = ReplayStores(buffer, demos).state()
    ReplayStores(ReplayBuffer(30, 10**9), demos).load_state(state)
    for other in (None, buffer):
        with raises_code("replay-other-demos", CheckpointError):
            ReplayStores(ReplayBuffer(30, 10**9), other).load_state(state)


@pytest.mark.parametrize("n_step", [1, 3])
def test_what_follows_the_last_chunk_is_no_memory_that_was_never_written(n_step, monkeypatch) -> None:
    def dirty(*shape, dtype):
        return torch.full(shape, math.nan if dtype.is_floating_point else True, dtype=dtype)

    monkeypatch.setattr(torch, "empty", dirty)
    buffer = ReplayBuffer(1000, 10**9)
    buffer.add_frames({name: column[-6:-5] for name, column in frames_of(rollout()).items()})  # 30: solved at once
    algorithm = AlgorithmConfig.model_validate({"off_policy": {"n_step": n_step}})
    found = sample_transitions(ReplayStores(buffer), 1, algorithm, torch.Generator())
    assert found["discount"].item() == 0 and found["returns"].item() == 60
    assert found["next_inputs"]["state"].item() == 0


def corrected_rollout(by: int = EXPERT) -> TrajectoryBatch:
    """The rollout in which somebody acted in chunks 0 and 1 of row 0, 2 of 1, 2 (lost) of 2, 0 of 3, and 1 of 4."""
    batch = rollout()
    for time, row in ((0, 0), (1, 0), (2, 1), (2, 2), (0, 3), (1, 4)):
        batch["source"][time, row] = by
    return batch


@pytest.mark.parametrize("by", [EXPERT, HUMAN])
def test_interventions_are_kept_with_what_they_led_to(by: int) -> None:
    frames = intervened(frames_of(corrected_rollout(by)))
    seen = frames["inputs.state"].squeeze(-1).int().tolist()
    expected = [(0, True), (1, True), (12, True), (112, False), (30, True), (41, True), (42, False)]
    assert list(zip(seen, frames["acted"].tolist(), strict=True)) == expected
    assert frames["terminated"].tolist() == [number in (1, 30) for number in seen]
    assert frames["valid"].any(-1).tolist() == frames["acted"].tolist()
    assert frames["rewards"][-1].tolist() == [0, 0]  # of an action of the policy
    assert torch.equal(frames["labels"], frames["actions"])


def stores_with(interventions: bool) -> ReplayStores:
    demos = ReplayBuffer(100, 10**9)
    demos.add_frames(intervened(frames_of(corrected_rollout())))
    return ReplayStores(ReplayBuffer(100, 10**9), demos, interventions)


@pytest.mark.parametrize(("interventions", "demonstrations"), [(False, 5), (True, 10)])
def test_interventions_are_added_to_both_stores_and_restored(interventions: bool, demonstrations: int) -> None:
    stores, again = stores_with(interventions), stores_with(interventions)
    assert stores.add(corrected_rollout()) == len(stores.online) == 16
    assert stores.demos is not None and again.demos is not None
    assert len(stores.demos) == demonstrations
    again.load_state({name: tensor.clone() for name, tensor in stores.state().items()})
    assert (len(again.online), len(again.demos)) == (16, demonstrations)
    draws = [one.demos.draw(20, torch.Generator().manual_seed(0)) for one in (stores, again)]
    assert torch.equal(*(one.demos.column("labels", at) for one, at in zip((stores, again), draws, strict=True)))
    other = stores_with(interventions)
    assert other.demos is not None
    other.demos.add_frames(intervened(frames_of(corrected_rollout())))
    with raises_code("replay-other-demos", CheckpointError):
        ReplayStores(other.online, other.demos, interventions).load_state(stores.state())


def test_a_run_that_was_not_corrected_can_be_from_now_on() -> None:
    before, after = stores_with(False), stores_with(True)
    before.add(corrected_rollout())
    after.load_state(before.state())
    assert after.demos is not None and (len(after.online), len(after.demos)) == (16, 5)
