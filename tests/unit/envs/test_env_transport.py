import dataclasses
import itertools
import json
import os

import numpy as np
import pytest
from expect import raises_code

from embodrl.envs.pool.transport import (
    INSTRUCTION_BYTES,
    POISON_BYTE,
    ResultSlot,
    Ring,
    compute_layout,
    copy_step,
    spec_from_dict,
    spec_to_dict,
)
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import EmbodrlError, EnvProtocolError
from embodrl.types import CameraSpec, EnvSpec

SPEC = EnvSpec(3, (CameraSpec("a", 5, 7), CameraSpec("b", 5, 7)), 2, 4, (-1.0,) * 4, (1.0,) * 4, 6, ("t0", "t1"))


def toy_step(num_envs=3, max_episode_steps=2, **kwargs):
    env = ToyVectorEnv(
        num_envs=num_envs, image_size=8, max_episode_steps=max_episode_steps, include_state=True, **kwargs
    )
    env.reset(np.arange(num_envs), np.arange(num_envs, dtype=np.int32) % 2, np.arange(num_envs))
    return env, env.chunk_step(np.zeros((num_envs, 3, 7), np.float32), np.ones(num_envs, bool))


def test_arrays_are_aligned_and_do_not_overlap():
    layout = compute_layout(SPEC)
    assert layout.request["actions"] == (0, (3, 6, 4), np.float32)  # 288 bytes, so the next starts at 320
    assert layout.request["active"][0] == 320
    assert layout.request["seeds"][0] == 384
    assert layout.slots[0]["images"][1] == (3, 2, 5, 7, 3)
    spans = sorted(
        (offset, offset + int(np.prod(shape)) * np.dtype(dtype).itemsize)
        for fields in (layout.request, *layout.slots)
        for offset, shape, dtype in fields.values()
    )
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.num_bytes
    assert len(layout.slots) == 2


def test_cameras_of_different_size_are_refused_by_name():
    spec = dataclasses.replace(SPEC, cameras=(CameraSpec("front", 5, 7), CameraSpec("wrist", 8, 7)))
    with raises_code("camera-sizes", EmbodrlError, "front 5x7", "wrist 8x7"):
        compute_layout(spec)


def test_a_step_comes_out_as_it_went_in():
    env, step = toy_step()
    assert step.final_mask.all()
    slot = ResultSlot.allocate(env.spec)
    slot.write_step(step)
    back = slot.step(3)
    for name in ("reward", "valid", "terminated", "truncated", "success", "episode_return", "episode_length"):
        np.testing.assert_array_equal(getattr(back, name), getattr(step, name), err_msg=name)
    np.testing.assert_array_equal(back.episode_seed, [0, 1, 2])
    for got, put in ((back.observation, step.observation), (back.final_observation, step.final_observation)):
        np.testing.assert_array_equal(got.images, put.images)
        np.testing.assert_array_equal(got.state, put.state)
        np.testing.assert_array_equal(got.task_id, put.task_id)
        assert got.instruction == put.instruction


def test_only_final_rows_are_written():
    env, step = toy_step()
    slot = ResultSlot.allocate(env.spec)
    step.final_mask[:] = [False, True, False]
    step.final_observation.state[:] = 7.0
    slot.write_step(step)
    np.testing.assert_array_equal(slot.arrays["final_state"][:, 0], [0, 7, 0])


def test_rows_share_memory_with_their_batch():
    spec = ToyVectorEnv(num_envs=4, image_size=8, include_state=True).spec
    batch = ResultSlot.allocate(spec)
    _, step = toy_step(num_envs=2)
    batch.rows(2, 4).write_step(step)
    back = batch.step(3)
    np.testing.assert_array_equal(back.observation.images[2:], step.observation.images)
    assert not back.observation.images[:2].any()
    assert back.observation.instruction == ["", "", *step.observation.instruction]


