"""model.center_crop: what the policy sees is the middle 90 % of the area of each camera's picture."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_families import FAMILIES, STATE_DIM, TEXTS, TOKEN_FAMILIES, build, generator

from embodrl.specs import MODELS
from embodrl.types import Observation, SamplingParams

SIZE = 16
SEVERAL = [family for family in FAMILIES if MODELS.entry(family).max_cameras > 1 and family in TOKEN_FAMILIES]


def ramp(start: float, step: float, upright: bool, scale: float = 1.0) -> NDArray[np.float64]:
    """Return ``[H,W,3]``, linear along one side; ``scale`` shrinks it about the middle."""
    middle = (SIZE - 1) / 2
    line = start + step * (middle + (np.arange(SIZE) - middle) * scale)
    picture = np.broadcast_to(line[:, None] if upright else line[None], (SIZE, SIZE))
    return np.repeat(picture[..., None], 3, axis=2)


def observed(ramps: list[list[tuple[float, float, bool]]]) -> Observation:
    """Return an observation whose rows have a ramp for each camera."""
    images = np.stack([np.stack([ramp(*camera) for camera in row]) for row in ramps]).astype(np.uint8)
    batch = len(ramps)
    return Observation(images, np.zeros((batch, STATE_DIM), np.float32), list(TEXTS[:batch]), np.zeros(batch, np.int32))


def cropped(ramps: list[list[tuple[float, float, bool]]], scale: float) -> NDArray[np.float64]:
    return np.stack([np.stack([ramp(*camera, scale=scale) for camera in row]) for row in ramps])


ONE = [[(10, 14, False)], [(40, 10, True)]]
TWO = [[(10, 14, False), (30, 8, True)], [(40, 10, True), (200, -9, False)]]
SCALES = [(True, math.sqrt(0.9)), (False, 1.0)]


@pytest.mark.parametrize(("crop", "scale"), SCALES)
@pytest.mark.parametrize("family", TOKEN_FAMILIES)
def test_one_camera(family: str, crop: bool, scale: float):
    policy = build(family, center_crop=crop)
    rollout = policy.predict_action_batch(observed(ONE), "train", SamplingParams(), generator())
    wanted = cropped(ONE, scale)
    for inputs in (rollout.forward_inputs, policy.sft_inputs(observed(ONE), torch.zeros(2, 2, 7))):
        found = inputs["images"].numpy().reshape(wanted.shape)
        assert np.abs(found - wanted).max() <= 0.51


@pytest.mark.parametrize(("crop", "scale"), SCALES)
@pytest.mark.parametrize("family", SEVERAL)
def test_several_cameras(family: str, crop: bool, scale: float):
    """Each picture is cropped by itself and stays in its row and place."""
    policy = build(family, center_crop=crop)
    found = policy.preprocess(observed(TWO))["images"].numpy()
    assert np.abs(found - cropped(TWO, scale)).max() <= 0.51


def test_the_larger_picture_is_shrunk_to_the_models_size_first():
    policy = build("openvla", center_crop=True)
    small = observed(ONE)
    large = Observation(small.images.repeat(4, axis=2).repeat(4, axis=3), small.state, small.instruction, small.task_id)
    found = policy.preprocess(large)["images"].numpy().reshape(2, SIZE, SIZE, 3)[:, 4:-4, 4:-4]
    assert np.abs(found - cropped(ONE, math.sqrt(0.9))[:, 0, 4:-4, 4:-4]).max() <= 2
