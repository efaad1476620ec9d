"""Filters and JPEG of OpenVLA's LIBERO evaluation, against Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from expect import raises_code
from PIL import Image

from embodrl.config import load_config
from embodrl.models.common.images import jpeg_and_back, resize_lanczos3
from embodrl.models.openvla import spec
from embodrl.models.openvla.processing import Pictures

PICTURES = np.random.default_rng(0).integers(0, 256, (2, 48, 40, 3)).astype(np.uint8)


def test_lanczos3_rounds_once():
    """Pillow filters float images without rounding in between, as TensorFlow does."""
    for height, width in ((20, 24), (60, 56)):
        found = resize_lanczos3(torch.from_numpy(PICTURES), height, width).numpy()
        for picture, resized in zip(PICTURES, found, strict=True):
            channels = [Image.fromarray(picture[..., c].astype(np.float32)) for c in range(3)]
            exact = [np.asarray(one.resize((width, height), Image.Resampling.LANCZOS)) for one in channels]
            wanted = np.clip(np.round(np.stack(exact, axis=-1)), 0, 255)
            assert (resized == wanted).mean() > 0.999 and np.abs(resized - wanted).max() <= 1


def test_jpeg_is_that_of_pillow_at_quality_95():
    file = io.BytesIO()
    Image.fromarray(PICTURES[1]).save(file, "JPEG", quality=95)
    found = jpeg_and_back(torch.from_numpy(PICTURES)).numpy()
    np.testing.assert_array_equal(found[1], np.asarray(Image.open(file)))
    assert np.abs(found.astype(int) - PICTURES).mean() > 1


def test_the_steps_come_in_the_order_of_the_evaluation():
    images = torch.from_numpy(PICTURES)
    both = Pictures(resize_filter="lanczos3", jpeg=True).prepare(images, 16)
    assert torch.equal(both, resize_lanczos3(jpeg_and_back(images), 16, 16))
    assert not torch.equal(both, Pictures().prepare(images, 16))


def test_jpeg_needs_pillow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spec.importlib.util, "find_spec", lambda name: None)
    with raises_code("jpeg-has-a-codec"):
        load_config(["env=toy", "model=openvla", "model.jpeg=true"])