def test_copy_survives_the_poison_and_a_view_does_not():
    env, step = toy_step()
    slot = ResultSlot.allocate(env.spec)
    slot.write_step(step)
    view, private = slot.step(3), copy_step(slot.step(3))
    slot.poison()
    assert np.isnan(view.reward).all()
    assert (view.observation.images == POISON_BYTE).all()
    np.testing.assert_array_equal(private.reward, step.reward)
    np.testing.assert_array_equal(private.observation.images, step.observation.images)
    slot.write_step(step)
    assert slot.step(3).observation.instruction == step.observation.instruction


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda step: setattr(step, "reward", step.reward.astype(np.float64)), ["reward", "float64[3, 3]"]),
        (lambda step: setattr(step, "success", step.success[:2]), ["success", "bool[2]", "bool[3]"]),
        (lambda step: setattr(step.observation, "images", step.observation.images[:, :, 1:]), ["images"]),
        (lambda step: setattr(step.observation, "state", step.observation.state.tolist()), ["state", "list"]),
        (lambda step: setattr(step.observation, "instruction", ["one"]), [1, 3]),
        (lambda step: setattr(step, "final_observation", None), ["final_observation"]),
    ],
)
def test_a_result_that_breaks_the_spec_is_refused(change, names):
    env, step = toy_step()
    change(step)
    with raises_code("env-step-result", EmbodrlError, *names):
        ResultSlot.allocate(env.spec).write_step(step)


def test_instruction_length_is_counted_in_bytes():
    env, step = toy_step()
    slot = ResultSlot.allocate(env.spec)
    step.observation.instruction = ["ü" * (INSTRUCTION_BYTES // 2), "", "ok"]
    slot.write_observation(step.observation)
    assert slot.observation().instruction == step.observation.instruction
    step.observation.instruction = ["ok", "ü" * (INSTRUCTION_BYTES // 2) + "a", "ok"]
    with raises_code("env-step-result", EmbodrlError, INSTRUCTION_BYTES + 1):
        slot.write_observation(step.observation)
    step.observation.instruction = ["ü" * (INSTRUCTION_BYTES // 2), "", "ok"]
    slot.write_observation(step.observation)
    assert slot.observation().instruction == step.observation.instruction


def test_spec_survives_json():
    assert spec_from_dict(json.loads(json.dumps(spec_to_dict(SPEC)))) == SPEC


def test_numpys_numbers_in_a_spec_are_plain_numbers_on_the_other_side():
    spec = dataclasses.replace(SPEC, num_envs=np.int64(3), action_low=list(-np.ones(4)), tasks=["t0", "t1"])
    spec = dataclasses.replace(spec, control_hz=np.float32(20), state_dim=np.int32(2))
    assert spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))) == SPEC


def test_every_field_of_a_spec_is_checked():
    good = json.loads(json.dumps(spec_to_dict(SPEC)))
    odd = [None, -1, 0, 2**70, 1.5, float("nan"), True, "x", [], {}, [[]], ["x", 1], {"name": 1}, [{"name": "a"}]]
    refused = 0
    for name in good:
        for value in odd:
            try:
                spec = spec_from_dict({**good, name: value})
            except EnvProtocolError as error:
                refused += 1
                assert f"'{name}" in error.message or f".{name}" in error.message or name in error.message
            else:
                compute_layout(spec)
    assert refused > 100
    for content in (None, [], "spec", {}):
        with raises_code("env-protocol"):
            spec_from_dict(content)


def test_memory_of_another_size_is_not_mapped():
    def memory(size):
        found = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(found, 0, size)
        return found

    num_bytes = compute_layout(SPEC).num_bytes
    small, sparse, whole = memory(num_bytes - 1), memory(4096), memory(num_bytes)
    os.ftruncate(sparse, num_bytes * 2)
    for bad in (small, sparse):
        with raises_code("env-protocol"):
            Ring(bad, SPEC, seal=True)
    Ring(whole, SPEC, seal=True)
    with pytest.raises(PermissionError):
        os.ftruncate(whole, 0)
    for descriptor in (small, sparse, whole):
        os.close(descriptor)
